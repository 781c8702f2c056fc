"""Bucketing: batches of pairs of similar length, padded to one of a few shapes.

A batch is (index of its shape, row indices [B], -1 for padding).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from convbert_jax.data.corpus.shuffling import shuffled
from convbert_jax.data.errors import DataError

_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of a batch, and padded lengths of sources and targets in tokens."""

    rows: int
    source: int
    target: int


def choose_shapes(
    lengths: np.ndarray, *, most: int, batch_tokens: int, row_multiple: int, length_multiple: int
) -> tuple[Shape, ...]:
    """Returns at most `most` shapes with the least padding; the last one holds all pairs.

    A pair belongs to the first shape whose longer text is at least as long as the pair's. These
    lengths are found by dynamic programming over the multiples of `length_multiple`; each side is
    then shortened to the maximum length of its pairs and of shorter shapes. The number of rows is a
    multiple of 8 (fairseq's default) if 8 fit, so that 1, 2, 4 and 8 devices have the same batches.

    Args:
      lengths: tokens of each source and target, [rows, 2].
      batch_tokens: maximum of rows times tokens of the longer text.
      row_multiple: divisor of the number of rows.
      length_multiple: divisor of the padded lengths.

    Raises:
      DataError: fewer than `row_multiple` rows of the longest pair fit.
    """
    longer = -(-lengths.max(axis=1) // length_multiple)
    counts = np.bincount(longer)
    edges = _cheapest_edges(counts, most)
    shape_of = np.searchsorted(edges, longer)
    shapes, source, target = [], 0, 0
    for number, edge in enumerate(edges):
        members = lengths[shape_of == number]
        needed = -(-members.max(axis=0) // length_multiple) * length_multiple
        source, target = np.maximum((source, target), needed)
        longest = int(edge) * length_multiple
        room, even = batch_tokens // longest, math.lcm(row_multiple, _ROWS)
        rows = room // even * even or room // row_multiple * row_multiple
        if not rows:
            raise DataError(
                f"config.parallel.batch_tokens={batch_tokens} is too small for {row_multiple} "
                f"pairs (one per device and microbatch) of {longest} tokens. Set it to "
                f"{row_multiple * longest} or decrease config.parallel.max_length.",
                field="config.parallel.batch_tokens",
                value=batch_tokens,
            )
        shapes.append(Shape(rows, int(source), int(target)))
    return tuple(shapes)


def shape_of_rows(lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Returns the index of the first shape that holds each pair, [rows].

    Raises:
      DataError: a pair is longer than the last shape.
    """
    sources, targets = ([getattr(s, name) for s in shapes] for name in ("source", "target"))
    found = np.maximum(
        np.searchsorted(sources, lengths[:, 0]), np.searchsorted(targets, lengths[:, 1])
    )
    if len(found) and found.max() >= len(shapes):
        raise DataError("A pair is longer than the longest batch shape. Prepare the data again.")
    return found


class Plan:
    """Assignment of pairs to the batches of every epoch, a function of (seed, batch number).

    Each epoch has every pair once. Pairs left after the last full batch of a shape move to the next
    longer shape; the last batch of the longest shape is padded. All epochs therefore have the same
    number of batches, and at most one padded batch. Pairs within a shape and the order of batches
    are shuffled in every epoch.
    """

    def __init__(self, shape_of: np.ndarray, shapes: Sequence[Shape], seed: int | None):
        """
        Args:
          shape_of: index of the shape of each pair, [rows].
          seed: seed of the shuffling; None: keep the order of pairs and of shapes.
        """
        self._shape_of, self.shapes, self._seed = shape_of, tuple(shapes), seed
        self._epoch, self._batches = -1, []
        counts = np.bincount(shape_of, minlength=len(shapes))
        left = self.batches = 0
        for count, shape in zip(counts, shapes, strict=True):
            whole, left = divmod(int(count) + left, shape.rows)
            self.batches += whole
        self.batches += left > 0

    def with_rows(self, shapes: Sequence[Shape]) -> "Plan":
        """Returns a plan of the same pairs with other numbers of rows per batch."""
        return Plan(self._shape_of, shapes, self._seed)

    def batch(self, number: int) -> tuple[int, np.ndarray, int]:
        """Returns (shape index, rows [B], epoch) of batch `number` of the stream of epochs."""
        epoch, place = divmod(number, self.batches)
        if epoch != self._epoch:
            self._batches, self._epoch = self._plan(epoch), epoch
        return *self._batches[place], epoch

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        size = len(self._shape_of)
        order = np.arange(size)
        if self._seed is not None:
            order = shuffled(size, self._seed)(epoch * size + order)
        batches, left = [], order[:0]
        in_order = self._shape_of[order]
        for number, shape in enumerate(self.shapes):
            members = np.concatenate([left, order[in_order == number]])
            whole = len(members) // shape.rows * shape.rows
            batches += [(number, part) for part in members[:whole].reshape(-1, shape.rows)]
            left = members[whole:]
        if len(left):
            filler = np.full(shape.rows - len(left), -1)
            batches.append((len(self.shapes) - 1, np.concatenate([left, filler])))
        if self._seed is not None:
            # A different seed, because batches and pairs would otherwise be permuted in the same
            # way if their numbers are equal.
            places = shuffled(len(batches), self._seed + 1)
            turn = places(epoch * len(batches) + np.arange(len(batches)))
            batches = [batches[i] for i in turn]
        return batches

    def padding_share(self, lengths: np.ndarray) -> float:
        """Returns the fraction of padding among all source and target positions of an epoch."""
        positions = sum(
            count * shape.rows * (shape.source + shape.target) for shape, count in self.counts()
        )
        return 1 - float(lengths.sum()) / max(1, positions)

    def counts(self) -> list[tuple[Shape, int]]:
        """Returns the number of batches of each shape in an epoch."""
        found = np.bincount([number for number, _ in self._plan(0)], minlength=len(self.shapes))
        return list(zip(self.shapes, map(int, found), strict=True))


def _cheapest_edges(counts: np.ndarray, most: int) -> np.ndarray:
    """Returns at most `most` ascending lengths that minimize the sum of padded lengths.

    The last one is the maximum length.

    Args:
      counts: number of rows of each length, from 0.
    """
    used = np.flatnonzero(counts)
    upto = np.cumsum(counts[used])  # cumulative rows
    cost = used * upto.astype(np.float64)  # cost of one shape that ends at each length
    cuts: list[np.ndarray] = []
    for _ in range(min(most, len(used)) - 1):
        # [end, cut]: the previous shapes end at `cut`, the new one at `end`
        more = cost[None, :] + used[:, None] * (upto[:, None] - upto[None, :])
        more = np.where(np.tri(len(used), k=-1, dtype=bool), more, np.inf)
        best = more.argmin(axis=1)
        better = more[np.arange(len(used)), best] < cost
        cuts.append(np.where(better, best, -1))
        cost = np.minimum(cost, more.min(axis=1))
    edges, end = [len(used) - 1], len(used) - 1
    for cut in reversed(cuts):
        if cut[end] >= 0:
            end = int(cut[end])
            edges.append(end)
    return used[edges[::-1]]
