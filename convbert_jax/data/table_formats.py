"""Formats of tables in text files: each opens a file as its column names and its rows.

An opener returns (names, rows of cells) or, where rows are objects with names of their own, (None,
rows of dicts). Line numbers count from 1 and are those of the file, header included.
"""

import csv
import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError
from convbert_jax.data.text_formats import open_bytes

Lines = Iterator[tuple[int, str]]
Rows = Iterator[tuple[int, Sequence[Any] | dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class TableFormat:
    """How a table is written.

    tsv: quotation marks are text (the GLUE files do not pair them). csv: RFC 4180 quoting. jsonl:
    an object a line. json: one document, a list of lists or objects; `FILE#KEY` picks the list
    under a key. conll: one word a line, columns split by blanks, an empty line ends a sentence;
    each row is a sentence and its columns are lists. parallel: one file for each column, line by
    line. pattern: `pattern` is a regular expression whose named groups are the columns.
    """

    format: str
    columns: tuple[str, ...] = ()  # names where no header line gives them; () reads a header
    rest_in_last: bool = False  # the last column takes what is left, separators too (tsv)
    pattern: str = ""
    encoding: str = "utf-8"
    hint: str = "check the file"  # what to do about a column that is not there

    @property
    def numbered(self) -> bool:
        """Columns may be asked for by number."""
        return bool(self.columns) or self.format in ("json", "conll", "parallel")


class BadRows:
    """What becomes of rows that cannot be used: the first is an error, or all are left out."""

    def __init__(self, path: Path, policy: str, *, quiet: bool = False):
        """`policy`: "error" or "skip"; `quiet` does not log what was left out."""
        self._path, self._policy, self._quiet = path, policy, quiet
        self.count, self.first = 0, ""

    def report(self, line: int, problem: str) -> None:
        """Raises DataError, or notes that the row of `line` is left out."""
        if self._policy == "error":
            raise DataError(f"{self._path} line {line} {problem}.")
        self.first = self.first or f"line {line} {problem}"
        self.count += 1

    def summarize(self, kept: int) -> None:
        """Logs what was left out."""
        if self.count and not self._quiet:
            logging.warning(
                "%s: %d of %d rows left out; the first: %s.",
                self._path,
                self.count,
                self.count + kept,
                self.first,
            )


def _open_tsv(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    lines = _read_lines(path, form.encoding)
    header = list(form.columns)
    if not header:
        header = _first(lines, path)[1].split("\t")
    splits = len(header) - 1 if form.rest_in_last else -1
    return header, _counted(
        ((n, line.split("\t", splits)) for n, line in lines), len(header), bad_rows
    )


def _open_csv(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    reader = csv.reader((line + "\n" for _, line in _read_lines(path, form.encoding)), strict=True)

    def rows():
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{path} line {reader.line_num} is not csv: {error}.") from None
            if cells is None:
                return
            yield reader.line_num, cells

    found = rows()
    header = list(form.columns) or _first(found, path)[1]
    return header, _counted(found, len(header), bad_rows)


def _counted(rows: Rows, columns: int, bad_rows: BadRows) -> Rows:
    """Rows with the right number of columns."""
    for line, cells in rows:
        if len(cells) == columns:
            yield line, cells
        else:
            bad_rows.report(line, f"has {len(cells)} columns instead of {columns}")


def _open_jsonl(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    def rows():
        for line, text in _read_lines(path, form.encoding):
            try:
                record = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path} line {line} is not JSON: {error}.") from None
            if not isinstance(record, dict):
                raise DataError(f"{path} line {line} is not a JSON object.")
            yield line, record

    return None, rows()


def _open_json(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    """Rows count from 1, in the place of lines."""
    text = "\n".join(line for _, line in _read_lines(path, form.encoding))
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from None
    if key:
        if not isinstance(document, dict) or key not in document:
            names = ", ".join(document) if isinstance(document, dict) else type(document).__name__
            raise DataError(f"{path} has no list '{key}' (it has: {names}).")
        document = document[key]
    if not isinstance(document, list):
        names = f" (it has: {', '.join(document)})" if isinstance(document, dict) else ""
        raise DataError(f"{path} is not a JSON list of rows; name the list as FILE#KEY{names}.")
    if not document or isinstance(document[0], dict):
        return None, enumerate(document, start=1)
    columns = len(document[0])
    header = list(form.columns) or [str(n) for n in range(columns)]
    return header, _counted(enumerate(document, start=1), len(header), bad_rows)


def _open_conll(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    def sentences():
        words, start, columns = [], 0, 0
        for line, text in _read_lines(path, form.encoding, end=True):
            cells = text.split()
            if cells and cells[0] != "-DOCSTART-":
                columns = columns or len(cells)
                start = start or line
                if len(cells) != columns:
                    bad_rows.report(line, f"has {len(cells)} columns instead of {columns}")
                else:
                    words.append(cells)
            elif words:
                yield start, [list(column) for column in zip(*words, strict=True)]
                words, start = [], 0

    found = sentences()
    first = _first(found, path)
    header = list(form.columns) or [str(n) for n in range(len(first[1]))]
    return header, _prepend(first, found)


def _open_parallel(paths: tuple[Path, ...], form: TableFormat, bad_rows: BadRows, key: str):
    readers = [_read_lines(path, form.encoding) for path in paths]
    header = list(form.columns) or [str(n) for n in range(len(paths))]
    if len(header) != len(paths):
        raise DataError(f"{len(paths)} parallel files need {len(paths)} columns, not {header}.")

    def rows():
        while True:
            parts = [next(reader, None) for reader in readers]
            if None in parts:
                if any(parts):
                    short = paths[parts.index(None)]
                    line = next(part[0] for part in parts if part)
                    raise DataError(f"{short} ends before line {line}, where the others go on.")
                return
            yield parts[0][0], [text.strip() for _, text in parts]

    return header, rows()


def _open_pattern(path: Path, form: TableFormat, bad_rows: BadRows, key: str):
    try:
        pattern = re.compile(form.pattern)
    except re.error as error:
        raise DataError(f"pattern {form.pattern!r} is no regular expression: {error}.") from None

    def rows():
        for line, text in _read_lines(path, form.encoding):
            match = pattern.fullmatch(text)
            if match:
                yield line, match.groupdict()
            else:
                bad_rows.report(line, f"does not match the pattern {form.pattern!r}")

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


def guess_format(path: Path) -> str:
    """The format that a file's name stands for.

    Raises:
      DataError: the ending is unknown.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".tsv", ".csv", ".json", ".conll"):
        return suffix[1:]
    raise DataError(
        f"The format of {path} is not known by its name; set config.task.format to one of: "
        f"{', '.join(FORMATS)}."
    )


def _first(rows: Iterator, path: Path):
    row = next(rows, None)
    if row is None:
        raise DataError(f"{path} is empty; check the file.")
    return row


def _prepend(first, rows: Iterator) -> Iterator:
    yield first
    yield from rows


def _read_lines(path: Path, encoding: str, *, end: bool = False) -> Lines:
    """Decoded lines without their ends; a byte order mark and empty lines at the end are dropped.

    Args:
      end: adds an empty line after the last one.

    Raises:
      DataError: unreadable, a damaged gzip file, or bytes that are not of `encoding`.
    """
    blanks = number = 0
    try:
        with open_bytes(path) as file:
            # Only \n ends a line: texts hold other characters that Python takes for line ends.
            for number, data in enumerate(file, start=1):
                try:
                    line = data.decode(encoding)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path} line {number} is not {encoding} (byte {error.start} of the line "
                        f"is 0x{data[error.start]:02X}); convert the file or set its encoding."
                    ) from None
                line = line.rstrip("\r\n")
                if number == 1:
                    line = line.removeprefix("\ufeff")
                if not line.strip():
                    blanks += 1
                    continue
                yield from ((number - n, "") for n in range(blanks, 0, -1))
                blanks = 0
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); fetch it again.") from None
    except LookupError:
        raise DataError(f"encoding '{encoding}' is unknown; try utf-8 or iso-8859-1.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if end:
        yield number + 1, ""
