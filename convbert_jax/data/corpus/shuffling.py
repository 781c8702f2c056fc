"""Orders of an endless stream of rows, as functions from position to row: no state, no memory.

Only exact integer arithmetic is used, so the orders are the same on every machine and version.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 6
# The release's: files written, files read in turn, rows in the shuffle buffer.
FILES = 1000
INTERLEAVED = 4
BUFFER = 100
CHUNK = 1 << 14  # files of a lane looked up at once
BLOCK = 1 << 16  # rows ordered at once
Order = Callable[[np.ndarray], np.ndarray]


def shuffled(size: int, seed: int) -> Order:
    """Every epoch of `size` rows in a random order of its own.

    The order is a pseudo-random permutation evaluated at single positions: a Feistel network (Luby
    and Rackoff, 1988) over the next power of four, walked until it lands below `size`. Vectorized
    it takes 0.2 us a row; a permutation of 40 million rows in memory would take 320 MB.
    """

    def order(positions: np.ndarray) -> np.ndarray:
        epochs, rows = np.divmod(positions, size)
        keys = _epoch_keys(seed, epochs)
        return _permute(rows.astype(np.uint64), keys, size).astype(np.int64)

    return order


def release_order(shards: Sequence[int], seed: int) -> Order:
    """Rows in the order of ConvBERT's release (its build_pretraining_dataset.py, pretrain_data.py).

    Writing: shards (of so many rows each) follow each other in random order, and their rows are
    dealt in turn to `FILES` files, so neighbors in a file are of different documents. Reading: the
    names of the files, repeated for ever, go through a shuffle buffer as large as their number, so
    epochs flow into each other; `INTERLEAVED` files are read in turn, each to its end; their rows
    go through a shuffle buffer of `BUFFER`. (The release lets whichever file is ready come first,
    which has no reproducible order.)

    Nothing is held but the order of a block or two. A first call far from the beginning goes over
    all files read until there, some 0.1 us each.
    """
    starts = np.cumsum([0, *shards])
    size = int(starts[-1])
    key = _epoch_keys(seed, np.asarray([0]))
    by_shard = np.argsort(_mix(key ^ np.arange(len(shards), dtype=np.uint64)), kind="stable")
    written = np.cumsum([0, *(shards[s] for s in by_shard)])  # where each shard begins, as written
    files = min(FILES, size)
    lanes = min(INTERLEAVED, files)
    begins = [np.zeros(lanes, np.int64)]  # of each chunk of files: the turns of each lane before it

    @functools.lru_cache(maxsize=4)
    def chunk(number: int) -> tuple[np.ndarray, np.ndarray]:
        """Files that each lane reads, [lanes, CHUNK], and the turn at which each is at its end."""
        inputs = _buffered(number * CHUNK * lanes, CHUNK * lanes, files, _mix(~key))
        names = (inputs % files).reshape(CHUNK, lanes).T
        lengths = size // files + (names < size % files)
        return names, np.cumsum(lengths, axis=1)

    def interleaved(turns: np.ndarray, lane: int) -> np.ndarray:
        """Rows, by their place as written, that a lane reads at `turns`."""
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
    """Which inputs (0, 1, ...) a shuffle buffer gives at its outputs `first` to `first + count`.

    The buffer is filled with the first `slots` inputs; each output empties a random slot, which
    takes the next input. So what comes out is what went in when the same slot was last emptied:
    input `slots + t` for output t; a look back as far as needed takes the place of a state.
    """
    back = 16 * slots
    while True:
        begin = max(0, first - back)
        outputs = np.arange(begin, first + count)
        emptied = (_mix(key ^ outputs.astype(np.uint64)) % np.uint64(slots)).astype(np.int64)
        by_slot = np.argsort(emptied, kind="stable")
        again = emptied[by_slot][1:] == emptied[by_slot][:-1]
        inputs = emptied.copy()  # what lay there from the start
        inputs[by_slot[1:][again]] = slots + outputs[by_slot[:-1][again]]
        if begin == 0 or inputs[first - begin :].min() >= slots:
            return inputs[first - begin :]
        back *= 4


def _epoch_keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    seed = np.asarray([(seed + 0x9E3779B97F4A7C15) % 2**64], np.uint64)
    return _mix(_mix(seed) ^ epochs.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al., 2014): every bit of the result hangs on every bit."""
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
