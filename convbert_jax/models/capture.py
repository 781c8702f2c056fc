"""Optional capture of intermediate activations, free when not requested.

    hidden, seen = model.encode(tokens, segment_ids, type_ids, capture=("attention", "filters"))
    seen[0]["attention"][3]  # layer 3 of the first stage, [B, H, L, L]

Captured values are computed separately; the layer itself still runs its fused kernels.
"""

from collections.abc import Callable, Collection

from jaxtyping import Array


class Capture:
    """Collects the requested activations of one layer; created per layer, inside the layer scan.

    A mixer receives a `Capture` or None, and offers the activations that it has:

        if capture is not None:
            capture.offer("filters", lambda: filters_of(query, span_key))

    Attributes:
      seen: Captured arrays by name, for the names that were both requested and offered.
      offered: All offered names.
    """

    def __init__(self, wanted: Collection[str]):
        self._wanted = frozenset(wanted)
        self.seen: dict[str, Array] = {}
        self.offered: set[str] = set()

    def offer(self, name: str, make: Callable[[], Array]) -> None:
        """Record `name` as offered, and store `make()` if `name` was requested."""
        self.offered.add(name)
        if name in self._wanted:
            self.seen[name] = make()
