"""Dynamic convolution filters of one word in different contexts."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

_BESIDE = 22  # characters shown on each side of the word


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """An occurrence of a word.

    Attributes:
      text: index of the text.
      token: position of the word's first token in the model's input, where [CLS] is 0.
      snippet: the word in its context.
    """

    text: int
    token: int
    snippet: str


@dataclasses.dataclass(frozen=True)
class LayerFilters:
    """Filters of one layer.

    Attributes:
      layer: index over all stages, from 0.
      filters: [occurrences, H, K]; tap i reads at offset i - K // 2. Each filter sums to 1.
    """

    layer: int
    filters: np.ndarray


def find(word: str, number: int, text: str, places: np.ndarray) -> list[Occurrence]:
    """Finds all occurrences of `word` as a whole word in a text, ignoring case.

    Args:
      number: index of the text.
      places: [n, 2] start and end (exclusive) of each input token in characters, without [CLS].
    """
    found = []
    for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
        (covering,) = np.nonzero((places[:, 0] <= match.start()) & (match.start() < places[:, 1]))
        if len(covering):
            snippet = _cut_out(text, match.start(), match.end())
            # The last match, because a token for the space can cover the same character.
            found.append(Occurrence(number, int(covering[-1]) + 1, snippet))
    return found


def _cut_out(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - _BESIDE) : start], text[end : end + _BESIDE]
    before = ("…" if start > _BESIDE else "") + before
    after += "…" if end + _BESIDE < len(text) else ""
    return " ".join(f"{before}{text[start:end].upper()}{after}".split())


def spread(filters: np.ndarray) -> np.ndarray:
    """Computes the share of filter weight that depends on the context.

    This is the mean total variation distance to the mean filter: half the sum over taps of
    |filter - mean filter|, averaged over occurrences.

    Args:
      filters: [occurrences, H, K].

    Returns:
      [H], from 0 (the same filter everywhere) to below 1.
    """
    return np.abs(filters - filters.mean(0)).sum(-1).mean(0) / 2


def chosen_layers(layers: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Chooses the layers to draw: those in `asked`, or the first, middle and last."""
    if asked:
        return [layer for layer in layers if layer in asked]
    places = {0, len(layers) // 2, len(layers) - 1}
    return [layers[place] for place in sorted(places) if layers]
