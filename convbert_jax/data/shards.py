"""Shards of a prepared folder: records of rows and pairs in ArrayRecord files.

ArrayRecord verifies the hash of each row when it is read, which can be days after the damage.
`Verification` therefore compares whole files with their checksums while training starts.
"""

import dataclasses
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from convbert_jax import storage
from convbert_jax.config import PairFormat
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.storage import DamagedFileError, damaged

READ_BYTES = 1 << 22


@dataclasses.dataclass
class Row:
    """Fields of `interfaces.batch.PairBatch` for one row.

    "packed" has no type ids (they are 0 and added to the batch); only "pairs" has a label.
    """

    tokens: list[int]
    segment_ids: list[int]
    type_ids: list[int] = dataclasses.field(default_factory=list)
    pair_label: int | None = None


def shard_path(directory: Path, split: str, index: int) -> Path:
    return directory / f"{split}-{index:05d}.array_record"


def lengths_path(shard: Path) -> Path:
    """Returns the path of the lengths of a shard of pairs.

    The file has the tokens of each pair, [rows, 2] with special tokens, so that batches are planned
    without reading rows: of the first text, and of the longest other one.
    """
    return shard.with_suffix(".lengths")


def write_lengths(path: Path, lengths: Sequence[tuple[int, int]]) -> int:
    """Writes the lengths of a shard and returns their CRC-32.

    Raises:
      DataError: the disk is full.
    """
    data = np.asarray(lengths, "<u4").tobytes()
    try:
        with storage.replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    return zlib.crc32(data)


def read_lengths(shard: Path, entry: Mapping[str, int], gone: object) -> np.ndarray:
    """Reads the lengths of a shard, [rows, 2]; `entry` describes it in the metadata."""
    path = lengths_path(shard)
    data = path.read_bytes()
    if zlib.crc32(data) != entry["lengths_crc32"] or len(data) != 8 * entry["rows"]:
        raise damaged_shard(path, "checksum mismatch", gone)
    return np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)


def damaged_shard(path: Path, what: object, gone: object = None) -> DamagedFileError:
    """Returns the error for a damaged shard.

    Args:
      gone: reason why the source is unavailable; None if it is not known to be.
    """
    if gone:
        reason = str(gone).rstrip(".")
        return damaged(path, what, f"restore a copy; it cannot be prepared again: {reason}")
    remedy = "delete it and start again to prepare this part from its source"
    return damaged(path, what, f"{remedy}, or restore a copy")


def checksum(path: Path, stop: threading.Event | None = None) -> int:
    """Computes the CRC-32 of a file; stops early if `stop` is set."""
    result = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            if stop and stop.is_set():
                break
            result = zlib.crc32(data, result)
    return result


class Verification:
    """Compares shards with their checksums in a background thread."""

    def __init__(self, shards: Sequence[tuple[Path, int]]):
        """Starts the thread.

        Args:
          shards: (file, CRC-32 at its preparation) of each.
        """
        self._shards = shards
        self._stop = threading.Event()
        self._damage: DamagedFileError | None = None
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises DamagedFileError if a damaged shard was found."""
        if self._damage:
            raise self._damage

    def wait(self) -> None:
        """Waits until all shards are verified, then calls `check`."""
        self._thread.join()
        self.check()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _verify(self) -> None:
        started, size = time.monotonic(), 0
        for path, expected in self._shards:
            try:
                found = checksum(path, self._stop)
                size += path.stat().st_size
            except OSError as error:
                self._damage = damaged_shard(path, error)
                return
            if self._stop.is_set():
                return
            if found != expected:
                self._damage = damaged_shard(path, "checksum mismatch")
                return
        if self._shards:
            seconds = time.monotonic() - started
            logging.info("Verified %.1f MB of shards in %.1f s.", size / 1e6, seconds)


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
        self._unfinished = storage.temporary_name(path)
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


def _unwritable(path: Path, reason: object) -> DataError:
    return DataError(
        f"Cannot write {path}: {_reason(reason)}. Free disk space or use another "
        "config.data.directory, then start again; finished units are kept.",
        field="config.data.directory",
        path=path,
    )


def _reason(error: object) -> str:
    return shorten(" ".join(str(error).split()))


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


COUNT = np.dtype("<u4")
SCORE = np.dtype("<f4")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A row of a parallel text, see `config.PairFormat`.

    Attributes:
      ids: token ids of each text, without special ids.
      texts: the texts; "" if they are not stored.
      score: similarity of the texts, in float32; None in a format without scores.
    """

    ids: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    score: float | None = None


def id_dtype(source_vocab: int, target_vocab: int) -> np.dtype:
    """Returns the stored dtype of token ids."""
    return np.dtype("<u2" if max(source_vocab, target_vocab) <= 1 << 16 else "<i4")


def pairs_to_records(pairs: Sequence[Pair], dtype: np.dtype) -> list[bytes]:
    """Converts pairs to records: tokens of each text, bytes of each text, then ids, texts, score.

    Args:
      dtype: of token ids.
    """
    records = []
    for pair in pairs:
        texts = [text.encode() for text in pair.texts]
        counts = [len(part) for part in (*pair.ids, *texts)]
        ids = (np.asarray(part, dtype).tobytes() for part in pair.ids)
        score = b"" if pair.score is None else np.asarray(pair.score, SCORE).tobytes()
        records.append(b"".join([np.asarray(counts, COUNT).tobytes(), *ids, *texts, score]))
    return records


def records_to_pairs(records: Sequence[bytes], dtype: np.dtype, *, form: PairFormat) -> np.ndarray:
    """Converts records to an object array of `Pair`. Raises ValueError for an invalid record."""
    pairs, count = np.empty(len(records), object), form.texts
    sizes = np.repeat([dtype.itemsize, 1], count)
    for i, record in enumerate(records):
        counts = np.frombuffer(record, COUNT, 2 * count)
        cuts = np.cumsum([counts.nbytes, *(counts * sizes)])
        if cuts[-1] + form.scored * SCORE.itemsize != len(record):
            raise ValueError("the size of a record does not match its counts")
        ids = (np.frombuffer(record, dtype, counts[k], cuts[k]) for k in range(count))
        texts = (record[cuts[k] : cuts[k + 1]].decode() for k in range(count, 2 * count))
        score = float(np.frombuffer(record, SCORE, 1, cuts[-1])[0]) if form.scored else None
        pairs[i] = Pair(tuple(ids), tuple(texts), score)
    return pairs
