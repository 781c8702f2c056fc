"""Sources of text pairs: files line by line, a table, Parquet files or rows of a data set."""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from convbert_jax import storage
from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.readers import indexed_rows, parquet_files
from convbert_jax.data.readers.encodings import guess_encoding
from convbert_jax.data.readers.row_sources import RowSource, Targets
from convbert_jax.data.readers.rows import (
    OPENERS,
    Fault,
    TableFormat,
    describe_escapes,
    open_bytes,
    parse_object,
    read_errors,
)
from convbert_jax.data.readers.text_files import (
    BOM,
    Unit,
    find_files,
    fingerprint_files,
    refuse_other_kinds,
    unit_bytes,
)

DEFAULT_COLUMNS = {"tsv": ("0", "1")} | dict.fromkeys(
    ("csv", "jsonl", "parquet", "tfds"), ("source", "target")
)
MARK_LINES = 1_024  # lines between two recorded offsets of a file


@dataclasses.dataclass(frozen=True)
class LineUnit:
    """`count` lines of parallel files from number `first`, counted from 1."""

    first: int
    count: int
    starts: tuple[int, ...]  # offset of the first line in each decompressed file
    size: int  # bytes of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineRows(RowSource):
    """Rows of one file (tsv, jsonl) or of parallel files, one row per line."""

    paths: tuple[Path, ...]
    format: str
    encoding: str

    @property
    def files(self) -> set[Path]:
        """All files that are read; unlike `units`, without reading them."""
        return set(self.paths)

    def files_of(self, unit: LineUnit) -> set[Path]:
        """Returns all files, because each has lines of every unit."""
        del unit
        return self.files

    @functools.cached_property
    def units(self) -> tuple[LineUnit, ...]:
        """Units, found by reading all lines once.

        Raises:
          DataError: the files differ in their line counts, are unreadable or are empty.
        """
        marks, lines = zip(*(_mark_lines(path) for path in self.paths), strict=True)
        if len(set(lines)) > 1:
            counts = " but ".join(
                f"{path} has {count} lines" for path, count in zip(self.paths, lines, strict=True)
            )
            raise DataError(
                f"{counts}. Parallel files need equal line counts, including blank lines and the "
                "last line.",
                path=self.paths[0],
            )
        total = sum(of_file[-1] for of_file in marks)
        if not total:
            raise DataError(
                f"{self.paths[0]} in '{self.name}' is empty. Use another file.",
                path=self.paths[0],
            )
        count = lines[0]
        blocks = -(-count // MARK_LINES)  # MARK_LINES lines each
        step = max(1, blocks * unit_bytes(total) // total)
        units = []
        for block in range(0, blocks, step):
            stop = min(block + step, blocks)
            starts = tuple(of_file[block] for of_file in marks)
            size = sum(of_file[stop] for of_file in marks) - sum(starts)
            first = block * MARK_LINES
            units.append(LineUnit(first + 1, min(stop * MARK_LINES, count) - first, starts, size))
        return tuple(units)

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and line of a text of a pair, for errors."""
        return Location(self.paths[min(text, len(self.paths) - 1)], number)

    def rows(self, unit: LineUnit) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
        """Yields (line, row or the fault). Raises DataError if a file cannot be read."""
        for number, lines in enumerate(self._lines(unit), start=unit.first):
            if number == 1:
                lines = [line.removeprefix(BOM) for line in lines]
            texts = []
            try:
                for line in lines:
                    texts.append(line.decode(self.encoding).rstrip("\r\n"))
            except UnicodeDecodeError as error:
                problem = f"is not {self.encoding} (byte {error.start} of the line)"
                if guess := guess_encoding(line):
                    problem += f", but looks like {guess} (config.parallel.encoding)"
                yield number, Fault(problem, file=len(texts))
                continue
            if self.format == "jsonl":
                yield number, parse_object(texts[0], self.encoding)
            elif self.format == "parallel":
                yield number, dict(zip(self.columns, texts, strict=True))
            elif number > 1 or not self._has_header:
                cells, needed = texts[0].split("\t"), max(self._places[:2]) + 1
                named = zip(self.columns, self._places, strict=True)
                row = {name: cells[place] for name, place in named if place < len(cells)}
                short = Fault(f"has {len(cells)} columns but needs {needed}")
                yield number, row if len(cells) >= needed else short

    def _lines(self, unit: LineUnit) -> Iterator[tuple[bytes, ...]]:
        with contextlib.ExitStack() as stack:
            found = []
            for path, start in zip(self.paths, unit.starts, strict=True):
                with read_errors(path):
                    file = stack.enter_context(open_bytes(path))
                    file.seek(start)
                found.append(_lines_of(path, file))
            yield from itertools.islice(zip(*found, strict=False), unit.count)

    @property
    def _has_header(self) -> bool:
        return self.format == "tsv" and not all(name.isdecimal() for name in self.columns)

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        """Indices of the columns of a tsv file."""
        if not self._has_header:
            return tuple(map(int, self.columns))
        path = self.paths[0]
        with open_bytes(path) as file:
            header = file.readline().removeprefix(BOM).decode(self.encoding, "replace")
        header = header.rstrip("\r\n").split("\t")
        return _find_columns(path, header, self.columns)


def _find_columns(path: Path, header: list[str], names: Sequence[str]) -> tuple[int, ...]:
    for name in names:
        if name not in header:
            raise DataError(
                f"{path} has no column '{name}'; its first line is: "
                f"{shorten(', '.join(header))}. Set config.parallel.columns.",
                field="config.parallel.columns",
                value=name,
                path=path,
            )
    return tuple(map(header.index, names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvRows(RowSource):
    """Rows of a csv file. One process reads all of it, because cells may contain line breaks."""

    units: tuple[Unit, ...]
    encoding: str

    def files_of(self, unit: Unit) -> set[Path]:
        """Returns the file."""
        return set(unit.parts)

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and the first line of a row, for errors."""
        del text  # all texts are in the row
        return Location(self.units[0].parts[0], number)

    def rows(self, unit: Unit) -> Iterator[tuple[int, dict[str, str] | Fault]]:
        """Yields (line, row or the fault).

        Raises:
          DataError: the file cannot be read, lacks a column or has an unclosed quotation mark.
        """
        (path,) = unit.parts
        form = TableFormat("csv", encoding=self.encoding, escape=True)
        header, rows = OPENERS["csv"](path, form, "")
        if all(name.isdecimal() for name in self.columns):  # no header line
            rows = itertools.chain([(1, header)], rows)
            header = list(map(str, range(len(header))))
        places = _find_columns(path, header, self.columns)
        for line, cells in rows:
            if not isinstance(cells, Fault):
                row = {name: cells[place] for name, place in zip(self.columns, places, strict=True)}
                escapes = (describe_escapes(text, self.encoding) for text in row.values())
                problem = next(filter(None, escapes), "")
                cells = Fault(problem) if problem else row
            yield line, cells


def open_pairs(spec: str, section: ParallelSection, targets: Targets = "one") -> RowSource:
    """Opens a source such as "parallel:train.de,train.en" without reading it completely.

    Args:
      targets: see `row_sources.Targets`. Columns after the second are read for "all", "each" and
        "scored" only, and `section.score_column` for "scored".

    Raises:
      DataError: the kind is unknown, a file or column does not exist, a file is not text, or
        `targets` is "one" and there is a third file.
    """
    kind, _, rest = spec.partition(":")
    if kind not in ("parallel", *DEFAULT_COLUMNS) or not rest:
        raise DataError(
            f"Unknown source of pairs '{spec}'. Use parallel:FILE,FILE, tsv:FILE, csv:FILE, "
            "jsonl:FILE, parquet:FILE or tfds:DIR.",
            value=spec,
        )
    columns = section.columns or DEFAULT_COLUMNS.get(kind, ())
    if targets in ("one", "first"):
        columns = columns[:2]
    elif targets == "scored":
        columns = (*columns, section.score_column)
    if kind == "tfds":
        return indexed_rows.open_tfds_pairs(rest, columns, targets)
    if kind == "parquet":
        paths = find_files(rest, "config.parallel.source")
        named = "config.parallel.columns"
        numbers = columns[-1:] if targets == "scored" else ()
        return parquet_files.open_columns(
            spec, paths, columns, named, lists=True, numbers=numbers, targets=targets
        )
    paths = tuple(Path(storage.expand(name.strip())) for name in rest.split(","))
    expected = 2 if kind == "parallel" else 1
    if len(paths) < expected or (len(paths) > expected and kind != "parallel"):
        needed = "two, separated by a comma" if kind == "parallel" else "one"
        problem = f"'{spec}' has {len(paths)} files, but {kind} needs {needed}."
        raise DataError(problem, value=spec)
    if len(paths) > expected and targets in ("one", "each"):
        raise DataError(
            f"'{spec}' has {len(paths)} files, but training data has one target. Use additional "
            "references only in config.parallel.validation_source and "
            "config.decoding.test_sources.",
            field="config.parallel.validation_source",
            value=spec,
        )
    paths = paths if targets == "all" else paths[:2]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} in '{spec}' is not a file. Correct its name.", path=path)
        refuse_other_kinds(path)
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    encoding = codecs.lookup(section.encoding).name
    how = f"{kind} {','.join(columns)} {encoding}"
    fields = {
        "name": spec,
        "fingerprint": fingerprint_files([path.absolute() for path in paths], root, how),
        "columns": tuple(map(str, range(len(paths)))) if kind == "parallel" else columns,
        "targets": targets,
        "encoding": encoding,
    }
    # Both kinds of tables check the columns before workers start.
    if kind == "csv":
        unit = Unit(paths, paths[0].stat().st_size)
        opened = CsvRows(units=(unit,), **fields)
        next(opened.rows(unit), None)
        return opened
    opened = LineRows(paths=paths, format=kind, **fields)
    if kind == "tsv":
        _ = opened._places
    return opened


def _mark_lines(path: Path) -> tuple[list[int], int]:
    """Returns the offsets of every `MARK_LINES`-th line and of the end, and the line count."""
    marks, lines, size = [], 0, 0
    with read_errors(path), open_bytes(path) as file:
        for line in file:
            if lines % MARK_LINES == 0:
                marks.append(size)
            lines += 1
            size += len(line)
    return [*marks, size], lines


def _lines_of(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    with read_errors(path):
        yield from file
