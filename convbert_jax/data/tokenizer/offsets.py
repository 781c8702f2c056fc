"""Token offsets: map each token to its characters in the original text.

Vocabularies encode normalized text (other case, no accents, ligatures split) but report offsets in
the original text. This module adjusts these offsets so that a span of tokens is a clean substring.
"""

import functools
import sys
import unicodedata

import numpy as np


def fit(text: str, offsets) -> np.ndarray:
    """Adjusts token offsets to visible characters.

    No token begins or ends with white space or an invisible character. Marks (accents) stay with
    the preceding character. A character that is split into several tokens belongs to all of them.
    A token without visible characters is empty.

    Args:
      offsets: (begin, end) pairs from the vocabulary, in characters of `text`.

    Returns:
      [n, 2] int32: begin and end (exclusive) of each token in `text`; both never decrease.
    """
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    if not len(pairs):
        return pairs.astype(np.int32)
    kinds = _kinds()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    places = np.arange(len(kinds) + 1)
    visible = np.append(kinds != _HIDDEN, True)
    bare = np.append(kinds != _MARK, True)
    next_visible = _next(places, visible)
    next_bare = _next(places, bare)
    # Exclusive end of the last visible character before each place.
    before = np.maximum.accumulate(np.where(visible, places + 1, 0))
    after_visible = np.concatenate([[0], before[:-1]])

    begin, end = pairs.T
    begin = np.minimum(next_visible[begin], np.maximum(begin, end))
    # A token that is part of a character is reported as empty.
    whole = (pairs[:, 0] == pairs[:, 1]) & (begin < len(kinds)) & visible[begin]
    end = np.where(whole, end + 1, np.maximum(after_visible[end], begin))
    end = np.where(end > begin, next_bare[end], end)
    return np.maximum.accumulate(np.stack([begin, end], axis=1), axis=0).astype(np.int32)


def cover(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """Returns (first, last) token that overlap the characters [begin, end), or None."""
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


_HIDDEN, _MARK = 1, 2


@functools.cache
def _kinds() -> np.ndarray:
    """Returns the kind of each code point: _HIDDEN (white space, control), _MARK or 0."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category[0] == "Z" or category in ("Cc", "Cf"):
            kinds[code] = _HIDDEN
        elif category[0] == "M":
            kinds[code] = _MARK
    return kinds


def _next(places: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the nearest wanted place at or after each place; the last one is always wanted."""
    found = np.where(wanted, places, len(places) - 1)
    return np.minimum.accumulate(found[::-1])[::-1]
