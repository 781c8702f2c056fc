"""Batches of prepared rows: shuffled, sharded over processes, prefetched, resumable.

The order is a function of (seed, position): nothing is shuffled in memory, and the state of an
iterator is one number. Epochs, each in a different order, form one endless stream of rows. Batch n
is rows n * batch_size to (n + 1) * batch_size of the stream; process p reads the p-th slice of each
batch. The global batches therefore do not depend on the number of processes or on prefetching.
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

# A read has a fixed cost for each shard that it touches, so rows are read in blocks.
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
    """Returns an endless iterator over batches of the train split.

    Every epoch contains every row exactly once, except with `release_shuffle`, which mixes rows of
    neighboring epochs. Each process verifies its share of the shards in the background.

    Args:
      batch_size: rows of the global batch; this process gets `batch_size // process_count`.
      release_shuffle: shuffle as ConvBERT's official code does, see `shuffling.release_order`,
        instead of fully.
      prefetch: minimum number of batches that a thread reads ahead; 0 reads each on demand.

    Raises:
      DataError: the batch size is not divisible by the number of processes.
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
        # Names the parameters, because checkpoints with `True` used a different order.
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
    """Iterator over this process's slices of the global batches.

    Once a damaged shard is found, the next batch raises DamagedFileError.
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
        """Returns the position of the next batch as plain JSON, for `set_state`."""
        return position.write(self._next_batch, self._identity)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the position that `get_state` returned.

        Raises:
          DataError: the state has a different corpus, seed, batch size or kind of shuffling.
        """
        self._start(position.read(state, self._identity))

    def close(self) -> None:
        """Stops the threads and closes the files."""
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
    """Iterates once over the validation split in a fixed order, each row exactly once.

    Args:
      batch_size: rows of the global batch; this process gets `batch_size // process_count`.
      rows: number of rows to use, spread evenly over the split; 0: all.

    Yields:
      Batches with the fields of training batches. The last one is filled with rows of padding
      (segment id 0), so that shapes are fixed and sums exact. Every process gets the same number.
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
    """Converts structured rows to int32 arrays; layouts without stored type ids get zeros."""
    batch = {name: rows[name].astype(np.int32) for name in rows.dtype.names}
    if "type_ids" not in batch:
        batch["type_ids"] = np.zeros_like(batch["tokens"])
    return batch


def _local_size(batch_size: int, process_count: int) -> int:
    if batch_size % process_count:
        raise DataError(
            f"config.train.batch_size={batch_size} is not divisible by the number of processes, "
            f"{process_count}. Use a multiple.",
            field="config.train.batch_size",
            value=batch_size,
        )
    return batch_size // process_count
