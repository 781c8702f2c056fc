"""Parquet files, local or from the Hugging Face hub, read by row groups."""

import dataclasses
import errno
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.readers.row_sources import RowSource
from convbert_jax.data.readers.text_files import (
    TextFiles,
    Unit,
    find_files,
    fingerprint_files,
    group_units,
    open_files,
    unit_bytes,
)

ROWS_AT_ONCE = 128
# Files of the hub with these suffixes are read like `text:` sources.
TEXT_ENDINGS = tuple(
    f".{kind}{packed}"
    for kind in ("txt", "jsonl", "ndjson", "json", "csv", "tsv")
    for packed in ("", ".gz")
)
_FULL = os.strerror(errno.ENOSPC)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetRows(RowSource):
    """Rows of Parquet files, numbered consecutively over all files.

    A part of a unit is (file relative to the root, index of the row group).
    """

    root: Path
    units: tuple[Unit, ...]
    first_rows: Mapping[tuple[str, int], int]  # by file and row group, in order; from 1

    def files_of(self, unit: Unit) -> set[Path]:
        """Returns the files of one unit."""
        return {self.root / file for file, _ in unit.parts}

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the file and row of a row, for errors."""
        del text  # all texts are in the row
        _, file = max((row, file) for (file, _), row in self.first_rows.items() if row <= number)
        return Location(self.root / file, number - self.first_rows[file, 0] + 1, "row")

    def rows(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (row from 1, values by column); text as bytes. Raises DataError if damaged."""
        for file, group in unit.parts:
            found = _read_rows(self.root / file, group, self.columns)
            for number, values in enumerate(found, start=self.first_rows[file, group]):
                yield number, dict(zip(self.columns, values, strict=True))


def _read_rows(path: Path, group: int, names: Sequence[str]) -> Iterator[tuple]:
    """Yields the values of columns in each row of a row group; text as bytes, maybe not UTF-8.

    Args:
      names: columns, already checked by `_list_groups`.

    Raises:
      DataError: the file is damaged.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # Without pre_buffer and with small batches, a row group is streamed instead of loaded.
        with parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as file:
            for batch in file.iter_batches(
                ROWS_AT_ONCE, row_groups=[group], columns=list(names), use_threads=False
            ):
                yield from zip(*(_read_column(batch, name) for name in names), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        reason = shorten(" ".join(str(error).split()))
        problem = f"damaged in row group {group} ({reason}). Download it again."
        raise DataError(problem, path=path) from None


def _read_column(batch, name: str) -> list:
    import pyarrow
    from pyarrow import compute

    (first, *inner), kind = _find_column(batch.schema, name)
    column = batch.column(first)
    column = compute.struct_field(column, inner) if inner else column
    if _is_number(kind):
        return column.to_pylist()
    binary = pyarrow.large_binary()
    return column.cast(pyarrow.large_list(binary) if _is_list(kind) else binary).to_pylist()


def open_parquet(rest: str, section: DataSection) -> ParquetRows:
    """Opens files by comma-separated globs; `section.text_field` must be a string column."""
    return _open(f"parquet:{rest}", find_files(rest), section)


def open_hub(rest: str, section: DataSection) -> ParquetRows | TextFiles:
    """Opens the files OWNER/NAME/GLOB of the hub, downloaded into its cache on first use.

    Reads Parquet, or text and tables like `text:`; files with other suffixes are ignored.

    Raises:
      DataError: unknown data set or file, unsupported file type, no network and nothing in the
        cache, or a cache that is not writable.
    """
    import huggingface_hub

    owner, _, rest_of_name = rest.partition("/")
    name, _, pattern = rest_of_name.partition("/")
    spec = f"hub:{rest}"
    if not pattern:
        raise DataError(
            "must be hub:OWNER/NAME/FILE-GLOB, for example "
            "hub:wikimedia/wikipedia/20231101.en/*.parquet.",
            field="config.data.source",
            value=spec,
        )
    if not pattern.endswith(("*", ".parquet", *TEXT_ENDINGS)):  # before anything is downloaded
        raise DataError(
            f"names files of an unsupported type; hub: reads .parquet, {', '.join(TEXT_ENDINGS)}. "
            f"Try datasets:{owner}/{name}.",
            field="config.data.source",
            value=spec,
        )
    try:
        folder = huggingface_hub.snapshot_download(
            f"{owner}/{name}", repo_type="dataset", allow_patterns=pattern
        )
    # The hub's client also raises errors of its transport and of the file system.
    except Exception as error:
        # Some network errors are OSErrors too; hf_xet (Rust) has no errno, only the text.
        known = isinstance(error, OSError)
        if error.errno in _DISK if known else _FULL in str(error):
            reason = getattr(error, "strerror", "") or _FULL
            problem = f"could not be saved in {huggingface_hub.constants.HF_HUB_CACHE} ({reason})"
            fix = (
                "Free some space, or set the environment variable HF_HOME to a folder on another "
                "disk"
            )
        else:
            problem = f"could not be downloaded ({type(error).__name__})"
            fix = (
                "Check the name and the network, or download the files elsewhere and use "
                "parquet:GLOB or text:GLOB"
            )
        raise DataError(f"{spec} {problem}. {fix}.", value=spec) from error
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    paths = [p for p in paths if fnmatch.fnmatch(p.relative_to(folder).as_posix(), pattern)]
    tables = [path for path in paths if path.suffix == ".parquet"]
    texts = [path for path in paths if path.name.endswith(TEXT_ENDINGS)]
    if not tables and not texts:
        raise DataError(
            f"No supported file (.parquet, {', '.join(TEXT_ENDINGS)}) of {owner}/{name} "
            f"matches '{pattern}'. Check config.data.source.",
            field="config.data.source",
            value=pattern,
        )
    if tables and texts:
        raise DataError(
            f"matches Parquet files ({tables[0].name}) and text files ({texts[0].name}). Use a "
            "pattern for one type, for example *.parquet.",
            field="config.data.source",
            value=spec,
        )
    return _open(spec, tables, section) if tables else open_files(spec, texts, section)


def _open(name: str, paths: list[Path], section: DataSection) -> ParquetRows:
    columns, errors = (section.text_field,), section.encoding_errors
    return open_columns(name, paths, columns, "config.data.text_field", encoding_errors=errors)


def open_columns(
    name: str,
    paths: Sequence[Path],
    columns: tuple[str, ...],
    field: str,
    *,
    lists: bool = False,
    numbers: Sequence[str] = (),
    **fields: Any,
) -> ParquetRows:
    """Opens columns of Parquet files.

    Args:
      columns: "translation.en" is the field "en" of the column "translation", unless a column
        "translation.en" exists.
      field: the config field that names the columns, for error messages.
      lists: whether lists of texts are allowed.
      numbers: columns of numbers; the others have text.
      fields: further fields of `RowSource`.

    Raises:
      DataError: not a Parquet file, unknown column, a column without text, or no rows.
    """
    root = Path(os.path.commonpath([path.parent for path in paths]))
    first_rows, parts, row = {}, [], 1
    for path in paths:
        file = path.relative_to(root).as_posix()
        for index, (rows, size) in enumerate(_measure_groups(path, columns, field, lists, numbers)):
            first_rows[file, index] = row
            parts.append(((file, index), size))
            row += rows
    if row == 1:
        raise DataError(f"{name} has no rows. Use another file.", value=name)
    return ParquetRows(
        name=name,
        fingerprint=fingerprint_files(paths, root, f"parquet {','.join(columns)}"),
        columns=columns,
        root=root,
        units=group_units(parts, unit_bytes(sum(size for _, size in parts))),
        first_rows=first_rows,
        **fields,
    )


def _measure_groups(
    path: Path, names: Sequence[str], field: str, lists: bool, numbers: Sequence[str]
) -> list[tuple[int, int]]:
    """Returns (rows, uncompressed bytes of the columns) of each row group."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        raise DataError(f"{path} is not a Parquet file. Check its name.", path=path) from None
    schema = metadata.schema.to_arrow_schema()
    for name in names:
        place, kind = _find_column(schema, name)
        if place and name in numbers and _is_number(kind):
            continue
        if place and _is_text(kind.value_type if lists and _is_list(kind) else kind):
            continue
        problem = f"{path} has no column '{name}' (columns: {shorten(', '.join(_names(schema)))})"
        if place:
            problem = f"Column '{name}' of {path} has type {kind}, not text"
        raise DataError(f"{problem}. Set {field}.", field=field, value=name, path=path)
    leaves = [f"{metadata.schema.column(i).path}." for i in range(metadata.num_columns)]
    prefixes = tuple(f"{name}." for name in names)  # a list is the leaf "name.list.element"
    places = [i for i, leaf in enumerate(leaves) if leaf.startswith(prefixes)]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return [
        (group.num_rows, sum(group.column(i).total_uncompressed_size for i in places))
        for group in groups
    ]


def _find_column(schema, name: str):
    """Returns ([index of the column, indices of nested fields], type); ([], None) if missing.

    Args:
      schema: schema or struct type.
    """
    import pyarrow

    names = [field.name for field in schema]
    first, dot, rest = (name, "", "") if name in names else name.partition(".")
    if first not in names:
        return [], None
    place = names.index(first)
    kind = schema.field(place).type
    if not dot:
        return [place], kind
    inner, kind = _find_column(kind, rest) if isinstance(kind, pyarrow.StructType) else ([], None)
    return inner and [place, *inner], kind


def _names(schema) -> Iterator[str]:
    """Yields the names of all columns, with dots for nested fields."""
    import pyarrow

    for field in schema:
        if isinstance(field.type, pyarrow.StructType):
            yield from (f"{field.name}.{inner}" for inner in _names(field.type))
        else:
            yield field.name


def _is_list(kind) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def _is_number(kind) -> bool:
    from pyarrow import types

    return types.is_floating(kind) or types.is_integer(kind)


def _is_text(kind) -> bool:
    """Returns whether an Arrow type is text or dictionary-encoded text."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(is_(kind) for is_ in (types.is_string, types.is_large_string, types.is_string_view))
