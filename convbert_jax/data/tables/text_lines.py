"""Lines of a file or of a stream, as text with their numbers from 1."""

import contextlib
import dataclasses
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.encodings import guess_encoding

LONGEST_LINE = 1 << 26  # bytes; what is longer is no line of text
Lines = Iterator[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Bytes without a path, as those of standard input."""

    name: str  # for errors
    file: IO[bytes]

    def __str__(self) -> str:
        return self.name


def open_bytes(path: Path):
    """`path` for reading, decompressed where its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def decode_lines(source: Path | Stream, encoding: str, *, escape: bool = False) -> Lines:
    """Each line as it comes, without its end; a byte order mark is dropped.

    Args:
      source: a path that ends in .gz is decompressed.
      escape: bytes that are not of `encoding` become lone surrogates, which `describe_escapes`
        finds, instead of an error.

    Raises:
      DataError: unreadable, a damaged gzip file, a line of more than LONGEST_LINE, an unknown
        encoding, or bytes that are not of it.
    """
    number = 0
    try:
        with (
            open_bytes(source) if isinstance(source, Path) else contextlib.nullcontext(source.file)
        ) as opened:
            # Only \n ends a line: texts hold other characters that Python takes for line ends.
            while data := opened.readline(LONGEST_LINE):
                number += 1
                if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
                    raise DataError(
                        f"{source} line {number} has more than {LONGEST_LINE >> 20} MiB, which no "
                        "line of text has; check the file.",
                        path=str(source),
                        line=number,
                    )
                if number == 1 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(
                        f"{source} is UTF-16; convert it (iconv -f UTF-16 -t UTF-8).",
                        path=str(source),
                    )
                line = _decode(data, encoding, escape, source, number).rstrip("\r\n")
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{source} is a damaged gzip file ({error}); fetch it again.", path=str(source)
        ) from None
    except LookupError:
        raise DataError(
            f"encoding '{encoding}' is unknown; try utf-8 or iso-8859-1.", value=encoding
        ) from None
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.", path=str(source)) from None


def without_last_blanks(lines: Lines) -> Lines:
    """The lines up to the last one that is not blank."""
    blanks = []
    for number, line in lines:
        if line.strip():
            yield from blanks
            blanks.clear()
            yield number, line
        else:
            blanks.append((number, ""))


def describe_escapes(text: str, encoding: str = "utf-8") -> str:
    """Where `text` has a byte that is not of `encoding`, or half of a surrogate pair, as JSON may
    spell one; to follow "FILE line N"; "" if nowhere.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if not 0xDC80 <= code <= 0xDCFF:  # what an undecodable byte becomes
            return f"has half of a surrogate pair at character {error.start}, which is no text"
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
            f"0x{data[error.start]:02X}){guess and f', but looks like {guess}'}; set its encoding "
            "or convert the file.",
            value=encoding,
            path=str(source),
            line=number,
        ) from None
