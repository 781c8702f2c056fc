"""Plain and gzipped text files in five formats, and tables with a text column.

Text files are split into byte ranges at document boundaries; tables are read whole.
"""

import codecs
import dataclasses
import glob
import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.sources.documents import LONGEST, clean, decode, unit_bytes
from convbert_jax.data.sources.text_formats import (
    FORMATS,
    TABLES,
    describe_bad_text,
    detect_format,
    read_lines,
    refuse_other_kinds,
)
from convbert_jax.data.tables.table_files import ABSENT, find_value, list_columns, read_table
from convbert_jax.data.tables.table_formats import BadRows, TableFormat
from convbert_jax.data.tables.text_lines import open_bytes

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
class TextUnit:
    parts: tuple[Part, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class TextFiles:
    name: str
    fingerprint: str
    root: Path
    format: str
    text_field: str
    encoding: str
    encoding_errors: str
    units: tuple[TextUnit, ...]

    @property
    def files(self) -> set[Path]:
        """All files of the corpus."""
        return {path for unit in self.units for path in self.files_of(unit)}

    def files_of(self, unit: TextUnit) -> set[Path]:
        """Returns the files of one unit."""
        return {self.root / part.file for part in unit.parts}

    def documents(self, unit: TextUnit, tally: Counter | None = None) -> Iterator[str]:
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
                with open_bytes(path) as file:
                    file.seek(part.start)
                    yield from self._documents(file, part, tally)
            except UnicodeDecodeError:
                raise DataError(describe_bad_text(path, self.encoding), path=path) from None
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{path} is a damaged gzip file ({error}). Download it again or exclude it.",
                    path=path,
                ) from None
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}.", path=path) from None

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
                        f"{self.root / part.file} is not jsonl: the line at byte {offset} is "
                        f"longer than {limit // 2} bytes. Set config.data.format.",
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
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not offset and line.lstrip().startswith("["):
                raise DataError(_describe_list(path), path=path) from None
            raise DataError(
                f"{path} has no JSON object at byte {offset}: {error}. Fix the file, or set "
                "config.data.format if it is not jsonl.",
                field="config.data.format",
                path=path,
            ) from None
        if isinstance(record, list) and not offset:
            raise DataError(_describe_list(path), path=path)
        field, is_object = self.text_field, isinstance(record, dict)
        text = find_value(record, field) if is_object else ABSENT
        if text is ABSENT:
            names = list_columns(record) if is_object else type(record).__name__
            raise DataError(
                f"{path} has no field '{field}' at byte {offset} (found: {names}). "
                "Set config.data.text_field.",
                field="config.data.text_field",
                value=field,
                path=path,
            )
        if text is None:
            return ""  # skipped, as in Parquet files
        if not isinstance(text, str):
            raise DataError(
                f"{path} has {shorten(repr(text), 40)} instead of text in '{field}' at byte "
                f"{offset}. Fix the file or set config.data.text_field.",
                field="config.data.text_field",
                value=field,
                path=path,
            )
        return text


def _describe_list(path: Path) -> str:
    return (
        f"{path} is a JSON list, not one object per line. Convert it, for example with "
        f"jq -c '.[]' {path.name}."
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


def _units(paths: list[Path], root: Path, kind: str) -> tuple[TextUnit, ...]:
    sizes = [path.stat().st_size * (GZIP_RATIO if path.suffix == ".gz" else 1) for path in paths]
    target = unit_bytes(sum(sizes))
    units, group, filled = [], [], 0
    for path, size in zip(paths, sizes, strict=True):
        for part in _parts(path, path.relative_to(root).as_posix(), size, kind, target):
            group.append(part)
            filled += part.size
            if filled >= target:
                units.append(TextUnit(tuple(group), filled))
                group, filled = [], 0
    if group:
        units.append(TextUnit(tuple(group), filled))
    return tuple(units)


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
