"""Attention maps averaged over texts, and their diagonal concentration."""

import dataclasses

import numpy as np

WINDOW = 4  # positions on each side, as ConvBERT's filters of 9 taps


@dataclasses.dataclass(frozen=True)
class LayerMaps:
    """Attention maps of one layer.

    Attributes:
      layer: index over all stages, from 0.
      mean: [H, L, L], query by key: mean over the texts that have both positions, NaN if no text
        has them. Texts differ in length, so rows need not sum to 1.
      concentration: [H], see `concentration`; mean over all tokens of all texts.
    """

    layer: int
    mean: np.ndarray
    concentration: np.ndarray


def concentration(maps: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Computes diagonal concentration: the mean share of attention within `window` positions.

    It follows figure 2 of ConvBERT (Jiang et al. 2020), where many heads attend only to neighbors.
    The identity has 1. [CLS] and [SEP] count as ordinary queries and keys, so a head that attends
    to [SEP] is below `chance`.

    Args:
      maps: [..., n, n], maps of a text without padding; rows sum to 1.
      window: maximum distance in positions.

    Returns:
      [...], from 0 to 1.
    """
    return (maps * _near(maps.shape[-1], window)).sum((-1, -2)) / maps.shape[-1]


def chance(length: int, window: int = WINDOW) -> float:
    """Computes `concentration` of uniform attention over a text.

    This chance level is (number of pairs at most `window` apart) / length^2.
    """
    return float(_near(length, window).mean())


def _near(length: int, window: int) -> np.ndarray:
    places = np.arange(length)
    return np.abs(places[:, None] - places) <= window


class MapSums:
    """Accumulator of a model's attention maps over texts.

    Args:
      length: maximum number of tokens of a text.
      window: `window` of `concentration`.
    """

    def __init__(self, length: int, window: int = WINDOW):
        self.window, self.length, self.texts, self.tokens = window, length, 0, 0
        self._counts = np.zeros((length, length))
        self._chance = 0.0
        self._sums: dict[int, np.ndarray] = {}
        self._near: dict[int, np.ndarray] = {}

    def add(self, maps: dict[int, np.ndarray]) -> None:
        """Adds the maps of a text without padding: layer -> [H, n, n]."""
        n = next(iter(maps.values())).shape[-1]
        self.texts += 1
        self.tokens += n
        self._counts[:n, :n] += 1
        self._chance += n * chance(n, self.window)
        for layer, of_layer in maps.items():
            heads = len(of_layer)
            sums = self._sums.setdefault(layer, np.zeros((heads, self.length, self.length)))
            sums[:, :n, :n] += of_layer
            near = self._near.setdefault(layer, np.zeros(heads))
            near += n * concentration(of_layer, self.window)

    @property
    def chance(self) -> float:
        """Chance level of the added texts: mean of `chance` over all tokens."""
        return self._chance / self.tokens

    def layers(self) -> list[LayerMaps]:
        """Returns the means of all layers, up to the length of the longest text."""
        used = int(np.count_nonzero(self._counts[0]))
        counts = self._counts[:used, :used]
        with np.errstate(invalid="ignore"):
            return [
                LayerMaps(
                    layer,
                    np.where(counts > 0, sums[:, :used, :used] / counts, np.nan),
                    self._near[layer] / self.tokens,
                )
                for layer, sums in sorted(self._sums.items())
            ]
