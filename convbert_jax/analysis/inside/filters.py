"""The filters of one word in different texts: as far as they differ, they know their context."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

_BESIDE = 22  # characters of a text that are shown to each side of the word


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """Where the word stands.

    Attributes:
      text: number of the text.
      token: of the word's first piece in the row that the model reads, [CLS] being 0.
      snippet: the word in its surroundings.
    """

    text: int
    token: int
    snippet: str


@dataclasses.dataclass(frozen=True)
class LayerFilters:
    """Those of one layer.

    Attributes:
      layer: from 0, over all stages.
      filters: [occurrences, H, K]; tap i reads i - K // 2 positions away; each adds up to 1.
    """

    layer: int
    filters: np.ndarray


def find(word: str, number: int, text: str, places: np.ndarray) -> list[Occurrence]:
    """Where `word` stands alone in a text, upper or lower case.

    Args:
      number: of the text.
      places: [n, 2], first character of each token and one past its last, of those that are read;
        [CLS] before them is not among them.
    """
    found = []
    for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
        (covering,) = np.nonzero((places[:, 0] <= match.start()) & (match.start() < places[:, 1]))
        if len(covering):
            snippet = _cut_out(text, match.start(), match.end())
            # The last, as before it a mark of the space may claim the same character.
            found.append(Occurrence(number, int(covering[-1]) + 1, snippet))
    return found


def _cut_out(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - _BESIDE) : start], text[end : end + _BESIDE]
    before = ("…" if start > _BESIDE else "") + before
    after += "…" if end + _BESIDE < len(text) else ""
    return " ".join(f"{before}{text[start:end].upper()}{after}".split())


def spread(filters: np.ndarray) -> np.ndarray:
    """How far a head's filters differ between occurrences: half the sum over taps of |filter - mean
    filter|, the mean over occurrences; the share of weight that the context moves.

    Args:
      filters: [occurrences, H, K].

    Returns:
      [H], from 0, where the filters are the same everywhere, to below 1.
    """
    return np.abs(filters - filters.mean(0)).sum(-1).mean(0) / 2


def chosen_layers(layers: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Those that are drawn: the ones that were asked for, else the first, middle and last."""
    if asked:
        return [layer for layer in layers if layer in asked]
    places = {0, len(layers) // 2, len(layers) - 1}
    return [layers[place] for place in sorted(places) if layers]
