"""Attention maps averaged over texts, and how much of them is near the diagonal."""

import dataclasses

import numpy as np

WINDOW = 4  # positions to each side: the reach of ConvBERT's filters, 9 taps


@dataclasses.dataclass(frozen=True)
class LayerMaps:
    """The maps of one layer.

    Attributes:
      layer: from 0, over all stages.
      mean: [H, L, L], query by key; of each pair of positions the mean over those texts that have
        both, NaN where none has. Short texts share their attention among fewer keys, so that a row
        of the mean need not add up to 1.
      concentration: [H], see `concentration`; the mean over all tokens of all texts.
    """

    layer: int
    mean: np.ndarray
    concentration: np.ndarray


def concentration(maps: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Diagonal concentration: the share of a token's attention that goes at most `window`
    positions away, the mean over tokens; in the spirit of figure 2 of ConvBERT (Jiang et al. 2020),
    by which many heads attend to their neighbors alone.

    A map that is the identity has 1. [CLS] and [SEP] are tokens as others are, as queries and as
    keys: a head that rests on [SEP] is below `chance`.

    Args:
      maps: [..., n, n], of a text without padding; the rows add up to 1.

    Returns:
      [...], from 0 to 1.
    """
    return (maps * _near(maps.shape[-1], window)).sum((-1, -2)) / maps.shape[-1]


def chance(length: int, window: int = WINDOW) -> float:
    """`concentration` of attention that is the same to all tokens of a text: its chance level,
    (number of pairs at most `window` apart) / length^2.
    """
    return float(_near(length, window).mean())


def _near(length: int, window: int) -> np.ndarray:
    places = np.arange(length)
    return np.abs(places[:, None] - places) <= window


class MapSums:
    """What the means of one model's layers are made from, text by text.

    Args:
      length: most tokens of a text.
      window: of `concentration`.
    """

    def __init__(self, length: int, window: int = WINDOW):
        self.window, self.length, self.texts, self.tokens = window, length, 0, 0
        self._counts = np.zeros((length, length))
        self._chance = 0.0
        self._sums: dict[int, np.ndarray] = {}
        self._near: dict[int, np.ndarray] = {}

    def add(self, maps: dict[int, np.ndarray]) -> None:
        """One text: layer -> its maps [H, n, n], without padding."""
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
        """`chance` of the same texts, the mean over all tokens."""
        return self._chance / self.tokens

    def layers(self) -> list[LayerMaps]:
        """The means, of positions up to the longest text."""
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
