"""Shuffled orders of an endless stream of rows, as stateless functions from position to row.

They use integer arithmetic only, so they are the same on every machine and with every version.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 6
# Values of the official code: files written, files interleaved, rows in the shuffle buffer.
FILES = 1000
INTERLEAVED = 4
BUFFER = 100
CHUNK = 1 << 14  # files of a lane computed at once
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
