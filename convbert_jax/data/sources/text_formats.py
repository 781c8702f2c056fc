"""Formats of text files: lines to documents, both as (byte offset, bytes), in bounded memory."""

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
    """Documents separated by blank lines."""
    return _join(lines, ends=lambda line: not line.strip())


def _join(lines: Lines, ends: Callable[[bytes], bool]) -> Lines:
    """Lines put together up to one that `ends` a document, or to its greatest length."""
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
    """What stands between `<doc …>` and `</doc>` lines; the title is the first line of it."""
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
    """The format of a file by its name and its beginning, "" of one that is empty."""
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
    if not line.startswith(b"{") or (not end and len(head) > LONGEST // 2):  # cut off, maybe
        return False
    try:
        return isinstance(json.loads(line.decode(encoding)), dict)
    except (ValueError, RecursionError):
        return False


def refuse_other_kinds(path: Path) -> None:
    """Raises DataError for a file that begins as parquet or packed files do, or as no text does.

    Decoded with replacements, as the advice for bad text goes, it would be a corpus of noise.
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
            return  # damaged, which its reader says with the place
    kind = next((kind for start, kind in BEGINNINGS.items() if head.startswith(start)), "")
    if kind:
        advice = {
            "parquet": f"name it as parquet:{path}",
            "gzip": "give it a name that ends in .gz",
        }
        advice = "unpack it" if packed else advice.get(kind, "unpack it")
        raise DataError(f"{path} is a {kind} file and no text; {advice}.", path=path)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16, not UTF-8; convert it (iconv -f UTF-16).", path=path)
    if head.count(0) > len(head) // 8:  # ASCII in UTF-16 is half of zeros, and valid UTF-8
        raise DataError(
            f"{path} is no text, or UTF-16 without its mark; convert it (iconv -f UTF-16LE).",
            path=path,
        )


def read_lines(file, start: int, stop: int, limit: int, encoding: str) -> Lines:
    """Lines of bytes `start` to `stop` (-1: all); one longer than `limit` is cut at white space, or
    else between two characters of `encoding`.
    """
    offset, rest = start, b""
    while stop < 0 or offset < stop:
        line = rest + file.readline(limit - len(rest))
        if not line:
            return
        rest = b""
        if len(line) >= limit and not line.endswith(b"\n"):
            cut = max(line.rfind(b" ", limit // 2), line.rfind(b"\t", limit // 2)) + 1
            if not cut:  # before a character of which only some bytes are in the line
                decoder = codecs.getincrementaldecoder(encoding)("replace")
                decoder.decode(line)
                cut = limit - len(decoder.getstate()[0])
            line, rest = line[:cut], line[cut:]
        if offset == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                f"{file.name} is UTF-16, not UTF-8; convert it (iconv -f UTF-16).", path=file.name
            )
        yield offset, line.removeprefix(BOM) if offset == 0 else line
        offset += len(line)


def describe_bad_text(path: Path, encoding: str) -> str:
    """How many places of a file cannot be decoded, where the first is and what the encoding may be,
    for an error.
    """
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
    advice = f"set config.data.encoding={guess}" if guess else "set config.data.encoding"
    return (
        f"{path} is not {encoding} in {count} places, first in {first}"
        f"{guess and f', and looks like {guess}'}; {advice}, or config.data.encoding_errors to "
        "'replace' or 'skip'."
    )


def _first_bad_byte(line: bytes, encoding: str) -> int:
    try:
        line.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start
    return len(line)
