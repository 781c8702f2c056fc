"""Pairs of texts from rows with named columns: TFDS and parquet files."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from convbert_jax.data.errors import DataError, Location
from convbert_jax.data.sources.documents import unit_bytes
from convbert_jax.data.sources.indexed_rows import open_prepared, rows_at
from convbert_jax.data.sources.parquet_files import RowGroups, list_groups, make_units, read_rows
from convbert_jax.data.sources.text_files import find_files, fingerprint_files
from convbert_jax.data.tables.table_files import find_value, list_columns
from convbert_jax.data.tables.table_formats import Fault

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
    if not (Path(directory) / "dataset_info.json").is_file():
        raise DataError(
            f"{directory} is not a prepared data set: dataset_info.json is missing. Use the folder "
            "of its version, for example NAME/1.0.0.",
            path=directory,
        )
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
    found = sorted(path for path in Path(directory).glob("*.array_record*") if path.is_file())
    prints = fingerprint_files(found, Path(directory), f"tfds {split} {','.join(columns)}")
    average = max(1, len(pair[0].encode()) + len(pair[1].encode()))
    step = max(1, unit_bytes(average * count) // average)
    units = tuple(
        PairUnit(start + 1, min(step, count - start), (), min(step, count - start) * average)
        for start in range(0, count, step)
    )
    return PairRows(name, prints, directory, split, columns, targets, frozenset(found), units)


@dataclasses.dataclass(frozen=True)
class PairParquet:
    """Pairs from parquet files, numbered consecutively over all files."""

    name: str
    fingerprint: str
    root: Path
    columns: tuple[str, ...]
    targets: Targets
    units: tuple[RowGroups, ...]
    first_rows: Mapping[tuple[str, int], int]  # by file and row group, in order; from 1

    @property
    def files(self) -> set[Path]:
        """All files that are read."""
        return {path for unit in self.units for path in self.files_of(unit)}

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


def of_row(row, columns: tuple[str, ...], targets: Targets) -> tuple[str, ...] | Fault:
    """Returns (source, target, *more targets) of a row, or the fault.

    A source that is a list of sentences is joined by spaces; a list of targets is a list of
    references.
    """
    if not isinstance(row, dict):
        return Fault("is not a JSON object")
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
