"""Reads the lines of a file or stream as text, numbered from 1."""

import contextlib
import dataclasses
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.encodings import guess_encoding

LONGEST_LINE = 1 << 26  # bytes; longer lines are an error
Lines = Iterator[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A byte stream without a path, for example standard input."""

    name: str  # for error messages
    file: IO[bytes]

    def __str__(self) -> str:
        return self.name


def open_bytes(path: Path):
    """Opens `path` for reading bytes, decompressed if its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def decode_lines(source: Path | Stream, encoding: str, *, escape: bool = False) -> Lines:
    """Yields (number, line) without line ends and without a byte order mark.

    Args:
      source: a path that ends in .gz is decompressed.
      escape: whether invalid bytes become lone surrogates, which `describe_escapes` finds, instead
        of an error.

    Raises:
      DataError: unreadable source, damaged gzip file, line longer than LONGEST_LINE, unknown
        encoding, or invalid bytes.
    """
    number = 0
    try:
        with (
            open_bytes(source) if isinstance(source, Path) else contextlib.nullcontext(source.file)
        ) as opened:
            # Only \n ends a line: texts may contain other characters that str.splitlines splits at.
            while data := opened.readline(LONGEST_LINE):
                number += 1
                if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
                    raise DataError(
                        f"{source} line {number} is longer than {LONGEST_LINE >> 20} MiB. Check "
                        "the file.",
                        path=str(source),
                        line=number,
                    )
                if number == 1 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(
                        f"{source} is UTF-16. Convert it (iconv -f UTF-16 -t UTF-8).",
                        path=str(source),
                    )
                line = _decode(data, encoding, escape, source, number).rstrip("\r\n")
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{source} is a damaged gzip file ({error}). Download it again.", path=str(source)
        ) from None
    except LookupError:
        raise DataError(
            f"Unknown encoding '{encoding}'. Try utf-8 or iso-8859-1.", value=encoding
        ) from None
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.", path=str(source)) from None


def without_last_blanks(lines: Lines) -> Lines:
    """Yields the lines without trailing blank lines."""
    blanks = []
    for number, line in lines:
        if line.strip():
            yield from blanks
            blanks.clear()
            yield number, line
        else:
            blanks.append((number, ""))


def describe_escapes(text: str, encoding: str = "utf-8") -> str:
    """Describes the first invalid byte or unpaired surrogate (from a JSON escape) in `text`.

    Returns:
      A predicate for "FILE line N", or "" if the text is valid.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if not 0xDC80 <= code <= 0xDCFF:  # not an invalid byte decoded with surrogateescape
            return f"contains an unpaired surrogate at character {error.start}"
        place = len(text[: error.start].encode("utf-8"))
        return f"is not {encoding} (byte {place} is 0x{code & 0xFF:02X})"
    return ""


def _decode(data: bytes, encoding: str, escape: bool, source: Path | Stream, number: int) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if escape:
            return data.decode(encoding, "surrogateescape")
        guess = guess_encoding(data)
        raise DataError(
            f"{source} line {number} is not {encoding} (byte {error.start} of the line is "
            f"0x{data[error.start]:02X}){guess and f', but looks like {guess}'}. Set the encoding "
            "or convert the file.",
            value=encoding,
            path=str(source),
            line=number,
        ) from None
