"""Batches of prepared rows and pairs: shuffled, sharded over processes, prefetched, resumable.

The order is a function of (seed, position): nothing is shuffled in memory, and the state of an
iterator is one number. Epochs of a corpus, each in a different order, form one endless stream of
rows. Batch n is rows n * batch_size to (n + 1) * batch_size of the stream; pairs are grouped by
length. Process p reads the p-th slice of each batch. The global batches therefore do not depend on
the number of processes or on prefetching.
"""

import abc
import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import ParallelSection
from convbert_jax.data.corpus import Corpus
from convbert_jax.data.errors import DataError
from convbert_jax.data.layouts import UNLABELLED
from convbert_jax.data.mixture import MixedCorpus
from convbert_jax.data.pair_worker import draw
from convbert_jax.data.parallel_text import ParallelText
from convbert_jax.data.prepared import Split
from convbert_jax.data.samplers import (
    BUFFER,
    FILES,
    INTERLEAVED,
    Mixture,
    Plan,
    Shape,
    choose_shapes,
    release_order,
    shape_of_rows,
    shuffled,
)
from convbert_jax.data.shards import ShardReader, Verification, records_to_pairs
from convbert_jax.interfaces import TEXTS_OF_PAIR, Batch, SequenceBatch, TextPairBatch

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
) -> "CorpusBatches":
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
    return CorpusBatches(
        reader=ShardReader(split.shards, corpus.row_dtype),
        verification=_verify_share(corpus.splits.values(), process_index, process_count),
        order=order,
        batch_size=batch_size,
        local=slice(process_index * local, (process_index + 1) * local),
        prefetch=prefetch,
        identity=state,
    )


def mixed_batches(
    mixed: MixedCorpus,
    mixture: Mixture,
    *,
    batch_size: int,
    seed: int,
    settings: Sequence[Any] = (),
    prefetch: int = 8,
    process_index: int = 0,
    process_count: int = 1,
) -> "MixedBatches":
    """Returns an iterator over batches of the train splits of several sources.

    It ends when all sources have reached their limits; the arguments are those of
    `training_batches`.

    Args:
      mixture: order of the rows of all sources.
      settings: JSON value that determines `mixture`, besides the corpora and the seed.

    Raises:
      DataError: the batch size is not divisible by the number of processes.
    """
    sources = mixed.sources.values()
    local = _local_size(batch_size, process_count)
    shards = [shard for source in sources for shard in source.splits["train"].shards]
    splits = [split for source in sources for split in source.splits.values()]
    return MixedBatches(
        names=tuple(mixed.sources),
        mixture=mixture,
        reader=ShardReader(shards, next(iter(sources)).row_dtype),
        verification=_verify_share(splits, process_index, process_count),
        batch_size=batch_size,
        local=slice(process_index * local, (process_index + 1) * local),
        prefetch=prefetch,
        identity={
            "corpus": mixed.fingerprint,
            "seed": seed,
            "batch_size": batch_size,
            "mixture": list(settings),
        },
    )


class Batches(abc.ABC):
    """Iterator over this process's slices of the global batches.

    A thread reads ahead. Once a damaged shard is found, the next batch raises DamagedFileError.
    """

    def __init__(
        self,
        *,
        verification: Verification,
        prefetch: int,
        identity: dict[str, Any],
        per_block: int = 1,
    ):
        """
        Args:
          prefetch: minimum number of batches that the thread reads ahead; 0: no thread.
          identity: settings that determine the content of the batches; JSON values by name.
          per_block: number of batches that are read together.
        """
        self._verification, self._identity = verification, identity
        self._per_block = per_block
        self._blocks_ahead = -(-prefetch // per_block)
        self._thread = futures.ThreadPoolExecutor(1, "read_ahead") if prefetch else None
        self._pending: collections.deque = collections.deque()
        self._start(0)

    @abc.abstractmethod
    def _read(self, block: int) -> Any:
        """Reads a block of batches."""

    @abc.abstractmethod
    def _take(self, block: Any, number: int) -> Batch | SequenceBatch:
        """Returns one of the batches of a block."""

    @abc.abstractmethod
    def _close_files(self) -> None: ...

    def __iter__(self) -> "CorpusBatches":
        return self

    def __next__(self) -> Batch | SequenceBatch:
        self._verification.check()
        block, number = divmod(self._next_batch, self._per_block)
        if block != self._block_number:
            self._block, self._block_number = self._fetch(block), block
        batch = self._take(self._block, number)
        self._next_batch += 1
        return batch

    def metrics(self) -> dict[str, float]:
        """Returns numbers about the batches so far, for the log."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch as plain JSON, for `set_state`."""
        return {"next_batch": self._next_batch, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the position that `get_state` returned.

        Raises:
          DataError: the state has other settings, for example another corpus or seed.
        """
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise DataError(
                    f"Cannot resume: the checkpoint has {name}={state.get(name)!r}, this run has "
                    f"{name}={here!r}. Restore this setting, or start a new run.",
                    field=name,
                    value=here,
                )
        self._start(int(state["next_batch"]))

    def close(self) -> None:
        """Stops the threads and closes the files."""
        self._verification.close()
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def _start(self, next_batch: int) -> None:
        while self._pending:
            self._pending.pop().cancel()
        self._next_batch = next_batch
        self._block, self._block_number = None, -1
        self._next_block = next_batch // self._per_block

    def _fetch(self, block: int) -> Any:
        if self._thread is None:
            return self._read(block)
        while len(self._pending) <= self._blocks_ahead:
            self._pending.append(self._thread.submit(self._read, self._next_block))
            self._next_block += 1
        return self._pending.popleft().result()


class CorpusBatches(Batches):
    """Batches of the rows of a corpus; a read has a fixed cost, so rows are read in blocks."""

    def __init__(
        self,
        *,
        reader: ShardReader,
        order: Callable[[np.ndarray], np.ndarray],
        batch_size: int,
        local: slice,
        prefetch: int,
        **arguments: Any,
    ):
        self._reader, self._order, self._batch_size = reader, order, batch_size
        self._local = np.arange(local.start, local.stop)
        per_block = max(1, BLOCK_ROWS // len(self._local)) if prefetch else 1
        super().__init__(prefetch=prefetch, per_block=per_block, **arguments)

    def _read(self, block: int) -> np.ndarray:
        batches = np.arange(block * self._per_block, (block + 1) * self._per_block)
        positions = batches[:, None] * self._batch_size + self._local
        return self._reader.read(self._order(positions.reshape(-1)))

    def _take(self, block: np.ndarray, number: int) -> Batch:
        rows = len(self._local)
        return to_batch(block[number * rows : (number + 1) * rows])

    def _close_files(self) -> None:
        self._reader.close()


class MixedBatches(CorpusBatches):
    """Batches of rows of several sources, see `samplers.Mixture`."""

    def __init__(self, *, names: Sequence[str], mixture: Mixture, **arguments: Any):
        self._names, self._mixture = names, mixture
        super().__init__(order=mixture.order, **arguments)

    def __next__(self) -> Batch:
        end = self._mixture.end
        if end is not None and (self._next_batch + 1) * self._batch_size > end:
            raise StopIteration
        return super().__next__()

    def metrics(self) -> dict[str, float]:
        """Returns the share of each source in the rows so far, as "NAME/share"."""
        rows = self._mixture.drawn(self._next_batch * self._batch_size) - self._mixture.drawn(0)
        shares = (rows / max(1, rows.sum())).tolist()
        if len(shares) == 1:
            return {}
        return {f"{name}/share": share for name, share in zip(self._names, shares, strict=True)}


def _verify_share(splits: Iterable[Split], index: int, count: int) -> Verification:
    """Verifies every `count`-th shard from shard `index`."""
    shards = [
        (path, checksum)
        for split in splits
        for (path, _), checksum in zip(split.shards, split.checksums, strict=True)
    ]
    return Verification(shards[index::count])


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
    split = corpus.splits["validation"]
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


def list_shapes(
    text: ParallelText, section: ParallelSection, row_multiple: int = 1
) -> tuple[Shape, ...]:
    """Returns the batch shapes that pad the training pairs least, from short to long.

    The last shape holds the longest pair of both splits.

    Raises:
      DataError: as in `choose_shapes`.
    """
    lengths = text.splits["train"].lengths
    longest = text.splits["validation"].lengths.max(axis=0, initial=0)
    return choose_shapes(
        np.concatenate([lengths, longest[None]]),
        most=section.shapes,
        batch_tokens=section.batch_tokens,
        row_multiple=row_multiple,
        length_multiple=section.length_multiple,
    )


def make_plan(
    text: ParallelText, section: ParallelSection, seed: int, row_multiple: int = 1
) -> Plan:
    """Assigns the training pairs to batches. Raises DataError as `list_shapes`."""
    shapes = list_shapes(text, section, row_multiple)
    return Plan(shape_of_rows(text.splits["train"].lengths, shapes), shapes, seed)


def pair_training_batches(
    text: ParallelText,
    section: ParallelSection,
    *,
    seed: int,
    row_multiple: int = 1,
    prefetch: int = 8,
    process_index: int = 0,
    process_count: int = 1,
) -> "PairBatches":
    """Returns an endless iterator over batches of the train split; `Plan` defines the epochs.

    Each batch has one of the shapes of `list_shapes`. With `text.sampling`, texts are tokenized
    again in every epoch, sampled by (seed, epoch, row). Each process verifies its share of the
    shards in the background.

    Args:
      row_multiple: divisor of the rows of a global batch: data-parallel devices times microbatches.
      prefetch: number of batches that a thread reads ahead; 0 reads each on demand.

    Raises:
      DataError: `row_multiple` rows do not fit into a batch, or it is not divisible by the number
        of processes.
    """
    if row_multiple % process_count:
        raise DataError(
            f"Batches are multiples of {row_multiple} rows, which is not divisible by the number "
            f"of processes, {process_count}. Use another number of processes."
        )
    plan = make_plan(text, section, seed, row_multiple)
    shapes, split = plan.shapes, text.splits["train"]
    logging.info(
        "Epochs have %d batches of %d pairs, with %d shapes (rows x source x target: %s) and "
        "%.1f%% padding.",
        plan.batches,
        split.rows,
        len(shapes),
        ", ".join(f"{s.rows}x{s.source}x{s.target}" for s in shapes),
        100 * plan.padding_share(split.lengths),
    )
    identity = {
        "parallel_text": text.fingerprint,
        "seed": seed,
        "shapes": [[s.rows, s.source, s.target] for s in shapes],
    }
    return PairBatches(
        rows=_Rows(text, "train", shapes, process_index, process_count),
        plan=plan,
        row_multiple=row_multiple,
        seed=seed,
        verification=_verify_share(text.splits.values(), process_index, process_count),
        prefetch=prefetch,
        identity=identity,
    )


class PairBatches(Batches):
    """Batches of prepared pairs, see `Plan`."""

    def __init__(
        self, *, rows: "_Rows", plan: Plan, row_multiple: int, seed: int, **arguments: Any
    ):
        self._rows, self._plan, self._seed = rows, plan, seed
        self._row_multiple = row_multiple
        super().__init__(**arguments)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the position that `get_state` returned.

        Keeps the batches of that iterator, although another number of devices or microbatches
        would give others.

        Raises:
          DataError: the state has different pairs, seed or lengths, or its batches are not
            divisible by the current number of devices and microbatches.
        """
        self._keep_rows(state.get("shapes"))
        super().set_state(state)

    def _keep_rows(self, saved: Any) -> None:
        shapes = self._plan.shapes
        if saved == self._identity["shapes"] or not isinstance(saved, list):
            return
        if [one[1:] for one in saved] != [[s.source, s.target] for s in shapes]:
            return  # a different text or section, which `Batches.set_state` rejects
        for rows, *_ in saved:
            if rows % self._row_multiple:
                raise DataError(
                    f"Cannot resume: batches of {rows} pairs are not divisible by "
                    f"{self._row_multiple} (data x fsdp devices x config.train.accumulation). Use "
                    f"a device count or accumulation that divides {rows}, or start a new run.",
                    field="config.train.accumulation",
                )
        kept = tuple(Shape(*one) for one in saved)
        logging.info(
            "Keeping the batch sizes of the checkpoint: %s pairs (this start would use %s).",
            ", ".join(str(shape.rows) for shape in kept),
            ", ".join(str(shape.rows) for shape in shapes),
        )
        self._plan = self._plan.with_rows(kept)
        self._rows.shapes = kept
        self._identity = self._identity | {"shapes": saved}

    def _read(self, block: int) -> SequenceBatch:
        shape, rows, epoch = self._plan.batch(block)
        return self._rows.batch(shape, rows, (self._seed, epoch))

    def _take(self, block: SequenceBatch, number: int) -> SequenceBatch:
        return block

    def _close_files(self) -> None:
        self._rows.close()


def pair_evaluation_batches(
    text: ParallelText,
    section: ParallelSection,
    *,
    row_multiple: int = 1,
    rows: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[SequenceBatch]:
    """Iterates once over the validation split in a fixed order, each pair exactly once.

    Uses the stored token ids (no sampling) and the batch shapes of training. The last batch is
    filled with rows of padding.

    Args:
      rows: number of pairs to use, spread evenly over the split; 0: all.
    """
    shapes = list_shapes(text, section, row_multiple)
    split = text.splits["validation"]
    used = min(rows or split.rows, split.rows)
    chosen = np.arange(used) * split.rows // used
    plan = Plan(shape_of_rows(split.lengths[chosen], shapes), shapes, None)
    reader = _Rows(text, "validation", shapes, process_index, process_count)
    try:
        for number in range(plan.batches):
            shape, places, _ = plan.batch(number)
            yield reader.batch(shape, np.where(places < 0, -1, chosen[places]), None)
    finally:
        reader.close()


class _Rows:
    """Builds batches of one process from the rows of a split."""

    def __init__(
        self, text: ParallelText, split: str, shapes: tuple[Shape, ...], index: int, count: int
    ):
        self._text, self._split, self.shapes = text, text.splits[split], shapes
        self._index, self._count = index, count
        self._reader = ShardReader(
            self._split.shards,
            text.id_dtype,
            functools.partial(records_to_pairs, form=text.form),
            returned=np.dtype(object),
        )

    def batch(
        self, number: int, rows: np.ndarray, names: tuple[int, int] | None
    ) -> SequenceBatch | TextPairBatch:
        """Builds a batch of shape `number`.

        Args:
          rows: rows of the global batch [B]; -1: padding.
          names: (seed, epoch) for sampled tokenization; None: use the stored token ids.
        """
        shape = self.shapes[number]
        local = shape.rows // self._count
        rows = rows[self._index * local : (self._index + 1) * local]
        form, tokenizers = self._text.form, self._text.tokenizers
        source, target = (tokenizer.special for tokenizer in tokenizers[:2])
        batch = {
            "source": np.full((local, shape.source), source.pad, np.int32),
            "source_ids": np.zeros((local, shape.source), np.int32),
            "tokens": np.full((local, shape.target), target.pad, np.int32),
            "segment_ids": np.zeros((local, shape.target), np.int32),
        }
        if not form.encoder:
            batch["labels"] = np.full((local, shape.target), target.pad, np.int32)
        if form.texts > 2:
            batch["negatives"] = batch["tokens"].copy()
            batch["negative_ids"] = batch["segment_ids"].copy()
        if form.scored:
            batch["score"] = np.zeros(local, np.float32)
        used = np.flatnonzero(rows >= 0)
        for place, row, pair in zip(used, rows[used], self._reader.read(rows[used]), strict=True):
            ids = list(pair.ids)
            if names is not None and self._text.sampling:
                for side, (tokenizer, text) in enumerate(zip(tokenizers, pair.texts, strict=True)):
                    room = int(self._split.lengths[row][min(side, 1)])
                    power = self._text.sampling
                    cut = (side == 0 or form.encoder) and room == self._text.cut_to
                    room -= form.added_tokens - 1  # `draw` leaves space for one
                    drawn = draw(tokenizer, text, power, room, *names, row, side, cut=cut)
                    ids[side] = drawn or ids[side]
            if form.encoder:
                for (name, mask), part in zip(TEXTS_OF_PAIR, ids, strict=False):
                    batch[name][place, : len(part) + 2] = [source.cls, *part, source.sep]
                    batch[mask][place, : len(part) + 2] = 1
                if form.scored:
                    batch["score"][place] = pair.score
                continue
            sources, targets = map(len, ids)
            batch["source"][place, :sources] = ids[0]
            batch["source"][place, sources] = source.sep
            batch["source_ids"][place, : sources + 1] = 1
            batch["tokens"][place, 0] = target.cls
            batch["tokens"][place, 1 : targets + 1] = ids[1]
            batch["segment_ids"][place, : targets + 1] = 1
            batch["labels"][place, :targets] = ids[1]
            batch["labels"][place, targets] = target.sep
        return batch

    def close(self) -> None:
        self._reader.close()
