"""Orders of an endless stream of rows, as functions from position to row: no state, no memory.

Only exact integer arithmetic is used, so the orders are the same on every machine and version.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 6
WINDOW = 100
INTERLEAVED = 4
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
    """Shards (of so many rows each) in random order, `INTERLEAVED` read in turn, then mixed within
    windows of `WINDOW` rows: how far the official reader's shuffling reaches.

    Holds the order of an epoch or two in memory, 8 bytes a row.
    """
    starts = np.cumsum([0, *shards])
    size = int(starts[-1])

    @functools.lru_cache(maxsize=2)
    def epoch_order(epoch: int) -> np.ndarray:
        key = _epoch_keys(seed, np.asarray([epoch]))
        by_shard = np.argsort(_mix(key ^ np.arange(len(shards), dtype=np.uint64)), kind="stable")
        waiting = [np.arange(starts[s], starts[s + 1]) for s in by_shard]
        reading, pieces = [], []
        while waiting or reading:
            while waiting and len(reading) < INTERLEAVED:
                reading.append(waiting.pop(0))
            turns = min(map(len, reading))
            pieces.append(np.stack([rows[:turns] for rows in reading], axis=1).reshape(-1))
            reading = [rows[turns:] for rows in reading if len(rows) > turns]
        rows = np.concatenate(pieces)
        noise = _mix(~key ^ np.arange(size, dtype=np.uint64))
        return rows[np.lexsort((noise, np.arange(size) // WINDOW))]

    def order(positions: np.ndarray) -> np.ndarray:
        epochs, offsets = np.divmod(positions, size)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = epoch_order(int(epoch))[offsets[chosen]]
        return rows

    return order


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
