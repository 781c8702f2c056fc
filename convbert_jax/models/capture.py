"""What layers saw, handed out when it is asked for and at no cost when it is not.

    hidden, seen = model.encode(tokens, segment_ids, type_ids, capture=("attention", "filters"))
    seen[0]["attention"][3]  # of layer 3 of the first stage, [B, H, L, L]

What is handed out is computed beside the layer's own arithmetic, which stays as it is, with its
fused kernels.
"""

from collections.abc import Callable, Collection

from jaxtyping import Array


class Capture:
    """What one layer hands out; made anew for each layer, inside of the scan over layers.

    A mixer is called with one, or with None, and offers what it has:

        if capture is not None:
            capture.offer("filters", lambda: filters_of(query, span_key))

    Attributes:
      seen: name -> array, of what was wanted and offered.
      offered: all names that were.
    """

    def __init__(self, wanted: Collection[str]):
        self._wanted = frozenset(wanted)
        self.seen: dict[str, Array] = {}
        self.offered: set[str] = set()

    def offer(self, name: str, make: Callable[[], Array]) -> None:
        """`make` is called if `name` is wanted."""
        self.offered.add(name)
        if name in self._wanted:
            self.seen[name] = make()
