"""Rows of files: lines, tsv, csv, JSON, CoNLL, parallel lines and patterns.

An opener of a format returns (names, rows of cells) or, for JSON objects, (None, rows of dicts). An
unusable row is replaced by a `Fault`. Line numbers count from 1 and include the header; the line of
a row is the line where it begins. Columns have names, or numbers from 0 (-1 is the last) if the
file has no names.
"""

import contextlib
import csv
import dataclasses
import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import regex
from absl import logging

from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.readers.encodings import guess_encoding
from convbert_jax.storage import JsonError, parse_json

LONGEST_LINE = 1 << 26  # bytes; longer lines are an error
MATCHING_SECONDS = 2.0  # per line; some patterns take exponential time
_DOCUMENT = "-DOCSTART-"  # first word of a document in CoNLL files
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
Lines = Iterator[tuple[int, str]]  # (number, line)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A byte stream without a path, for example standard input."""

    name: str  # for error messages
    file: IO[bytes]

    def __str__(self) -> str:
        return self.name

    __fspath__ = __str__


Source = Path | Stream


def open_bytes(path: Path):
    """Opens `path` for reading bytes, decompressed if its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


@contextlib.contextmanager
def read_errors(source: Source) -> Iterator[None]:
    """Converts the errors of reading a file, which may be compressed, to DataError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"damaged gzip file ({error}). Download it again.", path=source) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}.", path=source) from None


def decode_lines(source: Source, encoding: str, *, escape: bool = False) -> Lines:
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(read_errors(source))
            is_file = isinstance(source, Path)
            file = stack.enter_context(open_bytes(source)) if is_file else source.file
            # Only \n ends a line: texts may contain other characters that str.splitlines splits at.
            while data := file.readline(LONGEST_LINE):
                number += 1
                if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
                    problem = f"longer than {LONGEST_LINE >> 20} MiB. Check the file."
                    raise DataError(problem, path=source, line=number)
                if number == 1 and data.startswith(UTF16):
                    raise DataError("UTF-16. Convert it (iconv -f UTF-16 -t UTF-8).", path=source)
                try:
                    line = data.decode(encoding, "surrogateescape" if escape else "strict")
                except UnicodeDecodeError as error:
                    guess = guess_encoding(data)
                    raise DataError(
                        f"not {encoding} (byte {error.start} of the line is "
                        f"0x{data[error.start]:02X}){guess and f', but looks like {guess}'}. Set "
                        "the encoding or convert the file.",
                        value=encoding,
                        path=source,
                        line=number,
                    ) from None
                line = line.rstrip("\r\n")
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


@dataclasses.dataclass(frozen=True)
class Fault:
    """An unusable row.

    Attributes:
      problem: predicate for "FILE line N", for example "is empty".
      file: index of the file with the problem, for rows that are read from parallel files.
    """

    problem: str
    file: int = 0


TableRows = Iterator[tuple[int, Sequence[Any] | dict[str, Any] | Fault]]


@dataclasses.dataclass(frozen=True)
class TableFormat:
    """Format of a table.

    - tsv: quotation marks are text (they are unpaired in the GLUE files).
    - csv: RFC 4180 quoting.
    - jsonl: one object per line.
    - json: one document, a list of lists or objects; `FILE#KEY` selects the list under a key.
    - conll: one word per line, columns separated by tabs or spaces; an empty line ends a sentence.
      Each row is a sentence and its columns are lists. Comments ("# …" before a sentence) and the
      ranges and empty nodes of CoNLL-U are skipped.
    - parallel: one file per column, aligned by lines.
    - pattern: `pattern` is a regular expression whose named groups are the columns.
    """

    format: str
    columns: tuple[str, ...] = ()  # names if the file has no header; () reads a header
    rest_in_last: bool = False  # the last column includes further separators (tsv)
    pattern: str = ""
    encoding: str = "utf-8"
    escape: bool = False  # invalid bytes make a row unusable instead of raising an error
    hint: str = "Check the file"  # how to fix a missing column

    @property
    def numbered(self) -> bool:
        """Whether columns may be selected by number."""
        return bool(self.columns) or self.format in ("json", "conll", "parallel")


class BadRows:
    """Policy for unusable rows: raise an error at the first, or skip and count them."""

    def __init__(self, path: Path, policy: str):
        """Creates a policy for the file `path`; `policy` is "error" or "skip"."""
        self._path, self._policy = path, policy
        self.count, self.first = 0, ""

    def report(self, line: int, problem: str) -> None:
        """Raises DataError, or counts the row at `line` as skipped."""
        if self._policy == "error":
            raise Location(self._path, line).error(f"{problem}.")
        self.first = self.first or f"line {line} {problem}"
        self.count += 1

    def summarize(self, total: int) -> None:
        """Logs how many of `total` rows were skipped."""
        if self.count:
            logging.warning(
                "%s: skipped %d of %d rows; the first: %s.",
                self._path,
                self.count,
                total,
                self.first,
            )


def _open_tsv(source: Source, form: TableFormat, key: str):
    lines = _read_lines(source, form)
    header = list(form.columns) or _header(lines, source).split("\t")
    splits = len(header) - 1 if form.rest_in_last else -1
    return header, _counted(((n, line.split("\t", splits)) for n, line in lines), len(header))


def _open_csv(source: Source, form: TableFormat, key: str):
    """Opens a csv file; blank lines are skipped, as in other csv readers."""
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader((line + "\n" for _, line in _read_lines(source, form)), strict=True)

    def rows():
        while True:
            start = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if str(error) == "unexpected end of data":  # an unpaired quotation mark
                    raise DataError(f"not csv: {error}.", path=source, line=start) from None
                yield start, Fault(f"is not csv: {error}")
                continue
            if cells is None:
                return
            if cells:
                yield start, cells

    found = rows()
    header = list(form.columns) or _header(found, source)
    return header, _counted(found, len(header))


def _counted(rows: TableRows, columns: int) -> TableRows:
    """Yields the rows; a row with another number of columns becomes a `Fault`."""
    for line, cells in rows:
        if not isinstance(cells, Fault) and len(cells) != columns:
            cells = Fault(f"has {len(cells)} columns instead of {columns}")
        yield line, cells


def _open_jsonl(source: Source, form: TableFormat, key: str):
    def rows():
        for line, text in _read_lines(source, form):
            row = parse_object(text, form.encoding)
            if isinstance(row, Fault) and line == 1 and text.startswith("["):
                hint = "rename the file to .json if it is one list over several lines"
                row = dataclasses.replace(row, problem=f"{row.problem}; {hint}")
            yield line, row

    return None, rows()


def parse_object(text: str, encoding: str = "utf-8") -> dict[str, Any] | Fault:
    """Parses the JSON object of a line."""
    try:
        row = parse_json(text)
    except JsonError as error:
        problem = f"is not JSON: {error.reason}" if text.strip() else "is empty"
        return Fault(describe_escapes(text, encoding) or problem)
    return row if isinstance(row, dict) else Fault("is not a JSON object")


def _open_json(source: Source, form: TableFormat, key: str):
    """Opens a JSON document; row numbers from 1 replace line numbers."""
    lines = [line for _, line in _read_lines(source, form)]
    try:
        document = parse_json("\n".join(lines))
    except JsonError as error:
        first = lines[0] if lines else ""
        hint = "; rename the file to .jsonl if it has one object per line"
        hint = hint if first.startswith("{") and first.endswith("}") else ""
        raise DataError(f"not JSON: {error.reason}{hint}.", path=source) from None
    keys = shorten(", ".join(document)) if isinstance(document, dict) else type(document).__name__
    if key:
        if not isinstance(document, dict) or key not in document:
            raise DataError(f"no list '{key}' (found: {keys}).", value=key, path=source)
        document = document[key]
    if not isinstance(document, list):
        raise DataError(
            f"not a JSON list of rows. Select a list with FILE#KEY (keys: {keys}).", path=source
        )
    if not document or isinstance(document[0], dict):
        return None, _of_type(document, dict, "an object")
    if not isinstance(document[0], list):
        raise DataError("a JSON list whose rows are not objects or lists.", path=source)
    header = list(form.columns) or [str(n) for n in range(len(document[0]))]
    return header, _counted(_of_type(document, list, "a list"), len(header))


def _of_type(rows: list, kind: type, name: str) -> TableRows:
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, kind) else Fault(f"is not {name} like the first row")


def _open_conll(source: Source, form: TableFormat, key: str):
    """Opens a CoNLL file; a line with another number of columns is a fault of the sentence."""
    lines = _read_lines(source, form)
    head, separator, columns = _read_conll_head(lines)

    def sentences():
        words, start, fault = [], 0, None
        for line, text in itertools.chain(head, lines, [(0, "")]):  # (0, "") ends the last sentence
            cells = [cell.strip() for cell in text.split(separator)]
            if len(cells) != columns:
                cells = text.split()
            if not text.strip() or text.startswith(_DOCUMENT):
                if words:
                    rows = [] if fault else _without_ranges(words)
                    yield fault or (start, [list(column) for column in zip(*rows, strict=True)])
                words, start, fault = [], 0, None
            elif words or not _is_comment(text, separator, columns):
                start = start or line
                if len(cells) != columns and not fault:
                    fault = line, Fault(f"has {len(cells)} columns instead of {columns}")
                words.append(cells)

    found = sentences()
    first = _first(found, source)
    header = list(form.columns) or [str(n) for n in range(columns)]
    if len(header) != columns:
        names = shorten(", ".join(header))
        raise DataError(f"{columns} columns, but {len(header)} column names: {names}.", path=source)
    return header, itertools.chain([first], found)


def _read_conll_head(lines: Lines) -> tuple[list[tuple[int, str]], str | None, int]:
    """Reads up to the first line that cannot be a comment, which determines the columns.

    Returns:
      The lines read, the column separator (None: white space) and the number of columns.
    """
    head, sample = [], ""
    for line, text in lines:
        head.append((line, text))
        if text.strip() and not text.startswith(_DOCUMENT):
            sample = sample or text
            if not text.startswith("#"):
                sample = text
                break
    tabs = sample.split("\t")
    # If several tabs align the columns, there are empty cells between them.
    separator = "\t" if len(tabs) > 1 and all(map(str.strip, tabs)) else None
    return head, separator, len(sample.split(separator))


def _is_comment(text: str, separator: str | None, columns: int) -> bool:
    """Returns whether a line before the first word of a sentence is a comment.

    A word may begin with "#" too, but its line has the usual number of columns. CoNLL-U comments
    such as "# sent_id = 1" may have this number of columns as well; they contain " = ".
    """
    return text.startswith("#") and (len(text.split(separator)) != columns or " = " in text)


def _without_ranges(rows: list[list[str]]) -> list[list[str]]:
    """Removes the lines of multiword tokens ("2-3") and empty nodes ("2.1") of CoNLL-U.

    They are removed only if the first column numbers the words; otherwise "2-3" is a word.
    """
    words = []
    for cells in rows:
        number = cells[0]
        if number == str(len(words) + 1):
            words.append(cells)
        elif not (
            re.fullmatch(r"\d+[-.]\d+", number)
            and number.startswith((f"{len(words) + 1}-", f"{len(words)}."))
        ):
            return rows
    # A range is followed by its words, and a numbered row also has words and labels.
    return words if words and "-" not in rows[-1][0] and len(rows[0]) > 2 else rows


def _open_parallel(paths: tuple[Path, ...], form: TableFormat, key: str):
    readers = [_read_lines(path, form) for path in paths]
    header = list(form.columns) or [str(n) for n in range(len(paths))]
    if len(header) != len(paths):
        raise DataError(f"{len(paths)} parallel files need {len(paths)} columns; got {header}.")

    def rows():
        while True:
            parts = [next(reader, None) for reader in readers]
            if None in parts:
                if any(parts):
                    short = paths[parts.index(None)]
                    line = next(part[0] for part in parts if part)
                    problem = f"the file ends before line {line} of the other files."
                    raise DataError(problem, line=line, path=short)
                return
            yield parts[0][0], [text.strip() for _, text in parts]

    return header, rows()


def _open_pattern(source: Source, form: TableFormat, key: str):
    try:
        pattern = regex.compile(form.pattern)
    except regex.error as error:
        raise DataError(f"Invalid regular expression {form.pattern!r}: {error}.") from None

    def rows():
        for line, text in _read_lines(source, form):
            try:
                match = pattern.fullmatch(text, timeout=MATCHING_SECONDS)
            except TimeoutError:
                raise DataError(
                    f"matching pattern {form.pattern!r} took more than {MATCHING_SECONDS:g} s. "
                    "Remove nested repeats such as (a+)+.",
                    path=source,
                    line=line,
                ) from None
            problem = f"does not match the pattern {form.pattern!r}"
            yield line, match.groupdict() if match else Fault(problem)

    return None, rows()


OPENERS: dict[str, Callable] = {
    "tsv": _open_tsv,
    "csv": _open_csv,
    "jsonl": _open_jsonl,
    "json": _open_json,
    "conll": _open_conll,
    "parallel": _open_parallel,
    "pattern": _open_pattern,
}
FORMATS = tuple(OPENERS)
FORMAT_OF_ENDING = {f".{name}": name for name in ("tsv", "csv", "jsonl", "json", "conll")}
FORMAT_OF_ENDING |= {".ndjson": "jsonl", ".conllu": "conll"}


def ending_of(name: str | Path) -> str:
    """Returns the suffix of a file name without .gz: ".csv" for "a.csv.gz"."""
    path = Path(name)
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix


def guess_format(path: Path) -> str:
    """Returns the format of a file by its suffix.

    Raises:
      DataError: the suffix is unknown.
    """
    if found := FORMAT_OF_ENDING.get(ending_of(path)):
        return found
    raise DataError(
        f"unknown format: the suffix is not one of {', '.join(FORMAT_OF_ENDING)}. Set "
        f"config.task.format to one of: {', '.join(FORMATS)}.",
        field="config.task.format",
        path=path,
    )


def _first(rows: Iterator, source: Source) -> tuple[int, Any]:
    if (first := next(rows, None)) is None:
        raise DataError("the file is empty. Check it.", path=source)
    return first


def _header(rows: Iterator, source: Source) -> Any:
    line, cells = _first(rows, source)
    if isinstance(cells, Fault):
        raise Location(source, line).error(f"{cells.problem}.")
    return cells


def _read_lines(source: Source, form: TableFormat) -> Lines:
    return without_last_blanks(decode_lines(source, form.encoding, escape=form.escape))


ABSENT = object()  # value of a missing column


def find_value(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or `ABSENT` if the row does not have it.

    A dotted name reads nested objects: "translation.en" is row["translation"]["en"], unless the row
    has a column "translation.en". Every column of a null object is null.
    """
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    if dot and first in row and row[first] is None:
        return None
    inner = row.get(first)
    return find_value(inner, rest) if dot and isinstance(inner, Mapping) else ABSENT


def list_columns(row: Mapping[str, Any]) -> str:
    """Returns the names of all columns for an error message, with dots for nested objects."""

    def names(row):
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                yield from (f"{name}.{inner}" for inner in names(value))
            else:
                yield str(name)

    return shorten(", ".join(names(row)))


def read_table(
    path: Path | tuple[Path, ...],
    wanted: Sequence[str],
    form: TableFormat,
    bad_rows: BadRows,
    *,
    key: str = "",
    optional: str = "",
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (line, values of the `wanted` columns and of `optional`) for each row of a file.

    Args:
      path: one file, decompressed if it ends in .gz; one file per column for format "parallel".
      key: key of the list in a file of format "json".
      optional: a column that may be missing; its value is then None. "" means no such column.

    Raises:
      DataError: empty file, missing column, invalid text or, depending on `bad_rows`, rows with
        another number of columns.
    """
    shown = path if isinstance(path, Path) else path[0]
    names = (*wanted, optional) if optional else tuple(wanted)
    header, rows = OPENERS[form.format](path, form, key)
    places = None
    if header is not None:
        places = _find_all(wanted, header, form, shown)
        places += [find_column(optional, header, form)] * bool(optional)
    count = total = 0
    for line, row in rows:
        total += 1
        if isinstance(row, Fault):
            bad_rows.report(line, row.problem)
            continue
        if places is None:  # a JSON object, which contains its column names
            values = [find_value(row, name) for name in names]
            if missing := [n for n, v in zip(wanted, values, strict=False) if v is ABSENT]:
                found = f"(columns: {list_columns(row)}). {form.hint}"
                bad_rows.report(line, f"has no '{missing[0]}' {found}")
                continue
            values = tuple(None if value is ABSENT else value for value in values)
        elif not count and form.columns and list(row) == list(form.columns):
            raise DataError(
                f"the line is a header, but the config also names the columns: {', '.join(row)}. "
                "Remove one of the two.",
                line=line,
                path=shown,
            )
        else:
            values = tuple(None if place is None else row[place] for place in places)
        count += 1
        yield line, values
    bad_rows.summarize(total)
    if not count:
        first = f" that can be used: {bad_rows.first}" if bad_rows.count else ""
        raise DataError(f"no rows{first}. Check the file.", path=shown)


def find_column(name: str, header: Sequence[str], form: TableFormat) -> int | None:
    """Returns the index of a column, or None if it is missing."""
    if name in header:
        return list(header).index(name)
    if form.numbered and re.fullmatch(r"-?\d+", name) and -len(header) <= int(name) < len(header):
        return int(name)
    return None


def _find_all(
    names: Sequence[str], header: Sequence[str], form: TableFormat, path: Path
) -> list[int | None]:
    places = [find_column(name, header, form) for name in names]
    for name, place in zip(names, places, strict=True):
        if list(header).count(name) > 1:
            raise DataError(f"two columns '{name}'. Rename one of them.", value=name, path=path)
        if place is None:
            hint = _other_separator(header, form) or form.hint
            shown = shorten(", ".join(header))
            raise DataError(
                f"no column '{name}' (columns: {shown}). {hint}.", value=name, path=path
            )
    return places


def _other_separator(header: Sequence[str], form: TableFormat) -> str:
    """Returns a hint if the header seems to use another separator than the format, or ""."""
    ours = {"csv": ("a comma", ","), "tsv": ("a tab", "\t")}.get(form.format)
    if not ours or len(header) > 1 or form.columns:
        return ""
    others = {";": "';'", "\t": "tabs", ",": "commas", "|": "'|'"}
    found = next((name for sign, name in others.items() if sign in header[0]), "")
    return found and f"Its columns seem to be separated by {found}; use {ours[0]} instead"
