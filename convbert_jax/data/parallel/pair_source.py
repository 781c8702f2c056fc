"""Where pairs of texts come from: two files line by line, a table, or rows of TFDS.

A source is cut into units of some 16 MB, which one process reads from beginning to end. A pair may
have further targets, all of them right, as sets to score by have: more files, more columns, or a
list of texts in place of the target.
"""

import dataclasses
import functools
import gzip
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from convbert_jax import files
from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.sources.documents import unit_bytes
from convbert_jax.data.sources.indexed_rows import open_prepared, rows_at
from convbert_jax.data.sources.text_files import fingerprint_files
from convbert_jax.data.sources.text_formats import refuse_other_kinds
from convbert_jax.data.tables.table_formats import Fault
from convbert_jax.data.tables.text_lines import open_bytes

DEFAULT_COLUMNS = {"tsv": ("0", "1"), "jsonl": ("source", "target"), "tfds": ("source", "target")}
KINDS = ("parallel", *DEFAULT_COLUMNS)
MARK_LINES = 1_024  # between two places of a file that are noted
ROWS_AT_ONCE = 1_024
# What is made of a pair's targets: one alone is allowed, the first is taken, or all are.
Targets = Literal["one", "first", "all"]
Pairs = Iterator[tuple[int, tuple[str, ...] | Fault]]  # a source, its target and further ones


@dataclasses.dataclass(frozen=True)
class PairUnit:
    """`count` pairs from number `first` on, counted from 1: lines of files, rows of a data set."""

    first: int
    count: int
    starts: tuple[int, ...]  # byte of that line in each file, as decompressed; () of rows
    size: int  # bytes of text, estimated for rows


@dataclasses.dataclass(frozen=True)
class PairFiles:
    """Text files, picklable. `fingerprint` depends on content and format, not on the place."""

    name: str
    fingerprint: str
    paths: tuple[Path, ...]
    format: str
    columns: tuple[str, ...]
    targets: Targets

    @property
    def files(self) -> set[Path]:
        """All files that it reads."""
        return set(self.paths)

    @functools.cached_property
    def units(self) -> tuple[PairUnit, ...]:
        """Reads all lines once, to find where units begin.

        Raises:
          DataError: files of unequal line count, unreadable ones, or no line.
        """
        marks, lines = zip(*(_mark_lines(path) for path in self.paths), strict=True)
        if len(set(lines)) > 1:
            counts = " but ".join(
                f"{path} has {count} lines" for path, count in zip(self.paths, lines, strict=True)
            )
            raise DataError(
                f"{counts}; parallel files have a line for each line of the other, blank ones and "
                "the last one too."
            )
        total = sum(of_file[-1] for of_file in marks)
        if not total:
            raise DataError(f"{self.paths[0]}, of the pairs '{self.name}', is empty; name another.")
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

    def place(self, number: int, text: int = 0) -> str:
        """A pair by its number, for errors: where its source is, or another of its texts."""
        return f"{self.paths[min(text, len(self.paths) - 1)]} line {number}"

    def pairs(self, unit: PairUnit) -> Pairs:
        """(line, texts), or what is wrong with a line.

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
                    texts.append(line.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                problem = f"is not UTF-8 (byte {error.start} of the line)"
                yield number, Fault(problem, file=len(texts))
                continue
            if number == 1 and self._has_header:
                continue
            yield number, parse[self.format](texts)

    def _lines(self, unit: PairUnit) -> Iterator[tuple[bytes, ...]]:
        opened = []
        try:
            for path, start in zip(self.paths, unit.starts, strict=True):
                opened.append(open_bytes(path))
                opened[-1].seek(start)
            yield from itertools.islice(zip(*opened, strict=False), unit.count)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self.paths[max(0, len(opened) - 1)], error) from None
        finally:
            for file in opened:
                file.close()

    @property
    def _has_header(self) -> bool:
        return self.format == "tsv" and not all(name.isdecimal() for name in self.columns)

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        """Columns of a tsv by number."""
        if not self._has_header:
            return tuple(map(int, self.columns))
        path = self.paths[0]
        with open_bytes(path) as file:
            header = file.readline().decode("utf-8-sig", "replace").rstrip("\r\n").split("\t")
        for name in self.columns:
            if name not in header:
                raise DataError(
                    f"{path} has no column '{name}' (its first line has: "
                    f"{shorten(', '.join(header))}); set config.parallel.columns."
                )
        return tuple(map(header.index, self.columns))

    def _parse_tsv(self, texts: list[str]) -> tuple[str, ...] | Fault:
        cells, (source, target, *further) = texts[0].split("\t"), self._places
        if len(cells) <= max(source, target):
            return Fault(f"has {len(cells)} columns, not the {max(source, target) + 1} it needs")
        there = [cells[place] for place in further if place < len(cells)]
        return cells[source], cells[target], *_of_words(there)

    def _parse_jsonl(self, texts: list[str]) -> tuple[str, ...] | Fault:
        try:
            row = files.parse_json(texts[0])
        except ValueError as error:
            return Fault(f"is not JSON: {str(error).removeprefix('it is not JSON: ')}")
        return _of_row(row, self.columns, self.targets)


def _parse_parallel(texts: list[str]) -> tuple[str, ...]:
    return texts[0], texts[1], *_of_words(texts[2:])


def _of_words(texts: list) -> list[str]:
    """Those of further targets that are any: a blank cell or line is none."""
    return [text for text in texts if isinstance(text, str) and text.strip()]


@dataclasses.dataclass(frozen=True)
class PairRows:
    """Rows of a folder that TFDS prepared as array_record."""

    name: str
    fingerprint: str
    directory: str
    split: str
    columns: tuple[str, ...]
    targets: Targets
    files: frozenset[Path]
    units: tuple[PairUnit, ...]

    def place(self, number: int, text: int = 0) -> str:
        """A pair by its number, for errors."""
        del text  # all of them are in the row
        return f"{self.name} row {number}"

    def pairs(self, unit: PairUnit) -> Pairs:
        """(row from 1, texts), or what is wrong with a row. Raises DataError for damaged files."""
        rows = open_prepared(self.directory, self.split)[0]
        stop = unit.first - 1 + unit.count
        for start in range(unit.first - 1, stop, ROWS_AT_ONCE):
            wanted = range(start, min(start + ROWS_AT_ONCE, stop))
            for i, row in zip(wanted, rows_at(rows, wanted, self.name), strict=True):
                yield i + 1, _of_row(row, self.columns, self.targets)


PairSource = PairFiles | PairRows


def open_pairs(spec: str, section: ParallelSection, targets: Targets = "one") -> PairSource:
    """The pairs that `spec` names, e.g. "parallel:train.de,train.en"; nothing is read through yet.

    Args:
      targets: of "first" a source is what it would be without further targets, "all" hands them
        out; columns beyond the second are of "all" alone.

    Raises:
      DataError: an unknown kind, a file that is not there or no text, or columns that are not
        there; of "one" a third file.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS or not rest:
        raise DataError(
            f"Pairs '{spec}' are not understood; write parallel:FILE,FILE, tsv:FILE, jsonl:FILE or "
            "tfds:DIR."
        )
    columns = section.columns or DEFAULT_COLUMNS.get(kind, ())
    columns = columns if targets == "all" else columns[:2]
    if kind == "tfds":
        return _open_tfds(rest, columns, targets)
    paths = tuple(Path(files.expand(name.strip())) for name in rest.split(","))
    _check_files(spec, kind, len(paths), targets)
    paths = paths if targets == "all" else paths[:2]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}, of the pairs '{spec}', is no file; correct its name.")
        refuse_other_kinds(path)
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    prints = fingerprint_files([p.absolute() for p in paths], root, f"{kind} {','.join(columns)}")
    opened = PairFiles(spec, prints, paths, kind, columns, targets)
    if kind == "tsv":
        _ = opened._places  # refused here, not by a worker
    return opened


def _check_files(spec: str, kind: str, count: int, targets: Targets) -> None:
    expected = 2 if kind == "parallel" else 1
    if count < expected or (count > expected and kind != "parallel"):
        raise DataError(
            f"'{spec}' names {count} files, but {kind} has "
            f"{'two, with a comma between' if expected == 2 else 'one'}."
        )
    if count > expected and targets == "one":
        raise DataError(
            f"'{spec}' names {count} files, but what is trained on has one target; further "
            "references are of config.parallel.validation_source and config.decoding.test_sources."
        )


def _open_tfds(rest: str, columns: tuple[str, ...], targets: Targets) -> PairRows:
    directory, _, split = rest.partition("#")
    if not (Path(directory) / "dataset_info.json").is_file():
        raise DataError(
            f"{directory} is not a prepared data set (it has no dataset_info.json); name the "
            "folder of its version, for example NAME/1.0.0."
        )
    split = split or "train"
    rows = open_prepared(directory, split)[0]
    count, name = len(rows), f"tfds:{rest}"
    if not count:
        raise DataError(f"{name} has no rows.")
    first = rows_at(rows, [0], name)[0]
    pair = _of_row(first, columns, targets)
    if isinstance(pair, Fault):
        raise DataError(f"{name} row 1 {pair.problem}; set config.parallel.columns.")
    found = sorted(path for path in Path(directory).glob("*.array_record*") if path.is_file())
    prints = fingerprint_files(found, Path(directory), f"tfds {split} {','.join(columns)}")
    average = max(1, len(pair[0].encode()) + len(pair[1].encode()))
    step = max(1, unit_bytes(average * count) // average)
    units = tuple(
        PairUnit(start + 1, min(step, count - start), (), min(step, count - start) * average)
        for start in range(0, count, step)
    )
    return PairRows(name, prints, directory, split, columns, targets, frozenset(found), units)


def _of_row(row, columns: tuple[str, ...], targets: Targets) -> tuple[str, ...] | Fault:
    """Source and targets. A source that is a list of sentences is them with a space between, a list
    of targets are several.
    """
    if not isinstance(row, dict):
        return Fault("is not a JSON object")
    source = _texts_of(row, columns[0])
    target = _texts_of(row, columns[1])
    for name, found in zip(columns, (source, target), strict=False):
        if isinstance(found, Fault):
            return found
        if not found:
            known = shorten(", ".join(map(str, row)))
            return Fault(f"has no text in '{name}' (it has: {known})")
    if targets == "one" and len(target) > 1:  # sentences of one, or several to choose from?
        return Fault(
            f"has a list of {len(target)} texts in '{columns[1]}', of which a target is one"
        )
    if targets != "all":
        return " ".join(source), target[0]
    further = [_texts_of(row, name) for name in columns[2:]]
    rest = [text for found in further if not isinstance(found, Fault) for text in found]
    return " ".join(source), target[0], *_of_words([*target[1:], *rest])


def _texts_of(row: dict, name: str) -> list[str] | Fault:
    """The text or the texts of a column, [] where something there is none."""
    text = row.get(name)
    parts = list(text) if isinstance(text, list | tuple) else [text]
    try:
        parts = [part.decode("utf-8") if isinstance(part, bytes) else part for part in parts]
    except UnicodeDecodeError:
        return Fault(f"has no UTF-8 in '{name}'")
    return parts if all(isinstance(part, str) for part in parts) else []


def _mark_lines(path: Path) -> tuple[list[int], int]:
    """Bytes before every `MARK_LINES`-th line of a file and before its end; its lines."""
    marks, lines, size = [], 0, 0
    try:
        with open_bytes(path) as file:
            for line in file:
                if lines % MARK_LINES == 0:
                    marks.append(size)
                lines += 1
                size += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None
    return [*marks, size], lines


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return DataError(f"{path} is a damaged gzip file ({error}); fetch it again.")
    return DataError(f"{path} cannot be read: {error.strerror}.")
