"""Parquet files, local or from the Hugging Face hub, read by row groups."""

import dataclasses
import errno
import fnmatch
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.readers.text_files import (
    TextFiles,
    UnitFiles,
    clean,
    decode,
    find_files,
    fingerprint_files,
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


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group of a file; `size` is the uncompressed bytes of the columns that are read."""

    file: str  # relative to the root
    index: int
    rows: int
    size: int


@dataclasses.dataclass(frozen=True)
class RowGroups:
    parts: tuple[tuple[str, int], ...]  # (file relative to the root, index of the row group)
    size: int


@dataclasses.dataclass(frozen=True)
class ParquetFiles(UnitFiles):
    name: str
    fingerprint: str
    root: Path
    text_field: str
    encoding_errors: str
    units: tuple[RowGroups, ...]

    def files_of(self, unit: RowGroups) -> set[Path]:
        """Returns the files of one unit."""
        return {self.root / file for file, _ in unit.parts}

    def documents(self, unit: RowGroups, tally: Counter | None = None) -> Iterator[str]:
        """Yields the texts of the rows of `unit`; null and blank texts are skipped."""
        for file, group in unit.parts:
            path = self.root / file
            for (data,) in read_rows(path, group, [self.text_field]):
                try:
                    text = decode(data or b"", self.encoding_errors, tally)
                except UnicodeDecodeError:
                    raise DataError(
                        f"{path} has text that is not UTF-8 in row group {group}. Set "
                        "config.data.encoding_errors to 'replace' or 'skip'.",
                        field="config.data.encoding_errors",
                        path=path,
                    ) from None
                yield from clean(text or "")


def read_rows(path: Path, group: int, names: Sequence[str]) -> Iterator[tuple]:
    """Yields the values of columns in each row of a row group; text as bytes, maybe not UTF-8.

    Args:
      names: columns, already checked by `list_groups`.

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
        raise DataError(
            f"{path} is damaged in row group {group} ({reason}). Download it again.", path=path
        ) from None


def _read_column(batch, name: str) -> list:
    import pyarrow
    from pyarrow import compute

    (first, *inner), kind = _find_column(batch.schema, name)
    column = batch.column(first)
    column = compute.struct_field(column, inner) if inner else column
    binary = pyarrow.large_binary()
    return column.cast(pyarrow.large_list(binary) if _is_list(kind) else binary).to_pylist()


def open_parquet(rest: str, section: DataSection) -> ParquetFiles:
    """Opens files by comma-separated globs; `section.text_field` must be a string column."""
    return _open(f"parquet:{rest}", find_files(rest), section)


def open_hub(rest: str, section: DataSection) -> ParquetFiles | TextFiles:
    """Opens the files OWNER/NAME/GLOB of the hub, downloaded into its cache on first use.

    Reads Parquet, or text and tables like `text:`; files with other suffixes are ignored.

    Raises:
      DataError: unknown data set or file, unsupported file type, no network and nothing in the
        cache, or a cache that is not writable.
    """
    import huggingface_hub

    owner, _, rest_of_name = rest.partition("/")
    name, _, pattern = rest_of_name.partition("/")
    if not pattern:
        raise DataError(
            f"config.data.source='hub:{rest}' must be hub:OWNER/NAME/FILE-GLOB, for example "
            "hub:wikimedia/wikipedia/20231101.en/*.parquet.",
            field="config.data.source",
            value=f"hub:{rest}",
        )
    if not pattern.endswith(("*", ".parquet", *TEXT_ENDINGS)):  # before anything is downloaded
        raise DataError(
            f"config.data.source='hub:{rest}' names files of an unsupported type; hub: reads "
            f".parquet, {', '.join(TEXT_ENDINGS)}. Try datasets:{owner}/{name}.",
            field="config.data.source",
            value=f"hub:{rest}",
        )
    try:
        folder = huggingface_hub.snapshot_download(
            f"{owner}/{name}", repo_type="dataset", allow_patterns=pattern
        )
    # The hub's client also raises errors of its transport and of the file system.
    except Exception as error:
        if _is_of_the_disk(error):
            raise DataError(
                f"hub:{rest} could not be saved in {huggingface_hub.constants.HF_HUB_CACHE} "
                f"({getattr(error, 'strerror', '') or _FULL}). Free some space, or set the "
                "environment variable HF_HOME to a folder on another disk.",
                value=f"hub:{rest}",
            ) from error
        raise DataError(
            f"hub:{rest} could not be downloaded ({type(error).__name__}). Check the name and the "
            "network, or download the files elsewhere and use parquet:GLOB or text:GLOB.",
            value=f"hub:{rest}",
        ) from error
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
            f"config.data.source='hub:{rest}' matches Parquet files ({tables[0].name}) and text "
            f"files ({texts[0].name}). Use a pattern for one type, for example *.parquet.",
            field="config.data.source",
            value=f"hub:{rest}",
        )
    return (
        _open(f"hub:{rest}", tables, section)
        if tables
        else open_files(f"hub:{rest}", texts, section)
    )


def _is_of_the_disk(error: Exception) -> bool:
    """Returns whether the cache is not writable; some network errors are OSErrors too."""
    if isinstance(error, OSError):
        return error.errno in _DISK
    return _FULL in str(error)  # hf_xet (Rust) has no errno, only the text


def _open(name: str, paths: list[Path], section: DataSection) -> ParquetFiles:
    root, groups = list_groups(paths, [section.text_field], field="config.data.text_field")
    return ParquetFiles(
        name=name,
        fingerprint=fingerprint_files(paths, root, f"parquet {section.text_field}"),
        root=root,
        text_field=section.text_field,
        encoding_errors=section.encoding_errors,
        units=make_units(groups),
    )


def make_units(groups: Sequence[RowGroup]) -> tuple[RowGroups, ...]:
    """Groups consecutive row groups into units."""
    target = unit_bytes(sum(group.size for group in groups))
    units, parts, filled = [], [], 0
    for group in groups:
        parts.append((group.file, group.index))
        filled += group.size
        if filled >= target:
            units.append(RowGroups(tuple(parts), filled))
            parts, filled = [], 0
    if parts:
        units.append(RowGroups(tuple(parts), filled))
    return tuple(units)


def list_groups(
    paths: Sequence[Path], names: Sequence[str], *, field: str, lists: bool = False
) -> tuple[Path, list[RowGroup]]:
    """Returns the common folder of `paths` and their row groups.

    Args:
      names: columns; "translation.en" is the field "en" of the column "translation", unless a
        column "translation.en" exists.
      field: the config field that names the columns, for error messages.
      lists: whether lists of texts are allowed.

    Raises:
      DataError: not a Parquet file, unknown column, or a column without text.
    """
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return root, [
        RowGroup(path.relative_to(root).as_posix(), index, rows, size)
        for path in paths
        for index, (rows, size) in enumerate(_measure_groups(path, names, field, lists))
    ]


def _measure_groups(
    path: Path, names: Sequence[str], field: str, lists: bool
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
        if not (found := _find_column(schema, name)):
            known = shorten(", ".join(_list_columns(schema)))
            raise DataError(
                f"{path} has no column '{name}' (columns: {known}). Set {field}.",
                field=field,
                value=name,
                path=path,
            )
        _, kind = found
        if not _is_text(kind.value_type if lists and _is_list(kind) else kind):
            raise DataError(
                f"Column '{name}' of {path} has type {kind}, not text. Set {field}.",
                field=field,
                value=name,
                path=path,
            )
    leaves = [f"{metadata.schema.column(i).path}." for i in range(metadata.num_columns)]
    prefixes = tuple(f"{name}." for name in names)  # a list is the leaf "name.list.element"
    places = [i for i, leaf in enumerate(leaves) if leaf.startswith(prefixes)]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return [
        (group.num_rows, sum(group.column(i).total_uncompressed_size for i in places))
        for group in groups
    ]


def _find_column(schema, name: str):
    """Returns ([index of the column, indices of nested fields], type), or None.

    Args:
      schema: schema or struct type.
    """
    import pyarrow

    names = [field.name for field in schema]
    first, dot, rest = (name, "", "") if name in names else name.partition(".")
    if first not in names:
        return None
    place = names.index(first)
    kind = schema.field(place).type
    if not dot:
        return [place], kind
    inner = _find_column(kind, rest) if isinstance(kind, pyarrow.StructType) else None
    return inner and ([place, *inner[0]], inner[1])


def _list_columns(schema) -> Iterator[str]:
    import pyarrow

    for field in schema:
        if isinstance(field.type, pyarrow.StructType):
            yield from (f"{field.name}.{inner}" for inner in _list_columns(field.type))
        else:
            yield field.name


def _is_list(kind) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def _is_text(kind) -> bool:
    """Returns whether an Arrow type is text or dictionary-encoded text."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(is_(kind) for is_ in (types.is_string, types.is_large_string, types.is_string_view))
