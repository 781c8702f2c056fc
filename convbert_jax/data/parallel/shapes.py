"""Which pairs make a batch: pairs of similar length, padded to one of a few shapes.

A batch is (number of its shape, rows by their number, -1 for a filler).
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
    """Rows of a batch, and the tokens that its texts are padded to."""

    rows: int
    source: int
    target: int


def choose_shapes(
    lengths: np.ndarray, *, most: int, batch_tokens: int, row_multiple: int, length_multiple: int
) -> tuple[Shape, ...]:
    """At most `most` shapes that pad the least, from the shortest to one that holds all pairs.

    A pair is of the first shape whose longer text is no shorter than its own. Which lengths these
    are is found by dynamic programming over all multiples of `length_multiple`; then each text is
    as long as its pairs, or those of a shorter shape, need. Rows are a multiple of 8, as fairseq
    has them by default, where so many fit: then 1, 2, 4 and 8 devices have the same batches.

    Args:
      lengths: tokens of each source and target, [rows, 2].
      batch_tokens: most rows times tokens of the longer text.
      row_multiple, length_multiple: what rows and padded lengths are multiples of.

    Raises:
      DataError: not even `row_multiple` rows of the longest pair fit.
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
                f"config.parallel.batch_tokens={batch_tokens} holds no {row_multiple} pairs of "
                f"{longest} tokens, one for each device and microbatch; make it "
                f"{row_multiple * longest} or lower config.parallel.max_length.",
                field="config.parallel.batch_tokens",
                value=batch_tokens,
            )
        shapes.append(Shape(rows, int(source), int(target)))
    return tuple(shapes)


def shape_of_rows(lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """For each pair the number of the first shape that holds it.

    Raises:
      DataError: a pair is longer than the last one.
    """
    sources, targets = ([getattr(s, name) for s in shapes] for name in ("source", "target"))
    found = np.maximum(
        np.searchsorted(sources, lengths[:, 0]), np.searchsorted(targets, lengths[:, 1])
    )
    if len(found) and found.max() >= len(shapes):
        raise DataError("A pair is longer than the longest shape of a batch; prepare it anew.")
    return found


class Plan:
    """Every epoch of some pairs as batches, each a function of (seed, number).

    All pairs are in an epoch once: what is left of a shape after its last whole batch goes into the
    next longer one, and the last batch of the longest is filled up, at most one batch an epoch with
    fillers. So all epochs have equally many batches. Pairs within a shape, and the order of the
    batches, are drawn anew for each epoch.
    """

    def __init__(self, shape_of: np.ndarray, shapes: Sequence[Shape], seed: int | None):
        """`shape_of`: of each pair; `seed` None keeps the order of the pairs, by shape."""
        self._shape_of, self.shapes, self._seed = shape_of, tuple(shapes), seed
        self._epoch, self._batches = -1, []
        counts = np.bincount(shape_of, minlength=len(shapes))
        left = self.batches = 0
        for count, shape in zip(counts, shapes, strict=True):
            whole, left = divmod(int(count) + left, shape.rows)
            self.batches += whole
        self.batches += left > 0

    def with_rows(self, shapes: Sequence[Shape]) -> "Plan":
        """The same pairs in batches of other numbers of rows."""
        return Plan(self._shape_of, shapes, self._seed)

    def batch(self, number: int) -> tuple[int, np.ndarray, int]:
        """(shape, rows [B], epoch) of batch `number` of an endless stream of epochs."""
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
            # Another seed, or with as many batches as pairs they would move alike.
            places = shuffled(len(batches), self._seed + 1)
            turn = places(epoch * len(batches) + np.arange(len(batches)))
            batches = [batches[i] for i in turn]
        return batches

    def padding_share(self, lengths: np.ndarray) -> float:
        """Share of an epoch's positions, of sources and targets, that hold no token."""
        positions = sum(
            count * shape.rows * (shape.source + shape.target) for shape, count in self.counts()
        )
        return 1 - float(lengths.sum()) / max(1, positions)

    def counts(self) -> list[tuple[Shape, int]]:
        """How many batches of each shape an epoch has."""
        found = np.bincount([number for number, _ in self._plan(0)], minlength=len(self.shapes))
        return list(zip(self.shapes, map(int, found), strict=True))


def _cheapest_edges(counts: np.ndarray, most: int) -> np.ndarray:
    """Ascending lengths, the last one the longest there is, at most `most`, for which the sum over
    rows of the first length that holds them is least. `counts`: rows of each length from 0 on.
    """
    used = np.flatnonzero(counts)
    upto = np.cumsum(counts[used])  # rows of the first so many lengths
    cost = used * upto.astype(np.float64)  # with one shape, if it ends there
    cuts: list[np.ndarray] = []
    for _ in range(min(most, len(used)) - 1):
        # [end, cut]: shapes so far end at `cut`, one more at `end`
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
