"""Decoding and splitting of documents, and sizes of units."""

from collections import Counter
from collections.abc import Iterator

LONGEST = 1_000_000  # characters of a document; longer documents are split
UNIT_BYTES = 16_000_000
MOST_UNITS = 512  # limits the number of shards: larger corpora get larger units


def unit_bytes(total: int) -> int:
    """Returns the size of a unit, in bytes, for a corpus of `total` bytes of text."""
    return max(UNIT_BYTES, -(-total // MOST_UNITS))


def bad_places(data: bytes, encoding: str) -> int:
    """Counts the invalid byte sequences in `data`."""
    marks = (data.decode(encoding, policy).count("\ufffd") for policy in ("replace", "ignore"))
    return next(marks) - next(marks)  # subtracts the U+FFFD that the text itself contains


def decode(data: bytes, errors: str, tally: Counter | None, encoding: str = "utf-8") -> str | None:
    """Decodes `data` with the policy `errors` ("error", "replace" or "skip").

    Returns:
      The text, or None if the document is to be skipped.

    Raises:
      UnicodeDecodeError: `data` is invalid and `errors` is "error".
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        if errors == "error":
            raise
        if tally is not None:
            tally["undecodable"] += bad_places(data, encoding)
            tally["skipped"] += errors == "skip"
        return data.decode(encoding, "replace") if errors == "replace" else None


def clean(text: str) -> Iterator[str]:
    """Yields `text` as documents of at most `LONGEST` characters, split at white space."""
    # JSON escapes can produce lone surrogates, which UTF-8 cannot encode; they become "?".
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").strip()
    while len(text) > LONGEST:
        cut = max(text.rfind(space, LONGEST // 2, LONGEST) for space in " \n\t")
        cut = cut if cut > 0 else LONGEST
        yield text[:cut].rstrip()
        text = text[cut:].lstrip()
    if text:
        yield text


def cut_document(text: str, pieces: int) -> list[str]:
    """Splits `text` into about `pieces` equal parts at line ends, or else at spaces."""
    size, start, result = -(-len(text) // pieces), 0, []
    while start < len(text):
        stop = start + size
        found = (text.find(blank, stop - 1, stop + size // 2) for blank in "\n ")
        stop = next((place + 1 for place in found if place >= 0), stop)
        result.append(text[start:stop].strip())
        start = stop
    return [piece for piece in result if piece]
