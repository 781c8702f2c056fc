"""Scatters the positions of a row to the sublanes of TPU vectors in runs, and gathers them again.

Sublane s of vector q holds position s Q + q of a row of 8 Q positions. A shift over time then
selects another vector at no cost. Only the ends of the runs, the halo, are rotated, once.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.bands import LANES, SUBLANES

F32, I32 = jnp.float32, jnp.int32
# Loop iterations unrolled together, so that their instructions can overlap.
UNROLLED = 8


def deal_ids(ids, r, columns, halo) -> None:
    """Broadcasts each id of row r, [8, Q] with Q along lanes, to all lanes of its vector."""
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
    """Scatters row r, [L, C], to `dealt` [C / 128, halo + Q + halo, 8, 128] in float32.

    With fewer than 128 channels the remaining lanes hold arbitrary values. Data is moved in 32-bit
    words, which hold one position, or two positions of a 16-bit dtype.
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
    """Gathers results into row r, the inverse of `deal`.

    Args:
      results: results(q) yields vector q of each block of channels.
      rows: output [rows, L, C].
      words: scratch memory of 32-bit words.
    """
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
    """Bitcasts; a word holds two 16-bit rows, the even one in its lower half."""
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
    """Fills the halo of `vectors` [halo + Q + halo, 8, lanes] from the neighboring runs.

    The vector h steps before the runs holds the ends of the runs n = ceil(h / Q) earlier.
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
    """Calls body(0) ... body(count - 1), partly unrolled."""
    whole = count // UNROLLED
    if whole > 1:

        @pl.loop(0, whole)
        def _(chunk):
            for index in range(UNROLLED):
                body(chunk * UNROLLED + index)

    for index in range(whole * UNROLLED if whole > 1 else 0, count):
        body(index)
