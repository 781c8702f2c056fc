"""Parquet files, read by row groups: local ones, and public data sets of the Hugging Face hub."""

import dataclasses
import errno
import fnmatch
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.sources.documents import clean, decode, unit_bytes
from convbert_jax.data.sources.text_files import find_files, fingerprint_files

ROWS_AT_ONCE = 128
_FULL = os.strerror(errno.ENOSPC)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@dataclasses.dataclass(frozen=True)
class RowGroups:
    parts: tuple[tuple[str, int], ...]  # (file relative to the root, index of the row group)
    size: int


@dataclasses.dataclass(frozen=True)
class ParquetFiles:
    name: str
    fingerprint: str
    root: Path
    text_field: str
    encoding_errors: str
    units: tuple[RowGroups, ...]

    @property
    def files(self) -> set[Path]:
        """All files that it reads."""
        return {path for unit in self.units for path in self.files_of(unit)}

    def files_of(self, unit: RowGroups) -> set[Path]:
        """The files of one unit."""
        return {self.root / file for file, _ in unit.parts}

    def documents(self, unit: RowGroups, tally: Counter | None = None) -> Iterator[str]:
        """Texts of the rows of `unit`; null and blank ones are left out."""
        for file, group in unit.parts:
            path = self.root / file
            for data in self._column(path, group):
                try:
                    text = decode(data or b"", self.encoding_errors, tally)
                except UnicodeDecodeError:
                    raise DataError(
                        f"{path} has text that is not UTF-8 in row group {group}; set "
                        "config.data.encoding_errors to 'replace' or 'skip'."
                    ) from None
                yield from clean(text or "")

    def _column(self, path: Path, group: int) -> Iterator[bytes | None]:
        import pyarrow
        from pyarrow import parquet

        try:
            # Without pre_buffer and with small batches a row group is streamed, not held.
            with parquet.ParquetFile(
                path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
            ) as file:
                for batch in file.iter_batches(
                    ROWS_AT_ONCE, row_groups=[group], columns=[self.text_field], use_threads=False
                ):
                    yield from batch.column(0).cast(pyarrow.large_binary()).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            reason = shorten(" ".join(str(error).split()))
            raise DataError(
                f"{path} is damaged in row group {group} ({reason}); fetch it again."
            ) from None


def open_parquet(rest: str, section: DataSection) -> ParquetFiles:
    """Files of comma-separated globs with a string column `section.text_field`."""
    return _open(f"parquet:{rest}", find_files(rest), section)


def open_hub(rest: str, section: DataSection) -> ParquetFiles:
    """Parquet files of OWNER/NAME/GLOB, downloaded into the hub's cache on first use.

    Raises:
      DataError: no such data set or file, files of another kind, no network and nothing in the
        cache, or a cache that cannot be written.
    """
    import huggingface_hub

    owner, _, rest_of_name = rest.partition("/")
    name, _, pattern = rest_of_name.partition("/")
    if not pattern:
        raise DataError(
            f"config.data.source='hub:{rest}' must be hub:OWNER/NAME/FILE-GLOB, for example "
            "hub:wikimedia/wikipedia/20231101.en/*.parquet."
        )
    if not pattern.endswith(("*", ".parquet")):  # a corpus would come first, then the refusal
        raise DataError(
            f"config.data.source='hub:{rest}' names files that are not parquet, which hub: reads; "
            f"try datasets:{owner}/{name}, or download them and name them as text:GLOB."
        )
    try:
        folder = huggingface_hub.snapshot_download(
            f"{owner}/{name}", repo_type="dataset", allow_patterns=pattern
        )
    # The hub's client raises errors of its own, of its transport and of the file system.
    except Exception as error:
        if _is_of_the_disk(error):
            raise DataError(
                f"hub:{rest} could not be kept in {huggingface_hub.constants.HF_HUB_CACHE} "
                f"({getattr(error, 'strerror', '') or _FULL}); make room there, or name a folder "
                "on another disk with the environment variable HF_HOME."
            ) from error
        raise DataError(
            f"hub:{rest} could not be downloaded ({type(error).__name__}); check the name and the "
            "network, or download the files elsewhere and name them as parquet:GLOB."
        ) from error
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    paths = [p for p in paths if fnmatch.fnmatch(p.relative_to(folder).as_posix(), pattern)]
    if not paths:
        raise DataError(f"No file of {owner}/{name} matches '{pattern}'; check config.data.source.")
    return _open(f"hub:{rest}", paths, section)


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the cache cannot be written; of errors of the transport, some are OSErrors too."""
    if isinstance(error, OSError):
        return error.errno in _DISK
    return _FULL in str(error)  # hf_xet, in Rust, says it in words


def _open(name: str, paths: list[Path], section: DataSection) -> ParquetFiles:
    root = Path(os.path.commonpath([path.parent for path in paths]))
    groups = [
        (path.relative_to(root).as_posix(), index, size)
        for path in paths
        for index, size in enumerate(_group_sizes(path, section.text_field))
    ]
    target = unit_bytes(sum(size for *_, size in groups))
    units, parts, filled = [], [], 0
    for file, index, size in groups:
        parts.append((file, index))
        filled += size
        if filled >= target:
            units.append(RowGroups(tuple(parts), filled))
            parts, filled = [], 0
    if parts:
        units.append(RowGroups(tuple(parts), filled))
    return ParquetFiles(
        name=name,
        fingerprint=fingerprint_files(paths, root, f"parquet {section.text_field}"),
        root=root,
        text_field=section.text_field,
        encoding_errors=section.encoding_errors,
        units=tuple(units),
    )


def _group_sizes(path: Path, field: str) -> list[int]:
    """Uncompressed bytes of the text column in each row group."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        raise DataError(f"{path} is not a parquet file; check config.data.source.") from None
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if field not in names:
        raise DataError(
            f"{path} has no column '{field}' (it has: {', '.join(names)}); set "
            "config.data.text_field."
        )
    kind = metadata.schema.to_arrow_schema().field(field).type
    if not _is_text(kind.value_type if pyarrow.types.is_dictionary(kind) else kind):
        raise DataError(
            f"Column '{field}' of {path} is {kind}, not text; set config.data.text_field."
        )
    column = names.index(field)
    groups = [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]
    return [group.total_uncompressed_size for group in groups]


def _is_text(kind) -> bool:
    """Whether an arrow type is one of text."""
    from pyarrow import types

    return any(is_(kind) for is_ in (types.is_string, types.is_large_string, types.is_string_view))
