"""Positions of a row dealt to the sublanes of TPU vectors in runs, and collected again.

Sublane s of vector q holds position s Q + q of a row of 8 Q: what lies some positions away is
another vector, for nothing. Only the ends of the runs, the halo, are rotated, once.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.bands import LANES, SUBLANES

F32, I32 = jnp.float32, jnp.int32
# Vectors of positions worked on together: the instructions of one fill the waits of another.
UNROLLED = 8


def deal_ids(ids, r, columns, halo) -> None:
    """The ids of row r, [8, Q] with Q along lanes, to every lane of a vector each."""
    if ids is None:
        return
    count = columns.shape[0] - 2 * halo

    def each(first, size):
        lanes = ids[r, :, pl.ds(first, LANES)]
        for q in range(size):
            column = jnp.broadcast_to(lanes[:, q : q + 1], (SUBLANES, LANES))
            columns[halo + first + q] = column

    whole = count // LANES
    if whole == 1:
        each(0, LANES)
    elif whole:

        @pl.loop(0, whole)
        def _(chunk):
            each(pl.multiple_of(chunk * LANES, LANES), LANES)

    if count % LANES:
        each(whole * LANES, count % LANES)
    fill_halo(columns, halo)


def deal(rows, r, dealt, words, halo) -> None:
    """Row r, [L, C], to dealt [C / 128, halo + Q + halo, 8, 128] in float32. Of fewer channels than
    128 the lanes behind them hold anything.

    By way of words of 32 bits, which hold one position or the two of a 16-bit type.
    """
    size = rows.shape[1] * rows.dtype.itemsize // 4
    run = size // SUBLANES
    for block in range(dealt.shape[0]):
        lanes = slice(block * LANES, min((block + 1) * LANES, rows.shape[2]))
        own = slice(block * size, (block + 1) * size), slice(lanes.stop - lanes.start)
        words[own] = _bitcast(rows[r, :, lanes], I32)

        def spread(index, block=block):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            parts = _unpack(words[place], rows.dtype)
            for part, positions in enumerate(parts):
                dealt[block, halo + index * len(parts) + part] = positions

        for_each(run, spread)
        fill_halo(dealt.at[block], halo)


def collect(results, rows, r, words) -> None:
    """results(q) yields vector q of each block of channels; to row r, as `deal` took them."""
    per_word = 4 // rows.dtype.itemsize
    size = rows.shape[1] // per_word
    run = size // SUBLANES

    def gather(index):
        parts = [results(index * per_word + part) for part in range(per_word)]
        for block, vectors in enumerate(zip(*parts, strict=True)):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            words[place] = _pack(vectors, rows.dtype)

    for_each(run, gather)
    for start in range(0, rows.shape[2], LANES):
        lanes = min(LANES, rows.shape[2] - start)
        block = words[start // LANES * size : (start // LANES + 1) * size, :lanes]
        rows[r, :, start : start + lanes] = _bitcast(block, rows.dtype)


def _bitcast(x, dtype):
    """Rows in pairs, where the sizes differ: the even one is the lower half."""
    return x if x.dtype == dtype else pltpu.bitcast(x, dtype)


def _unpack(word, dtype):
    if dtype == F32:
        return [pltpu.bitcast(word, F32)]
    return [pltpu.bitcast(word << 16, F32), pltpu.bitcast(word & I32(-(1 << 16)), F32)]


def _pack(vectors, dtype):
    if dtype == F32:
        return pltpu.bitcast(vectors[0], I32)
    return pltpu.bitcast(pltpu.pack_elementwise(vectors, packed_dtype=dtype), I32)


def fill_halo(vectors, halo) -> None:
    """The vectors of [halo + Q + halo, 8, lanes] before and after the runs, from their neighbors.

    What lies h vectors before the runs is the end of the run that is n = ceil(h / Q) earlier.
    """
    count = vectors.shape[0] - 2 * halo
    sublane = jax.lax.broadcasted_iota(I32, vectors.shape[1:], 0)
    for runs in range(1, -(-halo // count) + 1):
        first, last = (runs - 1) * count, min(runs * count, halo)

        def fill(step, runs=runs, first=first):
            before = halo - 1 - first - step
            after = halo + count + first + step
            for place, source, turn, kept in (
                (before, before + runs * count, runs, sublane >= runs),
                (after, after - runs * count, SUBLANES - runs, sublane < SUBLANES - runs),
            ):
                if runs >= SUBLANES:
                    vectors[place] = jnp.zeros(vectors.shape[1:], vectors.dtype)
                    continue
                moved = pltpu.roll(vectors[source], turn, 0)
                vectors[place] = jnp.where(kept, moved, jnp.zeros_like(moved))

        for_each(last - first, fill)


def for_each(count, body) -> None:
    """body(0) ... body(count - 1), some of them unrolled."""
    whole = count // UNROLLED
    if whole > 1:

        @pl.loop(0, whole)
        def _(chunk):
            for index in range(UNROLLED):
                body(chunk * UNROLLED + index)

    for index in range(whole * UNROLLED if whole > 1 else 0, count):
        body(index)
