"""Samplers: the rows of each batch, as functions of seed, epoch and position.

Shuffled orders use integer arithmetic only, so they are the same on every machine and with every
version. Bucketing makes batches of rows of similar length, padded to one of a few shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from convbert_jax.data.errors import DataError

ROUNDS = 6
# Values of the official code: files written, files interleaved, rows in the shuffle buffer.
FILES = 1000
INTERLEAVED = 4
BUFFER = 100
CHUNK = 1 << 14  # files of a lane computed at once
CYCLE = 1 << 14  # positions of a mixture with exact shares
BLOCK = 1 << 16  # rows computed at once
Order = Callable[[np.ndarray], np.ndarray]


def shuffled(size: int, seed: int) -> Order:
    """Returns an order with a different random permutation of `size` rows in every epoch.

    The permutation is evaluated at single positions, without storing it: a Feistel network (Luby
    and Rackoff, 1988) over the next power of four, iterated until the result is below `size`.
    """

    def order(positions: np.ndarray) -> np.ndarray:
        epochs, rows = np.divmod(positions, size)
        keys = _epoch_keys(seed, epochs)
        return _permute(rows.astype(np.uint64), keys, size).astype(np.int64)

    return order


class Mixture:
    """Order of a stream of rows that several sources share by weight.

    The stream consists of cycles of `CYCLE` positions. A cycle has each source in proportion to
    its weight, rounded to whole rows, in random order. Each source is read in its own `shuffled`
    order, so an epoch of a source has each of its rows once. A source that has reached its limit
    is left out, and the weights of the others are scaled to a sum of 1.
    """

    def __init__(
        self,
        weights: Sequence[float],
        sizes: Sequence[int],
        limits: Sequence[int | None],
        seed: int,
        *,
        drawn: Sequence[int] | None = None,
        stream: int = 0,
    ):
        """
        Args:
          weights: of each source.
          sizes: rows of each source.
          limits: number of rows after which a source is left out; None: never.
          drawn: rows that earlier streams with this seed have drawn from each source.
          stream: number of earlier streams.
        """
        starts = np.cumsum([0, *sizes[:-1]])
        # Seeds of configs have 32 bits; the upper bits name the source, or stream and part.
        orders = [shuffled(size, seed | (s + 1) << 32) for s, size in enumerate(sizes)]
        self._rows = [
            lambda index, order=order, start=int(start): start + order(index)
            for order, start in zip(orders, starts, strict=True)
        ]
        self._seed = seed | (stream + 1) << 40
        self._cycle = functools.lru_cache(maxsize=8)(self._make_cycle)
        self._parts: list[_Part] = []
        self.end: int | None = None  # number of positions until all sources reach their limits
        begin, drawn = 0, np.array([0] * len(sizes) if drawn is None else drawn)
        while True:
            weights = [
                weight if limit is None or count < limit else 0.0
                for weight, limit, count in zip(weights, limits, drawn, strict=True)
            ]
            if not any(weights):
                self.end = begin
                return
            part = _Part(begin, drawn, _round_shares(weights), len(self._parts))
            self._parts.append(part)
            ends = [
                self._position(part, source, limit - drawn[source] - 1) + 1
                for source, limit in enumerate(limits)
                if limit is not None and part.counts[source]
            ]
            if not ends:
                return
            begin = min(ends)
            drawn = self.drawn(begin)

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Returns the row at each position; rows of the sources are numbered one after another."""
        if self.end is not None:
            positions = np.minimum(positions, self.end - 1)  # a block may reach beyond the end
        begins = [part.begin for part in self._parts]
        parts = np.searchsorted(begins, positions, side="right") - 1
        rows = np.empty_like(positions)
        for number in map(int, np.unique(parts)):
            part = self._parts[number]
            cycles, offsets = np.divmod(positions - part.begin, CYCLE)
            for cycle in map(int, np.unique(cycles[parts == number])):
                chosen = (parts == number) & (cycles == cycle)
                sources, ranks = (each[offsets[chosen]] for each in self._cycle(number, cycle))
                index = part.drawn[sources] + cycle * part.counts[sources] + ranks
                found = np.empty_like(index)
                for source in np.unique(sources):
                    found[sources == source] = self._rows[source](index[sources == source])
                rows[chosen] = found
        return rows

    def drawn(self, positions: int) -> np.ndarray:
        """Returns the rows that the first `positions` positions and earlier streams have drawn."""
        part = max((p for p in self._parts if p.begin <= positions), key=lambda p: p.begin)
        cycles, offset = divmod(positions - part.begin, CYCLE)
        sources, _ = self._cycle(part.number, cycles)
        rest = np.bincount(sources[:offset], minlength=len(part.counts))
        return part.drawn + cycles * part.counts + rest

    def _position(self, part: "_Part", source: int, rank: int) -> int:
        """Returns the position at which a part draws row `rank` of a source, from 0."""
        cycle, rank = divmod(int(rank), int(part.counts[source]))
        sources, _ = self._cycle(part.number, cycle)
        return part.begin + cycle * CYCLE + int(np.flatnonzero(sources == source)[rank])

    def _make_cycle(self, part: int, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each position of a cycle, and its rank within the source."""
        counts = self._parts[part].counts
        positions = np.arange(cycle * CYCLE, (cycle + 1) * CYCLE)
        mixed = shuffled(CYCLE, self._seed | part << 32)(positions)
        sources = np.searchsorted(np.cumsum(counts), mixed, side="right")
        ranks = np.empty_like(sources)
        for source, count in enumerate(counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


@dataclasses.dataclass(frozen=True)
class _Part:
    """Positions of a `Mixture` with the same sources."""

    begin: int  # position
    drawn: np.ndarray  # rows of each source before
    counts: np.ndarray  # rows of each source in a cycle
    number: int


def _round_shares(weights: Sequence[float]) -> np.ndarray:
    """Returns whole numbers with the sum `CYCLE` in proportion to weights (largest remainders)."""
    exact = [Fraction(weight) / sum(map(Fraction, weights)) * CYCLE for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (counts[s] - exact[s], s))
    for source in by_remainder[: CYCLE - sum(counts)]:
        counts[source] += 1
    return np.array(counts)


def release_order(shards: Sequence[int], seed: int) -> Order:
    """Returns the order of ConvBERT's official code.

    Writing (build_pretraining_dataset.py): the shards follow each other in random order, and their
    rows are distributed round-robin over `FILES` files, so neighbors in a file come from different
    documents. Reading (pretrain_data.py): the endlessly repeated file names pass through a shuffle
    buffer of their number, so epochs overlap; `INTERLEAVED` files are read in turn, each to its
    end; their rows pass through a shuffle buffer of `BUFFER`. (The official code reads the file
    that is ready first, an order that is not reproducible.)

    Only the order of one or two blocks is kept in memory. A first call far from the beginning
    iterates over all files before it.

    Args:
      shards: rows of each shard.
    """
    starts = np.cumsum([0, *shards])
    size = int(starts[-1])
    key = _epoch_keys(seed, np.asarray([0]))
    by_shard = np.argsort(_mix(key ^ np.arange(len(shards), dtype=np.uint64)), kind="stable")
    written = np.cumsum([0, *(shards[s] for s in by_shard)])  # start of each shard, as written
    files = min(FILES, size)
    lanes = min(INTERLEAVED, files)
    begins = [np.zeros(lanes, np.int64)]  # turns of each lane before each chunk of files

    @functools.lru_cache(maxsize=4)
    def chunk(number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the files that each lane reads, [lanes, CHUNK], and the turns at their ends."""
        inputs = _buffered(number * CHUNK * lanes, CHUNK * lanes, files, _mix(~key))
        names = (inputs % files).reshape(CHUNK, lanes).T
        lengths = size // files + (names < size % files)
        return names, np.cumsum(lengths, axis=1)

    def interleaved(turns: np.ndarray, lane: int) -> np.ndarray:
        """Returns the rows, by written position, that a lane reads at `turns`."""
        while begins[-1].min() <= turns.max():
            begins.append(begins[-1] + chunk(len(begins) - 1)[1][:, -1])
        places = np.empty_like(turns)
        chunks = np.searchsorted([begin[lane] for begin in begins], turns, side="right") - 1
        for number in np.unique(chunks):
            chosen = chunks == number
            names, ends = (part[lane] for part in chunk(int(number)))
            local = turns[chosen] - begins[number][lane]
            file = np.searchsorted(ends, local, side="right")
            before = np.append(0, ends)[file]
            places[chosen] = names[file] + (local - before) * files
        return places

    @functools.lru_cache(maxsize=2)
    def block_order(block: int) -> np.ndarray:
        inputs = _buffered(block * BLOCK, BLOCK, BUFFER, _mix(key))
        places = np.empty_like(inputs)
        for lane in range(lanes):
            chosen = inputs % lanes == lane
            places[chosen] = interleaved(inputs[chosen] // lanes, lane)
        shard = np.searchsorted(written, places, side="right") - 1
        return starts[by_shard[shard]] + places - written[shard]

    def order(positions: np.ndarray) -> np.ndarray:
        blocks, offsets = np.divmod(positions, BLOCK)
        rows = np.empty_like(positions)
        for block in np.unique(blocks):
            chosen = blocks == block
            rows[chosen] = block_order(int(block))[offsets[chosen]]
        return rows

    return order


def _buffered(first: int, count: int, slots: int, key: np.ndarray) -> np.ndarray:
    """Returns the inputs (0, 1, ...) of a shuffle buffer at outputs `first` to `first + count`.

    The buffer is filled with the first `slots` inputs; each output empties a random slot, which
    takes the next input. An output is therefore the input that entered its slot when the slot was
    last emptied (input `slots + t` at output t), which is found by looking back from `first`.
    """
    back = 16 * slots
    while True:
        begin = max(0, first - back)
        outputs = np.arange(begin, first + count)
        emptied = (_mix(key ^ outputs.astype(np.uint64)) % np.uint64(slots)).astype(np.int64)
        by_slot = np.argsort(emptied, kind="stable")
        again = emptied[by_slot][1:] == emptied[by_slot][:-1]
        inputs = emptied.copy()  # initial content of the slots
        inputs[by_slot[1:][again]] = slots + outputs[by_slot[:-1][again]]
        if begin == 0 or inputs[first - begin :].min() >= slots:
            return inputs[first - begin :]
        back *= 4


def _epoch_keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    seed = np.asarray([(seed + 0x9E3779B97F4A7C15) % 2**64], np.uint64)
    return _mix(_mix(seed) ^ epochs.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer (Steele et al., 2014), which mixes all 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permute(rows: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    rows = rows.copy()
    outside = np.arange(len(rows))
    while len(outside):
        key = keys[outside]
        left, right = rows[outside] >> half, rows[outside] & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key + np.uint64(turn))) & mask)
        rows[outside] = (left << half) | right
        outside = outside[rows[outside] >= np.uint64(size)]
    return rows


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
        batches = _fill_buckets(self._shape_of, order, [shape.rows for shape in self.shapes])
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


RELEASE_BUFFER = 100
_BATCH_COST = 64  # tokens that take as long as the start of a batch


def choose_buckets(buckets: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the ascending bucket lengths for rows of at most `length` tokens."""
    return (*sorted(bucket for bucket in buckets if bucket < length), length)


def epoch_batches(
    lengths: np.ndarray, buckets: Sequence[int], batch_size: int, *, seed: int, epoch: int
) -> list[tuple[int, np.ndarray]]:
    """Returns the batches of an epoch in random order; each row occurs once.

    The remainder of a bucket moves to the next bucket, so only the last batch of the longest
    bucket has padding rows. The rows of a batch depend on seed and epoch, but the sequence of
    lengths depends on the epoch only, so that runs with different seeds can be trained together.
    """
    random = np.random.default_rng((seed, epoch))
    batches = _bucketed(lengths, buckets, [batch_size] * len(buckets), random.permutation)
    order = np.random.default_rng(epoch).permutation(len(batches))
    return [batches[i] for i in order]


def evaluation_batches(
    lengths: np.ndarray,
    buckets: Sequence[int],
    batch_size: int | Sequence[int] | Sequence[Sequence[int]],
) -> list[tuple[int, np.ndarray]]:
    """Returns batches of all rows, sorted by length, in the form of `epoch_batches`.

    Args:
      batch_size: one size, one for each bucket, or several for each bucket, of which those with
        the least padding are used.
    """
    sizes = [batch_size] * len(buckets) if isinstance(batch_size, int) else batch_size
    if not all(isinstance(size, int) for size in sizes):
        return _least_padding(lengths, buckets, sizes)
    return _bucketed(
        lengths, buckets, sizes, lambda rows: rows[np.argsort(lengths[rows], kind="stable")]
    )


def _least_padding(
    lengths: np.ndarray, buckets: Sequence[int], sizes: Sequence[Sequence[int]]
) -> list[tuple[int, np.ndarray]]:
    """Cuts rows sorted by length into batches with the lowest total cost, by dynamic programming.

    The cost of a batch is its number of tokens, and _BATCH_COST.
    """
    order = np.argsort(lengths, kind="stable")
    bucket_of = np.searchsorted(np.asarray(buckets), lengths[order])
    best = [(0, 0)]  # (cost, size of the last batch) of the first n rows
    for end, bucket in enumerate(bucket_of.tolist(), 1):
        best.append(
            min(
                (best[max(0, end - size)][0] + size * buckets[bucket] + _BATCH_COST, size)
                for size in sizes[bucket]
            )
        )
    batches, end = [], len(order)
    while end:
        size = best[end][1]
        rows = order[max(0, end - size) : end]
        filler = np.full(size - len(rows), -1)
        batches.append((buckets[bucket_of[end - 1]], np.concatenate([rows, filler])))
        end -= len(rows)
    return batches[::-1]


def _bucketed(
    lengths: np.ndarray,
    buckets: Sequence[int],
    sizes: Sequence[int],
    arrange: Callable[[np.ndarray], np.ndarray],
) -> list[tuple[int, np.ndarray]]:
    bucket_of = np.searchsorted(np.asarray(buckets), lengths)
    used = int(bucket_of.max(initial=0)) + 1
    batches = _fill_buckets(bucket_of, np.arange(len(lengths)), sizes[:used], arrange)
    return [(buckets[number], rows) for number, rows in batches]


def release_batches(
    count: int, length: int, batch_size: int, *, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields endless batches in the order of the official code of ConvBERT (`finetune/`).

    Rows, plus padding rows up to whole batches, are shuffled once, repeated, and sampled from a
    buffer of 100 rows.
    """
    random = np.random.default_rng(seed)
    total = -(-count // batch_size) * batch_size
    stream = random.permutation(count)
    stream = np.concatenate([stream, np.full(total - count, -1)])
    buffer, place = [stream[i % total] for i in range(RELEASE_BUFFER)], RELEASE_BUFFER
    while True:
        chosen = []
        for slot in random.integers(0, RELEASE_BUFFER, batch_size):
            chosen.append(buffer[slot])
            buffer[slot] = stream[place % total]
            place += 1
        yield length, np.asarray(chosen)


def _fill_buckets(
    bucket_of: np.ndarray,
    order: np.ndarray,
    sizes: Sequence[int],
    arrange: Callable[[np.ndarray], np.ndarray] = lambda members: members,
) -> list[tuple[int, np.ndarray]]:
    """Cuts the rows of each bucket into batches (bucket, rows [B]).

    The remainder of a bucket moves to the next bucket; the last batch of the last bucket is padded
    with -1.

    Args:
      bucket_of: bucket of each row.
      order: the rows in order.
      sizes: rows of a batch of each bucket.
      arrange: reorders the rows of a bucket, with the remainder of the previous one first.
    """
    batches, left, in_order = [], order[:0], bucket_of[order]
    for number, size in enumerate(sizes):
        members = arrange(np.concatenate([left, order[in_order == number]]))
        whole = len(members) // size * size
        batches += [(number, part) for part in members[:whole].reshape(-1, size)]
        left = members[whole:]
    if len(left):
        filler = np.full(sizes[-1] - len(left), -1)
        batches.append((len(sizes) - 1, np.concatenate([left, filler])))
    return batches
