"""Documents of text files, plain or gzipped, in five formats, and of tables with a text column.

Text files are split into byte ranges at document boundaries; tables are read whole. Lines and
documents are (byte offset, bytes).
"""

import codecs
import dataclasses
import glob
import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.readers.encodings import SAMPLE_BYTES, guess_encoding
from convbert_jax.data.readers.rows import (
    ABSENT,
    UTF16,
    BadRows,
    TableFormat,
    ending_of,
    find_value,
    list_columns,
    open_bytes,
    read_errors,
    read_table,
)

LONGEST = 1_000_000  # characters of a document; longer documents are split
UNIT_BYTES = 16_000_000
MOST_UNITS = 512  # limits the number of shards: larger corpora get larger units


class UnitFiles:
    """A source whose units are read from files."""

    name: str
    fingerprint: str
    units: Sequence[Any]

    def files_of(self, unit: Any) -> set[Path]:
        """Returns the files of one unit."""
        raise NotImplementedError

    @property
    def files(self) -> set[Path]:
        """All files of the source."""
        return {path for unit in self.units for path in self.files_of(unit)}


@dataclasses.dataclass(frozen=True)
class Unit:
    """Consecutive parts of a source, and their bytes of text."""

    parts: tuple[Any, ...]
    size: int


def unit_bytes(total: int) -> int:
    """Returns the size of a unit, in bytes, for a corpus of `total` bytes of text."""
    return max(UNIT_BYTES, -(-total // MOST_UNITS))


def group_units(parts: Iterable[tuple[Any, int]], target: int) -> tuple[Unit, ...]:
    """Groups consecutive (part, bytes) into units of at least `target` bytes."""
    units, group, filled = [], [], 0
    for part, size in parts:
        group.append(part)
        filled += size
        if filled >= target:
            units.append(Unit(tuple(group), filled))
            group, filled = [], 0
    return (*units, Unit(tuple(group), filled)) if group else tuple(units)


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


BOM = b"\xef\xbb\xbf"
_IS_UTF16 = "UTF-16, not UTF-8. Convert it (iconv -f UTF-16 -t UTF-8)."
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
    ending = ending_of(path).lower()
    if ending[1:] in TABLES:
        return ending[1:]
    with read_errors(path), open_bytes(path) as file:
        head = file.read(LONGEST).removeprefix(BOM).strip()
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
    with read_errors(path), open(path, "rb") as file:
        head = file.read(4_096)
    packed = path.suffix == ".gz" and head.startswith(b"\x1f\x8b")
    if packed:
        try:
            with open_bytes(path) as file:
                head = file.read(4_096)
        except (OSError, EOFError, zlib.error):
            return  # damaged; the reader reports the place
    kind = next((kind for start, kind in BEGINNINGS.items() if head.startswith(start)), "")
    if kind:
        advice = {"parquet": f"Use parquet:{path}", "gzip": "Rename it to end in .gz"}
        fix = "Unpack it" if packed else advice.get(kind, "Unpack it")
        raise DataError(f"{path} is a {kind} file, not text. {fix}.", path=path)
    if head.startswith(UTF16):
        raise DataError(_IS_UTF16, path=path)
    if head.count(0) > len(head) // 8:  # half of UTF-16 ASCII is zeros, which are valid UTF-8
        problem = "binary, or UTF-16 without a byte order mark. Convert it (iconv -f UTF-16LE)."
        raise DataError(problem, path=path)


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
        if offset == 0 and line.startswith(UTF16):
            raise DataError(_IS_UTF16, path=file.name)
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


GZIP_RATIO = 3  # estimated bytes of text per compressed byte
LONGEST_JSON = 64_000_000  # bytes of one jsonl line
HEAD = 65_536  # bytes at each end of a file that enter the fingerprint


@dataclasses.dataclass(frozen=True)
class Part:
    """Byte range of a file; `stop` is -1 for compressed files, which are read whole."""

    file: str  # relative to the source's root
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True)
class TextFiles(UnitFiles):
    name: str
    fingerprint: str
    root: Path
    format: str
    text_field: str
    encoding: str
    encoding_errors: str
    units: tuple[Unit, ...]

    def files_of(self, unit: Unit) -> set[Path]:
        """Returns the files of one unit."""
        return {self.root / part.file for part in unit.parts}

    def documents(self, unit: Unit, tally: Counter | None = None) -> Iterator[str]:
        """Yields the documents of `unit` in the order of the files.

        Raises:
          DataError: text in another encoding with encoding_errors="error", a damaged .gz file, or
            a jsonl line without the text field.
        """
        for part in unit.parts:
            path = self.root / part.file
            try:
                if self.format in TABLES:
                    yield from self._column(path, tally)
                    continue
                with read_errors(path), open_bytes(path) as file:
                    file.seek(part.start)
                    yield from self._documents(file, part, tally)
            except UnicodeDecodeError:
                raise DataError(describe_bad_text(path, self.encoding), path=path) from None

    def _documents(self, file, part: Part, tally: Counter | None) -> Iterator[str]:
        limit = LONGEST_JSON if self.format == "jsonl" else LONGEST
        lines = read_lines(file, part.start, part.stop, limit, self.encoding)
        for offset, data in FORMATS[self.format](lines):
            text = decode(data, self.encoding_errors, tally, self.encoding)
            if text is None or not text.strip():
                continue
            if self.format == "jsonl":
                if len(data) >= limit // 2:  # longer lines were split after their middle
                    raise DataError(
                        f"not jsonl: the line at byte {offset} is longer than {limit // 2} bytes. "
                        "Set config.data.format.",
                        field="config.data.format",
                        path=self.root / part.file,
                    )
                text = self._field(text, self.root / part.file, offset)
            yield from clean(text)

    def _column(self, path: Path, tally: Counter | None) -> Iterator[str]:
        for _, (cell,) in read_column(path, self.format, self.text_field, self.encoding):
            data = cell.encode("utf-8", "surrogateescape")
            yield from clean(decode(data, self.encoding_errors, tally) or "")

    def _field(self, line: str, path: Path, offset: int) -> str:
        """Returns the text of a JSON object; "" for null, which is skipped as in Parquet files."""
        if not offset and line.lstrip().startswith("["):
            raise DataError(
                "a JSON list, not one object per line. Convert it, for example with jq -c '.[]' "
                f"{path.name}.",
                path=path,
            )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"no JSON object at byte {offset}: {error}. Fix the file, or set "
                "config.data.format if it is not jsonl.",
                field="config.data.format",
                path=path,
            ) from None
        field, is_object = self.text_field, isinstance(record, dict)
        text = find_value(record, field) if is_object else ABSENT
        if text is None or isinstance(text, str):
            return text or ""
        problem = f"{shorten(repr(text), 40)} instead of text in '{field}' at byte {offset}"
        if text is ABSENT:
            names = list_columns(record) if is_object else type(record).__name__
            problem = f"no field '{field}' at byte {offset} (found: {names})"
        raise DataError(
            f"{path} has {problem}. Fix the file or set config.data.text_field.",
            field="config.data.text_field",
            value=field,
            path=path,
        )


def open_text(rest: str, section: DataSection) -> TextFiles:
    """Opens files by comma-separated globs; a folder means all files below it.

    Raises:
      DataError: a glob matches no file, or an error of `open_files`.
    """
    return open_files(f"text:{rest}", find_files(rest), section)


def open_files(name: str, paths: list[Path], section: DataSection) -> TextFiles:
    """Opens text files or tables by their paths.

    Args:
      name: name of the source, for error messages.

    Raises:
      DataError: a file is not text, or the files have different formats.
    """
    root = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        refuse_other_kinds(path)
    kind = section.format
    if kind == "auto":
        kind = _format_of_all(paths, name, section.encoding)
    if kind in TABLES:
        for path in paths:
            next(read_column(path, kind, section.text_field, section.encoding))
    encoding = codecs.lookup(section.encoding).name
    how = f"text {kind} {section.text_field} {encoding}"
    return TextFiles(
        name=name,
        fingerprint=fingerprint_files(paths, root, how),
        root=root,
        format=kind,
        text_field=section.text_field,
        encoding=encoding,
        encoding_errors=section.encoding_errors,
        units=_units(paths, root, kind),
    )


def _format_of_all(paths: list[Path], source: str, encoding: str) -> str:
    """Returns the format of all files; "blank_lines" wins over "lines"."""
    found: dict[str, str] = {}
    for path in paths:
        if kind := detect_format(path, encoding):
            found.setdefault(kind, path.name)
    if found.keys() == {"blank_lines", "lines"}:
        logging.warning(
            "%s separates texts by blank lines but %s has none. Both are read as 'blank_lines', "
            "so the second file is one text. Use config.data.format=lines for one text per line, "
            "=file for one per file.",
            found["blank_lines"],
            found.pop("lines"),
        )
    if len(found) > 1:
        names = ", ".join(f"{name}: {kind}" for kind, name in found.items())
        raise DataError(
            f"config.data.source='{source}' has files of several formats ({names}). Use files of "
            "one format, for example text:FOLDER/*.jsonl, or set config.data.format.",
            field="config.data.source",
            value=source,
        )
    kind, name = next(iter(found.items()), ("lines", paths[0].name))
    logging.info("config.data.format=auto: %s has the format '%s'.", name, kind)
    return kind


def read_column(
    path: Path, kind: str, field: str, encoding: str
) -> Iterator[tuple[int, tuple[str]]]:
    """Yields (line, (cell,)) for one column of a table with a header line.

    Invalid bytes become lone surrogates.

    Raises:
      DataError: no rows, unknown column, or a row with another number of columns.
    """
    hint = "Set config.data.text_field to a column in the header line"
    form = TableFormat(kind, encoding=encoding, escape=True, hint=hint)
    return read_table(path, [field], form, BadRows(path, "error"))


def find_files(globs: str, field: str = "config.data.source") -> list[Path]:
    """Returns the sorted absolute paths of all files that match comma-separated globs.

    Each file is returned once even if several links lead to it. A link from a folder to itself
    would otherwise repeat its files 40 times.
    """
    found = set()
    whole = os.path.exists(os.path.expanduser(globs))  # the name itself may contain a comma
    for pattern in [globs] if whole else globs.split(","):
        expanded = os.path.expanduser(pattern.strip())
        if os.path.isdir(expanded):
            expanded = os.path.join(glob.escape(expanded), "**", "*")
        names = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
        files = [name for name in names if os.path.isfile(name)]
        if not files:
            raise DataError(
                f"No file matches '{pattern.strip()}'. Check {field}.",
                field=field,
                value=pattern.strip(),
            )
        found.update(os.path.abspath(name) for name in files)
    once: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (len(name), name)):
        once.setdefault(os.path.realpath(name), name)
    if len(once) < len(found):
        logging.warning(
            "%s matches %d files and %d more links to them; each file is read once.",
            globs,
            len(once),
            len(found) - len(once),
        )
    return sorted(map(Path, once.values()))


def fingerprint_files(paths: list[Path], root: Path, how: str) -> str:
    """Returns the sha256 of `how` and each file's name below `root`, size, first and last 64 KiB.

    It is cheap to compute at every start; `units/changes.py` detects changes elsewhere in files.
    """
    digest = hashlib.sha256(how.encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"\n{path.relative_to(root).as_posix()} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(HEAD))
            if size > HEAD:
                file.seek(max(HEAD, size - HEAD))
                digest.update(file.read())
    return digest.hexdigest()


def _units(paths: list[Path], root: Path, kind: str) -> tuple[Unit, ...]:
    sizes = [path.stat().st_size * (GZIP_RATIO if path.suffix == ".gz" else 1) for path in paths]
    target = unit_bytes(sum(sizes))
    parts = (
        (part, part.size)
        for path, size in zip(paths, sizes, strict=True)
        for part in _parts(path, path.relative_to(root).as_posix(), size, kind, target)
    )
    return group_units(parts, target)


def _parts(path: Path, name: str, size: int, kind: str, target: int) -> Iterator[Part]:
    if path.suffix == ".gz":
        yield Part(name, 0, -1, size)
        return
    start = 0
    if kind not in ("file", *TABLES) and size > 1.5 * target:
        with open(path, "rb") as file:
            while size - start > 1.5 * target:
                stop = _boundary(file, start + target, kind)
                if stop >= size:
                    break
                yield Part(name, start, stop, stop - start)
                start = stop
    if size > start:
        yield Part(name, start, size, size - start)


def _boundary(file, position: int, kind: str) -> int:
    """Returns the offset after `position` where a document begins, or the end of the file."""
    file.seek(position)
    _skip_line(file)
    after_blank = False
    while True:
        here = file.tell()
        line = file.readline(LONGEST)
        if (
            not line
            or kind in ("lines", "jsonl")
            or (kind == "wikiextractor" and line.startswith(b"<doc "))
            or (kind == "blank_lines" and after_blank and line.strip())
        ):
            return here
        after_blank = not line.strip()
        if not line.endswith(b"\n"):
            _skip_line(file)


def _skip_line(file) -> None:
    while (line := file.readline(LONGEST)) and not line.endswith(b"\n"):
        pass
