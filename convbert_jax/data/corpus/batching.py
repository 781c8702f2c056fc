"""Prepared rows to batches: shuffled, sharded over processes, read ahead, resumable.

The order is a function of (seed, position): nothing is shuffled in memory, and the state of an
iterator is one number. Epochs, each in an order of its own, follow each other as one endless stream
of rows. Batch n is the rows n * batch_size to (n + 1) * batch_size of it, and process p takes the
p-th part of a batch. So the global batches are the same for any number of processes and any
read-ahead.
"""

import collections
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np

from convbert_jax.data.corpus import position
from convbert_jax.data.corpus.corpus import Corpus, Split
from convbert_jax.data.corpus.pairs import UNLABELLED
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.corpus.shards import Verification
from convbert_jax.data.corpus.shuffling import (
    BUFFER,
    FILES,
    INTERLEAVED,
    release_order,
    shuffled,
)
from convbert_jax.data.errors import DataError
from convbert_jax.interfaces.batch import Batch

# A read costs some 70 us for each shard it touches, however few rows: so rows are read by blocks.
BLOCK_ROWS = 8192
RELEASE_ORDER = f"{FILES} files, {INTERLEAVED} in turn, buffer of {BUFFER}"


def training_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    seed: int,
    release_shuffle: bool = False,
    prefetch: int = 8,
    process_index: int = 0,
    process_count: int = 1,
) -> "Batches":
    """Endless batches of the train split; every epoch has every row exactly once, but with
    `release_shuffle`, where epochs flow into each other.

    Args:
      batch_size: rows of the global batch; this process gets `batch_size // process_count`.
      release_shuffle: the shuffling of ConvBERT's release instead of a full one, see
        `shuffling.release_order`.
      prefetch: at least so many batches are read ahead by a thread; 0 reads each when asked.

    Meanwhile the shards are verified, by each process its part of them.

    Raises:
      DataError: a batch size that the number of processes does not divide.
    """
    split = corpus.splits["train"]
    if release_shuffle:
        order = release_order([rows for _, rows in split.shards], seed)
    else:
        order = shuffled(split.rows, seed)
    local = _local_size(batch_size, process_count)
    state = {
        "corpus": corpus.fingerprint,
        "seed": seed,
        "batch_size": batch_size,
        # Says how: an earlier version knew another order by the plain name.
        "release_shuffle": RELEASE_ORDER if release_shuffle else False,
    }
    held = corpus.splits["validation"]
    shards = [
        (path, checksum)
        for part in (split, held)
        for (path, _), checksum in zip(part.shards, part.checksums, strict=True)
    ]
    return Batches(
        reader=ShardReader(split.shards, corpus.row_dtype),
        verification=Verification(shards[process_index::process_count]),
        order=order,
        batch_size=batch_size,
        local=slice(process_index * local, (process_index + 1) * local),
        prefetch=prefetch,
        identity=state,
    )


class Batches:
    """Iterator of batches, of the rows of this process.

    Raises DamagedFileError where it would be the next batch, once a shard is found to be damaged.
    """

    def __init__(
        self,
        *,
        reader: ShardReader,
        verification: Verification,
        order: Callable[[np.ndarray], np.ndarray],
        batch_size: int,
        local: slice,
        prefetch: int,
        identity: dict[str, Any],
    ):
        self._reader = reader
        self._verification = verification
        self._order = order
        self._batch_size = batch_size
        self._local = np.arange(local.start, local.stop)
        self._per_block = max(1, BLOCK_ROWS // len(self._local)) if prefetch else 1
        self._blocks_ahead = -(-prefetch // self._per_block)
        self._identity = identity
        self._thread = futures.ThreadPoolExecutor(1, "read_ahead") if prefetch else None
        self._start(0)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        self._verification.check()
        block, offset = divmod(self._next_batch, self._per_block)
        if block != self._block_number:
            self._block, self._block_number = self._fetch(block), block
        rows = len(self._local)
        batch = to_batch(self._block[offset * rows : (offset + 1) * rows])
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on with the next batch; plain JSON."""
        return position.write(self._next_batch, self._identity)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called.

        Raises:
          DataError: the state is of another corpus, seed, batch size or kind of shuffling.
        """
        self._start(position.read(state, self._identity))

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._verification.close()
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _start(self, next_batch: int) -> None:
        for pending in getattr(self, "_pending", ()):
            pending.cancel()
        self._next_batch = next_batch
        self._block, self._block_number = None, -1
        self._pending: collections.deque = collections.deque()
        self._next_block = next_batch // self._per_block

    def _fetch(self, block: int) -> np.ndarray:
        if self._thread is None:
            return self._read(block)
        while len(self._pending) <= self._blocks_ahead:
            self._pending.append(self._thread.submit(self._read, self._next_block))
            self._next_block += 1
        return self._pending.popleft().result()

    def _read(self, block: int) -> np.ndarray:
        batches = np.arange(block * self._per_block, (block + 1) * self._per_block)
        positions = batches[:, None] * self._batch_size + self._local
        return self._reader.read(self._order(positions.reshape(-1)))


def evaluation_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    rows: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """One pass over the validation split in a fixed order, each row exactly once.

    Args:
      batch_size: rows of the global batch; this process gets `batch_size // process_count`.
      rows: how many rows to use, spread evenly over the split; 0 is all.

    Yields:
      Batches as of training. The last one is filled up with rows of padding (segment id 0), so that
      shapes stay fixed and sums stay exact; every process gets the same number of batches.
    """
    split: Split = corpus.splits["validation"]
    local = _local_size(batch_size, process_count)
    used = min(rows or split.rows, split.rows)
    indices = np.arange(used) * split.rows // used
    padding = np.zeros(1, corpus.row_dtype)
    padding["tokens"] = corpus.tokenizer.special.pad
    if "pair_label" in padding.dtype.names:
        padding["pair_label"] = UNLABELLED
    reader = ShardReader(split.shards, corpus.row_dtype)
    try:
        for start in range(0, used, batch_size):
            first = start + process_index * local
            mine = reader.read(indices[first : first + local])
            yield to_batch(np.concatenate([mine, np.repeat(padding, local - len(mine))]))
    finally:
        reader.close()


def to_batch(rows: np.ndarray) -> Batch:
    """Structured rows as int32 arrays; a layout that stores no types has type 0 everywhere."""
    batch = {name: rows[name].astype(np.int32) for name in rows.dtype.names}
    if "type_ids" not in batch:
        batch["type_ids"] = np.zeros_like(batch["tokens"])
    return batch


def _local_size(batch_size: int, process_count: int) -> int:
    if batch_size % process_count:
        raise DataError(
            f"config.train.batch_size={batch_size} is not divisible by the {process_count} "
            "processes that share it; make it a multiple.",
            field="config.train.batch_size",
            value=batch_size,
        )
    return batch_size // process_count
