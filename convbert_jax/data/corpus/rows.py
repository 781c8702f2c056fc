"""Storage of rows: fixed-size records in ArrayRecord files."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from convbert_jax import links
from convbert_jax.data.corpus.packing import Row
from convbert_jax.data.corpus.shards import damaged_shard
from convbert_jax.data.errors import DataError

# One row per chunk for random access; uncompressed, because writing is faster.
WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:1"
ROWS_AT_ONCE = 1024


def row_dtype(length: int, vocab_size: int, layout: str) -> np.dtype:
    """Returns the structured dtype of a record.

    Its fields are `tokens`, `segment_ids`, `type_ids` ("electra" and "pairs"), `pair_label`
    ("pairs").
    """
    fields = [
        ("tokens", "<u2" if vocab_size <= 1 << 16 else "<i4", (length,)),
        ("segment_ids", "u1" if length < 768 else "<u2", (length,)),  # 3 or more tokens per piece
    ]
    if layout in ("electra", "pairs"):
        fields.append(("type_ids", "u1", (length,)))
    if layout == "pairs":
        fields.append(("pair_label", "i1", ()))
    return np.dtype(fields)


def to_records(rows: Sequence[Row], dtype: np.dtype, pad: int) -> list[bytes]:
    """Pads `rows` and converts them to records."""
    length = dtype["tokens"].shape[0]
    structured = np.zeros(len(rows), dtype)
    for name in dtype.names:
        values, filler = [getattr(row, name) for row in rows], pad if name == "tokens" else 0
        if dtype[name].shape:
            values = [v + [filler] * (length - len(v)) for v in values]
        structured[name] = values
    return [record.tobytes() for record in structured]


def from_records(records: Sequence[bytes], dtype: np.dtype) -> np.ndarray:
    """Converts records to a structured array [rows]."""
    return np.frombuffer(b"".join(records), dtype)


class ShardWriter:
    """Writes one ArrayRecord file under a temporary name and renames it when complete."""

    def __init__(self, path: Path, to_records: Callable[[Sequence[Any]], list[bytes]]):
        """
        Args:
          to_records: converts a sequence of rows to records.
        """
        self.path = path
        self.rows = 0
        self._unfinished = links.temporary_name(path)
        self._to_records = to_records
        self._waiting: list[Any] = []
        self._writer = None

    def write(self, rows: Iterable[Any]) -> None:
        """Appends `rows`. Raises DataError if the disk is full."""
        self._waiting.extend(rows)
        if len(self._waiting) >= ROWS_AT_ONCE:
            self._flush()

    def finish(self) -> int:
        """Renames the file and returns its size in bytes; 0, and no file, without rows."""
        self._flush()
        if not self.rows:
            return 0
        try:
            self._writer.close()
            with open(self._unfinished, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self._unfinished, self.path)
        except (RuntimeError, OSError) as error:
            raise _unwritable(self.path, error) from None
        return self.path.stat().st_size

    def _flush(self) -> None:
        if not self._waiting:
            return
        try:
            if self._writer is None:
                self._writer = ArrayRecordWriter(str(self._unfinished), WRITER_OPTIONS)
            for record in self._to_records(self._waiting):
                self._writer.write(record)
        except (RuntimeError, OSError) as error:
            raise _unwritable(self.path, error) from None
        self.rows += len(self._waiting)
        self._waiting = []


def _unwritable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"Cannot write {path}: {_reason(error)}. Free disk space or use another "
        "config.data.directory, then start again; finished units are kept.",
        field="config.data.directory",
        path=path,
    )


def _reason(error: Exception) -> str:
    return str(error).split(";")[0].split(" (")[0]


class ShardReader:
    """Random access to the rows of several shards, numbered consecutively."""

    def __init__(
        self,
        shards: Sequence[tuple[Path, int]],
        dtype: np.dtype,
        from_records: Callable[[Sequence[bytes], np.dtype], np.ndarray] = from_records,
        *,
        returned: np.dtype | None = None,
    ):
        """
        Args:
          shards: (path, rows) of each.
          dtype: type of the stored values.
          from_records: converts (records, `dtype`) to an array [rows].
          returned: dtype of that array; None: `dtype`.
        """
        self._paths = [path for path, _ in shards]
        self._starts = np.cumsum([0, *(rows for _, rows in shards)])
        self._readers: list[ArrayRecordReader | None] = [None] * len(shards)
        self._dtype, self._from_records = dtype, from_records
        self._returned = returned or dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the rows `indices` in the given order, as returned by `from_records`.

        Raises:
          DataError: a file is missing.
          DamagedFileError: a file has a wrong number of rows or a row with a wrong hash.
        """
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        cuts = np.searchsorted(wanted, self._starts)
        rows = np.empty(len(indices), self._returned)
        for shard in np.flatnonzero(np.diff(cuts)):
            begin, end = cuts[shard], cuts[shard + 1]
            local = (wanted[begin:end] - self._starts[shard]).tolist()
            reader = self._reader(shard)
            try:
                rows[order[begin:end]] = self._from_records(reader.read(local), self._dtype)
            except (RuntimeError, ValueError, OSError) as error:  # ArrayRecord hashes each row
                raise damaged_shard(self._paths[shard], _reason(error)) from None
        return rows

    def _reader(self, shard: int) -> ArrayRecordReader:
        if self._readers[shard] is None:
            path = self._paths[shard]
            if not path.is_file():
                raise DataError(
                    f"{path} is missing. Start again to prepare it from its source, or restore a "
                    "copy.",
                    path=path,
                )
            try:
                reader = ArrayRecordReader(str(path), READER_OPTIONS)
                rows = self._starts[shard + 1] - self._starts[shard]
                there = reader.num_records()
                why = "" if there == rows else f"it has {there} rows instead of {rows}"
            except (RuntimeError, ValueError, OSError) as error:
                why = _reason(error)
            if why:
                raise damaged_shard(path, why)
            self._readers[shard] = reader
        return self._readers[shard]

    def close(self) -> None:
        for reader in self._readers:
            if reader is not None:
                reader.close()
        self._readers = [None] * len(self._readers)
