"""Where in its text every token stands, so that a span of tokens is again a piece of that text.

A vocabulary sees normalized text: other case, no accents, ligatures taken apart. What it reports
are places in the original text, and this file makes them fit what a reader would cut out.
"""

import functools
import sys
import unicodedata

import numpy as np


def fit(text: str, offsets) -> np.ndarray:
    """Token offsets as [n, 2] int32 of (first character, one past the last one) in `text`.

    No token begins or ends with white space or an invisible character, marks (accents) stay with
    the character before them, and a character that became several tokens belongs to all of them.
    A token of nothing visible is empty. Both columns never decrease.

    Args:
      offsets: pairs as the vocabulary reports them, in characters of `text`.
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
    # One past the last visible character before each place.
    before = np.maximum.accumulate(np.where(visible, places + 1, 0))
    after_visible = np.concatenate([[0], before[:-1]])

    begin, end = pairs.T
    begin = np.minimum(next_visible[begin], np.maximum(begin, end))
    # A piece of a character that became several is reported as empty.
    whole = (pairs[:, 0] == pairs[:, 1]) & (begin < len(kinds)) & visible[begin]
    end = np.where(whole, end + 1, np.maximum(after_visible[end], begin))
    end = np.where(end > begin, next_bare[end], end)
    return np.maximum.accumulate(np.stack([begin, end], axis=1), axis=0).astype(np.int32)


def cover(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """(first, last) of the tokens that share a character with [begin, end); None if none does."""
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


_HIDDEN, _MARK = 1, 2


@functools.cache
def _kinds() -> np.ndarray:
    """For each code point: white space and control characters, marks, or 0."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category[0] == "Z" or category in ("Cc", "Cf"):
            kinds[code] = _HIDDEN
        elif category[0] == "M":
            kinds[code] = _MARK
    return kinds


def _next(places: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each place the nearest one at or after it that is wanted; the last one always is."""
    found = np.where(wanted, places, len(places) - 1)
    return np.minimum.accumulate(found[::-1])[::-1]
