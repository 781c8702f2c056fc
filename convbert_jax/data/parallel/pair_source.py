"""Sources of text pairs: two files line by line, a table, or rows of a data set.

A source is divided into units of about 16 MB, each read sequentially by one process. A pair of a
test set may have several references, given as more files, more columns, or a list of targets.
"""

import codecs
import dataclasses
import functools
import gzip
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from convbert_jax import files
from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.parallel.pair_rows import (
    PairParquet,
    PairRows,
    Pairs,
    PairUnit,
    Targets,
    of_row,
    of_words,
    open_parquet,
    open_tfds,
)
from convbert_jax.data.sources.documents import unit_bytes
from convbert_jax.data.sources.text_files import fingerprint_files
from convbert_jax.data.sources.text_formats import refuse_other_kinds
from convbert_jax.data.tables.encodings import guess_encoding
from convbert_jax.data.tables.table_formats import OPENERS, Fault, TableFormat
from convbert_jax.data.tables.text_lines import describe_escapes, open_bytes

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
        try:
            row = files.parse_json(texts[0])
        except ValueError as error:
            return Fault(f"is not JSON: {str(error).removeprefix('it is not JSON: ')}")
        return of_row(row, self.columns, self.targets)


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
    paths = tuple(Path(files.expand(name.strip())) for name in rest.split(","))
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
        return DataError(f"{path} is a damaged gzip file: {error}. Download it again.", path=path)
    return DataError(f"Cannot read {path}: {error.strerror}.", path=path)
