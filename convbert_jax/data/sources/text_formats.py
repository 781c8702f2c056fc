"""Formats of text files: join lines into documents in bounded memory.

Lines and documents are (byte offset, bytes).
"""

import codecs
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from convbert_jax.data.errors import DataError
from convbert_jax.data.sources.documents import LONGEST, bad_places
from convbert_jax.data.tables.encodings import SAMPLE_BYTES, guess_encoding
from convbert_jax.data.tables.text_lines import open_bytes

BOM = b"\xef\xbb\xbf"
TABLES = ("csv", "tsv")
BEGINNINGS = {
    b"PAR1": "parquet",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}
Lines = Iterator[tuple[int, bytes]]


def _paragraphs(lines: Lines) -> Lines:
    """Yields documents separated by blank lines."""
    return _join(lines, ends=lambda line: not line.strip())


def _join(lines: Lines, ends: Callable[[bytes], bool]) -> Lines:
    """Joins lines up to a line that `ends` a document, or up to LONGEST bytes."""
    start, parts, size = 0, [], 0
    for offset, line in lines:
        end = ends(line)
        if parts and (end or size + len(line) > LONGEST):
            yield start, b"".join(parts)
            parts, size = [], 0
        if not end:
            start = start if parts else offset
            parts.append(line)
            size += len(line)
    if parts:
        yield start, b"".join(parts)


def _wikiextractor(lines: Lines) -> Lines:
    """Yields the text between `<doc …>` and `</doc>` lines, title included."""
    inside = False

    def marks(line: bytes) -> bool:
        nonlocal inside
        if line.startswith((b"<doc ", b"</doc>")):
            inside = line.startswith(b"<doc ")
            return True
        return not inside

    return _join(lines, marks)


FORMATS = {
    "blank_lines": _paragraphs,
    "lines": lambda lines: lines,
    "jsonl": lambda lines: lines,
    "wikiextractor": _wikiextractor,
    "file": lambda lines: _join(lines, ends=lambda line: False),
}


def detect_format(path: Path, encoding: str) -> str:
    """Returns the format of a file by its suffix and first bytes, or "" if it is empty."""
    ending = (path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix).lower()
    if ending[1:] in TABLES:
        return ending[1:]
    with open_bytes(path) as file:
        try:
            head = file.read(LONGEST).removeprefix(BOM).strip()
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}.", path=path) from None
    if not head:
        return ""
    if ending in (".jsonl", ".ndjson", ".json") or _begins_as_jsonl(head, encoding):
        return "jsonl"
    if head.startswith(b"<doc "):
        return "wikiextractor"
    blank = any(not line.strip() for line in head.split(b"\n"))
    return "blank_lines" if blank else "lines"


def _begins_as_jsonl(head: bytes, encoding: str) -> bool:
    line, end, _ = head.partition(b"\n")
    if not line.startswith(b"{") or (not end and len(head) > LONGEST // 2):  # maybe truncated
        return False
    try:
        return isinstance(json.loads(line.decode(encoding)), dict)
    except (ValueError, RecursionError):
        return False


def refuse_other_kinds(path: Path) -> None:
    """Raises DataError if a file is Parquet, compressed, UTF-16 or binary.

    With encoding_errors="replace", such a file would otherwise be read as noise.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4_096)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", path=path) from None
    packed = path.suffix == ".gz" and head.startswith(b"\x1f\x8b")
    if packed:
        try:
            with open_bytes(path) as file:
                head = file.read(4_096)
        except (OSError, EOFError, zlib.error):
            return  # damaged; the reader reports the place
    kind = next((kind for start, kind in BEGINNINGS.items() if head.startswith(start)), "")
    if kind:
        advice = {
            "parquet": f"Use parquet:{path}",
            "gzip": "Rename it to end in .gz",
        }
        advice = "Unpack it" if packed else advice.get(kind, "Unpack it")
        raise DataError(f"{path} is a {kind} file, not text. {advice}.", path=path)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16, not UTF-8. Convert it (iconv -f UTF-16).", path=path)
    if head.count(0) > len(head) // 8:  # half of UTF-16 ASCII is zeros, which are valid UTF-8
        raise DataError(
            f"{path} is binary, or UTF-16 without a byte order mark. Convert it (iconv -f "
            "UTF-16LE).",
            path=path,
        )


def read_lines(file, start: int, stop: int, limit: int, encoding: str) -> Lines:
    """Yields the lines of bytes `start` to `stop` (-1: to the end).

    A line longer than `limit` bytes is split at white space, or else between two characters of
    `encoding`.
    """
    offset, rest = start, b""
    while stop < 0 or offset < stop:
        line = rest + file.readline(limit - len(rest))
        if not line:
            return
        rest = b""
        if len(line) >= limit and not line.endswith(b"\n"):
            cut = max(line.rfind(b" ", limit // 2), line.rfind(b"\t", limit // 2)) + 1
            if not cut:  # before a character that is incomplete in the line
                decoder = codecs.getincrementaldecoder(encoding)("replace")
                decoder.decode(line)
                cut = limit - len(decoder.getstate()[0])
            line, rest = line[:cut], line[cut:]
        if offset == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                f"{file.name} is UTF-16, not UTF-8. Convert it (iconv -f UTF-16).", path=file.name
            )
        yield offset, line.removeprefix(BOM) if offset == 0 else line
        offset += len(line)


def describe_bad_text(path: Path, encoding: str) -> str:
    """Returns an error message with number and first place of invalid bytes and a likely fix."""
    count, first, number, sample = 0, "", 0, b""
    with open_bytes(path) as file:
        for offset, line in read_lines(file, 0, -1, LONGEST, encoding):
            number += 1
            if places := bad_places(line, encoding):
                if not count:
                    first = f"line {number} (byte {offset + _first_bad_byte(line, encoding)})"
                count += places
                sample += line if len(sample) < SAMPLE_BYTES else b""
    guess = guess_encoding(sample)
    advice = f"Set config.data.encoding={guess}" if guess else "Set config.data.encoding"
    return (
        f"{path} is not {encoding}: {count} invalid byte sequences, first in {first}"
        f"{guess and f'; it looks like {guess}'}. {advice}, or config.data.encoding_errors to "
        "'replace' or 'skip'."
    )


def _first_bad_byte(line: bytes, encoding: str) -> int:
    try:
        line.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start
    return len(line)
