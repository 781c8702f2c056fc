"""Lines of text of a file or stream, and the encoding of text that cannot be decoded."""

import contextlib
import dataclasses
import functools
import gzip
import operator
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from convbert_jax.data.errors import DataError

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


@contextlib.contextmanager
def read_errors(source: object) -> Iterator[None]:
    """Converts the errors of reading a file, which may be compressed, to DataError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{source} is a damaged gzip file ({error}). Download it again.", path=str(source)
        ) from None
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.", path=str(source)) from None


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
            read_errors(source),
            open_bytes(source)
            if isinstance(source, Path)
            else contextlib.nullcontext(source.file) as opened,
        ):
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
    except LookupError:
        raise DataError(
            f"Unknown encoding '{encoding}'. Try utf-8 or iso-8859-1.", value=encoding
        ) from None


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


SAMPLE_BYTES = 1 << 16  # size of the sample for a guess
_PUNCTUATION = "".join(map(chr, (*range(0x3000, 0x3020), *range(0xFF01, 0xFF60))))
_QUOTES = "\u2018\u2019\u201c\u201d\u201e\u2013\u2014\u2026«»°"
_RUSSIAN = "оеаинтсрвлкмдпуяыьгз"
_POLISH = "ąćęłńóśźżĄĆĘŁŃÓŚŹŻ" + _QUOTES
_CZECH = "áčďéěíňóřšťúůýžäôľĺŕÁČĎÉĚÍŇÓŘŠŤÚŮÝŽ" + _QUOTES
# (encoding, frequent characters of its texts); the first of equally good encodings wins.
# Encodings of Latin scripts:
_LATIN = (
    ("cp1252", "äöüßàâæçèéêëîïôœùûÿñáíóúãõåøìòÄÖÜÀÂÇÈÉÊÎÔÑÁÍÓÚÃÕÅØ¿¡€" + _QUOTES),
    ("cp1250", _POLISH),
    ("cp1250", _CZECH),
    ("iso-8859-2", _POLISH),
    ("iso-8859-2", _CZECH),
    ("cp1254", "çğıöşüâîûÇĞİÖŞÜÂÎÛ" + _QUOTES),
)
# Single-byte encodings of other scripts:
_OTHER = (
    ("cp1251", _RUSSIAN),
    ("koi8-r", _RUSSIAN),
    ("cp1253", "αοιετσνηυρπκμλςόίάέήδγωύθχφώβ"),
    ("cp1255", "יוהלארמתבשנםחדעקפגצןכטזס"),
    ("cp1256", "اليمونرتبةعدسفهكقحجشصطأخى"),
    ("cp874", "านรอกเงมยลวดทส่้ัีิตคปบหพไขแชใจะ็ื"),
)


@functools.cache
def _multibyte() -> tuple[tuple[str, str], ...]:
    """Returns the same pairs for multi-byte encodings, from rows of their code tables."""

    def rows(codec: str, first: int, last: int) -> str:
        trails = (*range(0x40, 0x7F), *range(0xA1, 0xFF))
        data = b"".join(bytes((row, t)) for row in range(first, last + 1) for t in trails)
        return data.decode(codec, "ignore")

    japanese = "".join(map(chr, range(0x3041, 0x30FF))) + rows("euc_jp", 0xB0, 0xCF)
    return (
        ("euc_kr", rows("euc_kr", 0xB0, 0xC8)),
        ("gbk", rows("gb2312", 0xB0, 0xD7) + _PUNCTUATION),
        ("euc_jp", japanese + _PUNCTUATION),
        ("shift_jis", japanese + _PUNCTUATION),
        ("big5", rows("big5", 0xA4, 0xC6) + _PUNCTUATION),
    )


def guess_encoding(data: bytes) -> str:
    """Returns the most likely encoding of `data`, or "" if none fits.

    The score of an encoding is the share of frequent characters among the non-ASCII characters.

    Args:
      data: whole lines of text.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        pass
    runs = re.findall(rb"[\x80-\xff]+", data)
    single = len(b"".join(runs)) < 2 * len(runs)  # accented letters between ASCII letters
    candidates = _LATIN if single else (*_multibyte(), *_OTHER)
    share, best = max(
        ((_share(data, *each), each[0]) for each in candidates), key=operator.itemgetter(0)
    )
    return best if share > 0.6 else ""


def _share(data: bytes, encoding: str, characters: str) -> float:
    decoded = [character for character in data.decode(encoding, "replace") if character > "\x7f"]
    frequent = set(characters)
    return sum(character in frequent for character in decoded) / max(1, len(decoded))
