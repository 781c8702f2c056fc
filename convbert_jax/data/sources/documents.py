"""Bytes to documents: decoding, cutting what is too long, and sizes of units."""

from collections import Counter
from collections.abc import Iterator

LONGEST = 1_000_000  # characters of a document; what is longer becomes several
UNIT_BYTES = 16_000_000
MOST_UNITS = 512  # larger corpora get larger units, so that shards stay few


def unit_bytes(total: int) -> int:
    """Size of a unit for a corpus of `total` bytes of text."""
    return max(UNIT_BYTES, -(-total // MOST_UNITS))


def bad_places(data: bytes, encoding: str) -> int:
    """Counts the places of `data` that cannot be decoded."""
    marks = (data.decode(encoding, policy).count("\ufffd") for policy in ("replace", "ignore"))
    return next(marks) - next(marks)  # without the marks that the text itself contains


def decode(data: bytes, errors: str, tally: Counter | None, encoding: str = "utf-8") -> str | None:
    """Text of `data` by the policy `errors` ("error", "replace" or "skip").

    Returns None where the document is to be left out. Raises UnicodeDecodeError under "error".
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
    """`text` as documents of at most `LONGEST` characters, cut at white space; none if blank."""
    # Lone surrogates, which JSON escapes can make, are not text; they become "?".
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").strip()
    while len(text) > LONGEST:
        cut = max(text.rfind(space, LONGEST // 2, LONGEST) for space in " \n\t")
        cut = cut if cut > 0 else LONGEST
        yield text[:cut].rstrip()
        text = text[cut:].lstrip()
    if text:
        yield text


def cut_document(text: str, pieces: int) -> list[str]:
    """`text` in about `pieces` pieces of equal size, cut at line ends or else at blanks."""
    size, start, result = -(-len(text) // pieces), 0, []
    while start < len(text):
        stop = start + size
        found = (text.find(blank, stop - 1, stop + size // 2) for blank in "\n ")
        stop = next((place + 1 for place in found if place >= 0), stop)
        result.append(text[start:stop].strip())
        start = stop
    return [piece for piece in result if piece]
