"""Batches of prepared pairs: grouped by length, sharded over processes, prefetched, resumable.

Batch n is a function of (seed, n), and the state of an iterator is one number. Process p reads the
p-th slice of the rows of each batch, so the global batches do not depend on the number of
processes.
"""

import collections
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import ParallelSection
from convbert_jax.data.corpus import position
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.corpus.shards import Verification
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel.pair_worker import draw
from convbert_jax.data.parallel.parallel_text import ParallelText
from convbert_jax.data.parallel.records import from_records
from convbert_jax.data.parallel.shapes import Plan, Shape, choose_shapes, shape_of_rows
from convbert_jax.interfaces.batch import SequenceBatch


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


def training_batches(
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
    shards = [
        (path, checksum)
        for part in text.splits.values()
        for (path, _), checksum in zip(part.shards, part.checksums, strict=True)
    ]
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
        verification=Verification(shards[process_index::process_count]),
        prefetch=prefetch,
        identity=identity,
    )


class PairBatches:
    """Iterator over this process's slices of the global batches.

    Once a damaged shard is found, the next batch raises DamagedFileError.
    """

    def __init__(
        self,
        *,
        rows: "_Rows",
        plan: Plan,
        row_multiple: int,
        seed: int,
        verification: Verification,
        prefetch: int,
        identity: dict[str, Any],
    ):
        self._rows, self._plan, self._seed = rows, plan, seed
        self._row_multiple = row_multiple
        self._verification, self._identity, self._ahead = verification, identity, prefetch
        self._thread = futures.ThreadPoolExecutor(1, "read_ahead") if prefetch else None
        self._pending: collections.deque = collections.deque()
        self._next_batch = 0

    def __iter__(self) -> "PairBatches":
        return self

    @property
    def batches_in_epoch(self) -> int:
        return self._plan.batches

    def __next__(self) -> SequenceBatch:
        self._verification.check()
        if self._thread is None:
            batch = self._read(self._next_batch)
        else:
            while len(self._pending) <= self._ahead:
                number = self._next_batch + len(self._pending)
                self._pending.append(self._thread.submit(self._read, number))
            batch = self._pending.popleft().result()
        self._next_batch += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch as plain JSON, for `set_state`."""
        return position.write(self._next_batch, self._identity)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the position that `get_state` returned.

        Keeps the batches of that iterator, although another number of devices or microbatches
        would give others.

        Raises:
          DataError: the state has different pairs, seed or lengths, or its batches are not
            divisible by the current number of devices and microbatches.
        """
        while self._pending:
            self._pending.pop().cancel()
        self._keep_rows(state.get("shapes"))
        self._next_batch = position.read(state, self._identity)

    def _keep_rows(self, saved: Any) -> None:
        shapes = self._plan.shapes
        if saved == self._identity["shapes"] or not isinstance(saved, list):
            return
        if [one[1:] for one in saved] != [[s.source, s.target] for s in shapes]:
            return  # a different text or section, which `position.read` rejects
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

    def close(self) -> None:
        """Stops the threads and closes the files."""
        self._verification.close()
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._rows.close()

    def _read(self, number: int) -> SequenceBatch:
        shape, rows, epoch = self._plan.batch(number)
        return self._rows.batch(shape, rows, (self._seed, epoch))


def evaluation_batches(
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
            self._split.shards, text.id_dtype, from_records, returned=np.dtype(object)
        )

    def batch(self, number: int, rows: np.ndarray, names: tuple[int, int] | None) -> SequenceBatch:
        """Builds a batch of shape `number`.

        Args:
          rows: rows of the global batch [B]; -1: padding.
          names: (seed, epoch) for sampled tokenization; None: use the stored token ids.
        """
        shape = self.shapes[number]
        local = shape.rows // self._count
        rows = rows[self._index * local : (self._index + 1) * local]
        source, target = (tokenizer.special for tokenizer in self._text.vocabularies)
        batch = {
            "source": np.full((local, shape.source), source.pad, np.int32),
            "source_ids": np.zeros((local, shape.source), np.int32),
            "tokens": np.full((local, shape.target), target.pad, np.int32),
            "segment_ids": np.zeros((local, shape.target), np.int32),
            "labels": np.full((local, shape.target), target.pad, np.int32),
        }
        used = np.flatnonzero(rows >= 0)
        for place, row, pair in zip(used, rows[used], self._reader.read(rows[used]), strict=True):
            ids = [pair.source, pair.target]
            if names is not None and self._text.sampling:
                texts = (pair.source_text, pair.target_text)
                for side, tokenizer in enumerate(self._text.vocabularies):
                    room = int(self._split.lengths[row][side])
                    power = self._text.sampling
                    cut = side == 0 and room == self._text.cut_to
                    drawn = draw(tokenizer, texts[side], power, room, *names, row, side, cut=cut)
                    ids[side] = drawn or ids[side]
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
