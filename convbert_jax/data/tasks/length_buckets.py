"""Length bucketing: batches of rows with similar lengths, padded to a few bucket lengths.

A batch is (length, index [B]) with row numbers; -1 is a padding row of weight 0.
"""

from collections.abc import Iterator, Sequence

import numpy as np

RELEASE_BUFFER = 100


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
    batches = _fill_buckets(lengths, buckets, [batch_size] * len(buckets), random)
    order = np.random.default_rng(epoch).permutation(len(batches))
    return [batches[i] for i in order]


def evaluation_batches(
    lengths: np.ndarray, buckets: Sequence[int], batch_size: int | Sequence[int]
) -> list[tuple[int, np.ndarray]]:
    """Returns batches of all rows, sorted by length, in the form of `epoch_batches`.

    Args:
      batch_size: one size, or one for each bucket.
    """
    sizes = [batch_size] * len(buckets) if isinstance(batch_size, int) else batch_size
    return _fill_buckets(lengths, buckets, sizes, None)


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


def _fill_buckets(lengths, buckets, sizes, random) -> list[tuple[int, np.ndarray]]:
    bucket_of = np.searchsorted(np.asarray(buckets), lengths)
    last = int(bucket_of.max(initial=0))
    batches, left = [], np.zeros(0, np.int64)
    for number in range(last + 1):
        members = np.concatenate([left, np.flatnonzero(bucket_of == number)])
        if random is None:
            members = members[np.argsort(lengths[members], kind="stable")]
        else:
            members = random.permutation(members)
        size = sizes[number]
        whole = len(members) // size * size
        batches += [
            (buckets[number], members[start : start + size]) for start in range(0, whole, size)
        ]
        left = members[whole:]
    if len(left):
        filler = np.full(sizes[last] - len(left), -1)
        batches.append((buckets[last], np.concatenate([left, filler])))
    return batches
