"""Sources of text pairs: two files line by line, a table, or rows of a data set.

A source is divided into units of about 16 MB, each read sequentially by one process. A pair of a
test set may have several references, given as more files, more columns, or a list of targets.
"""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from convbert_jax import storage
from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.readers.indexed_rows import (
    check_prepared,
    list_files,
    open_prepared,
    rows_at,
    split_rows,
)
from convbert_jax.data.readers.parquet_files import RowGroups, list_groups, make_units, read_rows
from convbert_jax.data.readers.tables import (
    OPENERS,
    Fault,
    TableFormat,
    find_value,
    list_columns,
    parse_object,
)
from convbert_jax.data.readers.text_files import (
    UnitFiles,
    find_files,
    fingerprint_files,
    refuse_other_kinds,
    unit_bytes,
)
from convbert_jax.data.readers.text_lines import (
    describe_escapes,
    guess_encoding,
    open_bytes,
    read_errors,
)

ROWS_AT_ONCE = 1_024
# Targets of a pair: "one" rejects pairs with more than one, "first" drops the others.
Targets = Literal["one", "first", "all"]
Pairs = Iterator[tuple[int, tuple[str, ...] | Fault]]  # number, (source, target, *more targets)


@dataclasses.dataclass(frozen=True)
class PairUnit:
    """`count` pairs (lines of files, rows of a data set) from number `first`, counted from 1."""

    first: int
    count: int
    starts: tuple[int, ...]  # offset of the first line in each decompressed file; () for rows
    size: int  # bytes of text, estimated for rows


@dataclasses.dataclass(frozen=True)
class PairRows:
    """Pairs from a folder that TFDS prepared as array_record."""

    name: str
    fingerprint: str
    directory: str
    split: str
    columns: tuple[str, ...]
    targets: Targets
    files: frozenset[Path]
    units: tuple[PairUnit, ...]

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the data set and row of a pair, for errors."""
        del text  # all texts are in the row
        return Location(self.name, number, "row")

    def pairs(self, unit: PairUnit) -> Pairs:
        """Yields (row from 1, texts or the fault). Raises DataError for damaged files."""
        rows = open_prepared(self.directory, self.split)[0]
        stop = unit.first - 1 + unit.count
        for start in range(unit.first - 1, stop, ROWS_AT_ONCE):
            wanted = range(start, min(start + ROWS_AT_ONCE, stop))
            for i, row in zip(wanted, rows_at(rows, wanted, self.name), strict=True):
                yield i + 1, of_row(row, self.columns, self.targets)


def open_tfds(rest: str, columns: tuple[str, ...], targets: Targets) -> PairRows:
    directory, _, split = rest.partition("#")
    check_prepared(directory)
    split = split or "train"
    rows = open_prepared(directory, split)[0]
    count, name = len(rows), f"tfds:{rest}"
    if not count:
        raise DataError(f"{name} has no rows. Use another split or data set.", value=name)
    first = rows_at(rows, [0], name)[0]
    pair = of_row(first, columns, targets)
    if isinstance(pair, Fault):
        raise DataError(
            f"{name} row 1 {pair.problem}. Set config.parallel.columns.",
            field="config.parallel.columns",
            line=1,
        )
    found = list_files(directory)
    prints = fingerprint_files(found, Path(directory), f"tfds {split} {','.join(columns)}")
    average = max(1, len(pair[0].encode()) + len(pair[1].encode()))
    units = tuple(
        PairUnit(part.start + 1, part.stop - part.start, (), part.size)
        for part in split_rows(count, average)
    )
    return PairRows(name, prints, directory, split, columns, targets, frozenset(found), units)


@dataclasses.dataclass(frozen=True)
class PairParquet(UnitFiles):
    """Pairs from parquet files, numbered consecutively over all files."""

    name: str
    fingerprint: str
    root: Path
    columns: tuple[str, ...]
    targets: Targets
    units: tuple[RowGroups, ...]
    first_rows: Mapping[tuple[str, int], int]  # by file and row group, in order; from 1

    def files_of(self, unit: RowGroups) -> set[Path]:
        """Returns the files of one unit."""
        return {self.root / file for file, _ in unit.parts}

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and row of a pair, for errors."""
        del text  # all texts are in the row
        _, file = max((row, file) for (file, _), row in self.first_rows.items() if row <= number)
        return Location(self.root / file, number - self.first_rows[file, 0] + 1, "row")

    def pairs(self, unit: RowGroups) -> Pairs:
        """Yields (row from 1, texts or the fault). Raises DataError for damaged files."""
        for file, group in unit.parts:
            found = read_rows(self.root / file, group, self.columns)
            for number, values in enumerate(found, start=self.first_rows[file, group]):
                row = dict(zip(self.columns, values, strict=True))
                yield number, of_row(row, self.columns, self.targets)


def open_parquet(rest: str, columns: tuple[str, ...], targets: Targets) -> PairParquet:
    """Opens the parquet files that match comma-separated globs.

    Raises:
      DataError: a file or column does not exist, a column has no text, or there are no rows.
    """
    paths = find_files(rest, "config.parallel.source")
    root, groups = list_groups(paths, columns, field="config.parallel.columns", lists=True)
    first_rows, row = {}, 1
    for group in groups:
        first_rows[group.file, group.index] = row
        row += group.rows
    if row == 1:
        raise DataError(f"parquet:{rest} has no rows. Use another file.", value=f"parquet:{rest}")
    prints = fingerprint_files(paths, root, f"parquet {','.join(columns)}")
    units = make_units(groups)
    return PairParquet(f"parquet:{rest}", prints, root, columns, targets, units, first_rows)


def of_row(
    row: Mapping[str, Any], columns: tuple[str, ...], targets: Targets
) -> tuple[str, ...] | Fault:
    """Returns (source, target, *more targets) of a row, or the fault.

    A source that is a list of sentences is joined by spaces; a list of targets is a list of
    references.
    """
    source = _texts_of(row, columns[0])
    target = _texts_of(row, columns[1])
    for name, found in zip(columns, (source, target), strict=False):
        if isinstance(found, Fault):
            return found
        if not found:
            return Fault(f"has no text in '{name}' (it has: {list_columns(row)})")
    if targets == "one" and len(target) > 1:  # ambiguous: sentences or alternative targets
        return Fault(f"has a list of {len(target)} texts in '{columns[1]}' instead of one target")
    if targets != "all":
        return " ".join(source), target[0]
    further = [_texts_of(row, name) for name in columns[2:]]
    rest = [text for found in further if not isinstance(found, Fault) for text in found]
    return " ".join(source), target[0], *of_words([*target[1:], *rest])


def _texts_of(row: dict, name: str) -> list[str] | Fault:
    """Returns the texts of a column; [] if it has no text or a value that is not a string."""
    text = find_value(row, name)
    parts = list(text) if isinstance(text, list | tuple) else [text]
    try:
        parts = [part.decode("utf-8") if isinstance(part, bytes) else part for part in parts]
    except UnicodeDecodeError:
        return Fault(f"has bytes in '{name}' that are not UTF-8")
    return parts if all(isinstance(part, str) for part in parts) else []


def of_words(texts: list) -> list[str]:
    """Drops blank texts: a blank cell or line is not an additional target."""
    return [text for text in texts if isinstance(text, str) and text.strip()]


DEFAULT_COLUMNS = {"tsv": ("0", "1")} | dict.fromkeys(
    ("csv", "jsonl", "parquet", "tfds"), ("source", "target")
)
MARK_LINES = 1_024  # lines between two recorded offsets of a file


@dataclasses.dataclass(frozen=True)
class PairFiles:
    """Text files; picklable. `fingerprint` depends on content and format, not on the path."""

    name: str
    fingerprint: str
    paths: tuple[Path, ...]
    format: str
    columns: tuple[str, ...]
    targets: Targets
    encoding: str

    @property
    def files(self) -> set[Path]:
        """All files that are read."""
        return set(self.paths)

    @functools.cached_property
    def units(self) -> tuple[PairUnit, ...]:
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
            units.append(PairUnit(first + 1, min(stop * MARK_LINES, count) - first, starts, size))
        return tuple(units)

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and line of a text of a pair, for errors."""
        return Location(self.paths[min(text, len(self.paths) - 1)], number)

    def pairs(self, unit: PairUnit) -> Pairs:
        """Yields (line, texts or the fault).

        Raises:
          DataError: a file cannot be read.
        """
        parse = {"parallel": _parse_parallel, "tsv": self._parse_tsv, "jsonl": self._parse_jsonl}
        for number, lines in enumerate(self._lines(unit), start=unit.first):
            if number == 1:
                lines = [line.removeprefix(b"\xef\xbb\xbf") for line in lines]
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
            if number == 1 and self._has_header:
                continue
            yield number, parse[self.format](texts)

    def _lines(self, unit: PairUnit) -> Iterator[tuple[bytes, ...]]:
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
            header = file.readline().removeprefix(b"\xef\xbb\xbf").decode(self.encoding, "replace")
        header = header.rstrip("\r\n").split("\t")
        return _find_columns(path, header, self.columns)

    def _parse_tsv(self, texts: list[str]) -> tuple[str, ...] | Fault:
        cells, (source, target, *further) = texts[0].split("\t"), self._places
        if len(cells) <= max(source, target):
            return Fault(f"has {len(cells)} columns but needs {max(source, target) + 1}")
        there = [cells[place] for place in further if place < len(cells)]
        return cells[source], cells[target], *of_words(there)

    def _parse_jsonl(self, texts: list[str]) -> tuple[str, ...] | Fault:
        row = parse_object(texts[0], self.encoding)
        return row if isinstance(row, Fault) else of_row(row, self.columns, self.targets)


def _parse_parallel(texts: list[str]) -> tuple[str, ...]:
    return texts[0], texts[1], *of_words(texts[2:])


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


@dataclasses.dataclass(frozen=True)
class PairCsv:
    """A csv file. One process reads all of it, because cells may contain line breaks."""

    name: str
    fingerprint: str
    path: Path
    columns: tuple[str, ...]
    targets: Targets
    encoding: str
    units: tuple[PairUnit, ...]

    @property
    def files(self) -> set[Path]:
        """The file."""
        return {self.path}

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and the first line of a pair, for errors."""
        del text  # all texts are in the row
        return Location(self.path, number)

    def pairs(self, unit: PairUnit) -> Pairs:
        """Yields (line, texts or the fault).

        Raises:
          DataError: the file cannot be read, lacks a column or has an unclosed quotation mark.
        """
        del unit
        form = TableFormat("csv", encoding=self.encoding, escape=True)
        header, rows = OPENERS["csv"](self.path, form, "")
        if all(name.isdecimal() for name in self.columns):  # no header line
            rows = itertools.chain([(1, header)], rows)
            header = list(map(str, range(len(header))))
        places = _find_columns(self.path, list(header), self.columns)
        for line, cells in rows:
            if not isinstance(cells, Fault):
                row = {name: cells[place] for name, place in zip(self.columns, places, strict=True)}
                escapes = (describe_escapes(text, self.encoding) for text in row.values())
                problem = next(filter(None, escapes), "")
                cells = Fault(problem) if problem else of_row(row, self.columns, self.targets)
            yield line, cells


PairSource = PairFiles | PairCsv | PairRows | PairParquet


def open_pairs(spec: str, section: ParallelSection, targets: Targets = "one") -> PairSource:
    """Opens a source such as "parallel:train.de,train.en" without reading it completely.

    Args:
      targets: "one" rejects additional targets, "first" ignores them, "all" returns them. Columns
        after the second are read for "all" only.

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
    columns = columns if targets == "all" else columns[:2]
    if kind == "tfds":
        return open_tfds(rest, columns, targets)
    if kind == "parquet":
        return open_parquet(rest, columns, targets)
    paths = tuple(Path(storage.expand(name.strip())) for name in rest.split(","))
    _check_files(spec, kind, len(paths), targets)
    paths = paths if targets == "all" else paths[:2]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} in '{spec}' is not a file. Correct its name.", path=path)
        refuse_other_kinds(path)
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    encoding = codecs.lookup(section.encoding).name
    how = f"{kind} {','.join(columns)} {encoding}"
    prints = fingerprint_files([path.absolute() for path in paths], root, how)
    if kind == "csv":
        units = (PairUnit(1, 0, (), paths[0].stat().st_size),)
        opened = PairCsv(spec, prints, paths[0], columns, targets, encoding, units)
        next(opened.pairs(units[0]), None)  # checks the columns before workers start
        return opened
    opened = PairFiles(spec, prints, paths, kind, columns, targets, encoding)
    if kind == "tsv":
        _ = opened._places  # checks the columns before workers start
    return opened


def _check_files(spec: str, kind: str, count: int, targets: Targets) -> None:
    expected = 2 if kind == "parallel" else 1
    if count < expected or (count > expected and kind != "parallel"):
        raise DataError(
            f"'{spec}' has {count} files, but {kind} needs "
            f"{'two, separated by a comma' if expected == 2 else 'one'}.",
            value=spec,
        )
    if count > expected and targets == "one":
        raise DataError(
            f"'{spec}' has {count} files, but training data has one target. Use additional "
            "references only in config.parallel.validation_source and "
            "config.decoding.test_sources.",
            field="config.parallel.validation_source",
            value=spec,
        )


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
