"""Depthwise convolution over time as Mosaic kernels for TPU: shift and accumulate on chip.

XLA fuses the taps into the following matrix product and recomputes them for each of its tiles. Here
each input is read once. Shifting positions between the 8 sublanes of a vector register would cost a
rotation and a selection per tap. Positions are therefore scattered to the sublanes in runs: sublane
s of vector q holds position s Q + q of a row of 8 Q positions. A shift over time then selects
another vector at no cost. Only the ends of the runs, the halo, are rotated, once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu import layout
from convbert_jax.ops.tpu.layout import (
    F32,
    I32,
    LANES,
    SUBLANES,
    Rows,
    in_pieces,
    masked,
    reach,
    round_up,
)

MOST_ROWS = 4
# Longer rows are split into overlapping pieces.
LONGEST = 4096


def depthwise_conv(x, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.depthwise_conv`. `interpret` as in `pallas_call`: run without a TPU."""
    inside = [tap for tap, offset in enumerate(offsets) if abs(offset) < x.shape[1]]
    if len(inside) < len(offsets):  # skip taps that lie outside the row for all positions
        filters = filters[jnp.asarray(inside)]
        offsets = tuple(offsets[tap] for tap in inside)

    def kernel(x, filters, segment_ids):
        return _depthwise_conv(x, filters, segment_ids, offsets, interpret)

    return in_pieces(kernel, (x, filters, segment_ids), (0, 2), offsets, LONGEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _depthwise_conv(x, filters, segment_ids, offsets, interpret):
    rows = _Rows(x, segment_ids)
    arrays = [rows.out(x)]
    out = _call(_forward_kernel, rows, offsets, arrays, filters, x.dtype, interpret)[0]
    return rows.back(out)


def _forward(x, filters, segment_ids, offsets, interpret):
    return _depthwise_conv(x, filters, segment_ids, offsets, interpret), (x, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    x, filters, segment_ids = saved
    rows = _Rows(x, segment_ids)
    arrays = [rows.out(x), rows.out(cotangent)]
    d_x, sums = _call(
        _backward_kernel, rows, offsets, arrays, filters, x.dtype, interpret, sums=True
    )
    d_filters = sums.sum(axis=(0, 2))[:, : x.shape[2]].astype(filters.dtype)
    return rows.back(d_x), d_filters, None


_depthwise_conv.defvjp(_forward, _backward)


def _forward_kernel(offsets, ids, x, filters, out, scattered, words, columns):
    halo = reach(offsets)

    @pl.loop(0, x.shape[0])
    def _(r):
        scatter_ids(ids, r, columns, halo)
        scatter(x, r, scattered, words, halo)

        def results(q):
            masks = _masks(columns, q + halo, offsets)
            for block in range(scattered.shape[0]):
                lanes = slice(block * LANES, (block + 1) * LANES)
                total = None
                for tap, offset in enumerate(offsets):
                    read = masked(masks[tap], scattered[block, q + halo + offset])
                    product = filters[tap, :, lanes] * read
                    total = product if total is None else total + product
                yield total

        gather(results, out, r, words)


def _backward_kernel(offsets, ids, x, cotangent, filters, d_x, sums, scattered, words, columns):
    halo, blocks = reach(offsets), scattered.shape[0] // 2
    opposite = tuple(-offset for offset in offsets)
    sums[...] = jnp.zeros(sums.shape, F32)

    @pl.loop(0, x.shape[0])
    def _(r):
        scatter_ids(ids, r, columns, halo)
        scatter(x, r, scattered.at[:blocks], words, halo)
        scatter(cotangent, r, scattered.at[blocks:], words, halo)

        def results(q):
            masks = _masks(columns, q + halo, opposite)
            real = None if columns is None else columns[q + halo] != 0
            for block in range(blocks):
                lanes = slice(block * LANES, (block + 1) * LANES)
                # Padding may hold NaN, and 0 * NaN is NaN.
                own, total = masked(real, scattered[block, q + halo]), None
                for tap, offset in enumerate(opposite):
                    # Cotangent of the positions that read this one through the tap.
                    given = masked(masks[tap], scattered[blocks + block, q + halo + offset])
                    product = filters[tap, :, lanes] * given
                    total = product if total is None else total + product
                    sums[0, tap, :, lanes] += own * given
                yield total

        gather(results, d_x, r, words)


def _masks(columns, q, offsets):
    """Returns for each tap of vector q the mask of visible positions, or None: all visible."""
    if columns is None:
        return [None] * len(offsets)
    # Padding reads nothing, not even itself: no position has the id -1.
    here = jnp.where(columns[q] == 0, -1, columns[q])
    return [columns[q + offset] == here for offset in offsets]


class _Rows(Rows):
    """Rows with ids that separate concatenated rows, even if no segment ids are given.

    More than 128 channels are padded to whole vectors. Fewer are not: a block has all of them, and
    the memory after them affects no result.
    """

    def __init__(self, x, segment_ids):
        batch, length, channels = x.shape
        super().__init__(batch, length)
        self.channels = channels
        self.padding = -channels % LANES if channels > LANES else 0
        if segment_ids is None and self.together > 1:
            segment_ids = jnp.ones((batch, length), I32)
        self.segment_ids = None
        if segment_ids is not None:
            place = jnp.arange(batch, dtype=I32)[:, None] % self.together
            apart = segment_ids.astype(I32) * self.together + place
            ids = super().out(jnp.where(segment_ids != 0, apart, 0))
            ids = ids.reshape(self.batch_together, SUBLANES, -1)
            self.segment_ids = jnp.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[2] % LANES)))

    def out(self, array):
        array = jnp.pad(array, ((0, 0), (0, 0), (0, self.padding)))
        return super().out(array)

    def back(self, array):
        return super().back(array)[..., : self.channels]


def _call(kernel, rows, offsets, arrays, filters, dtype, interpret, *, sums=False):
    """Runs pallas_call over the rows; returns [rows, L, C] and, with `sums`, each step's sums."""
    batch, length, channels = arrays[0].shape
    lanes = round_up(channels, LANES)
    filters = jnp.pad(filters.astype(F32), ((0, 0), (0, lanes - filters.shape[1])))
    filters = jnp.broadcast_to(filters[:, None], (len(filters), SUBLANES, lanes))
    size = dtype.itemsize
    halo, count = reach(offsets), length // SUBLANES
    together, block = _choose_block(batch, length, lanes, len(arrays), size, halo)
    grid = (batch // together, lanes // block)
    of_row = (together, length, min(block, channels))
    row = pl.BlockSpec(of_row, lambda step, part: (step, 0, part))
    taps = pl.BlockSpec((len(offsets), SUBLANES, block), lambda step, part: (0, 0, part))
    outputs, output_specs = [jax.ShapeDtypeStruct(arrays[0].shape, dtype)], [row]
    if sums:
        outputs.append(jax.ShapeDtypeStruct((grid[0], len(offsets), SUBLANES, lanes), F32))
        output_specs.append(
            pl.BlockSpec((1, len(offsets), SUBLANES, block), lambda step, part: (step, 0, 0, part))
        )
    blocks, kept = block // LANES, count + 2 * halo
    scratch = [
        pltpu.VMEM((len(arrays) * blocks, kept, SUBLANES, LANES), F32),
        pltpu.VMEM((blocks * length * size // 4, LANES), I32),
    ]
    body = functools.partial(kernel, offsets)
    specs, ids = [row] * len(arrays), []
    if rows.segment_ids is None:

        def with_ids(*references):
            body(None, *references, None)

    else:
        ids = [rows.segment_ids]
        shape = (together, SUBLANES, ids[0].shape[2])
        specs = [pl.BlockSpec(shape, lambda step, part: (step, 0, 0)), *specs]
        scratch = [*scratch, pltpu.VMEM((kept, SUBLANES, LANES), I32)]
        with_ids = body
    return pl.pallas_call(
        with_ids,
        grid=grid,
        in_specs=[*specs, taps],
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=layout.vmem_limit(),
        ),
        interpret=interpret,
    )(*ids, *arrays, filters)


def _choose_block(batch, length, channels, arrays, size, halo):
    """Returns (rows, channels) per grid step: as many as fit, channels first."""
    budget = layout.budget() - (length + 2 * SUBLANES * halo) * LANES * 4
    for parts in range(1, channels // LANES + 1):
        block = channels // parts
        if channels % parts or block % LANES:
            continue
        fixed = (arrays * 4 * (length + 2 * SUBLANES * halo) + length * size) * block
        most = min((budget - fixed) // (2 * (arrays + 1) * length * block * size), MOST_ROWS)
        if most >= 1:
            break
    most = max(most, 1)
    return max(n for n in range(1, most + 1) if batch % n == 0), block


# --- Scatters the positions of a row to the sublanes of vectors in runs, and gathers them ---


# Loop iterations unrolled together, so that their instructions can overlap.
UNROLLED = 8


def scatter_ids(ids, r, columns, halo) -> None:
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


def scatter(rows, r, scattered, words, halo) -> None:
    """Scatters row r, [L, C], to `scattered` [C / 128, halo + Q + halo, 8, 128] in float32.

    With fewer than 128 channels the remaining lanes hold arbitrary values. Data is moved in 32-bit
    words, which hold one position, or two positions of a 16-bit dtype.
    """
    size = rows.shape[1] * rows.dtype.itemsize // 4
    run = size // SUBLANES
    for block in range(scattered.shape[0]):
        lanes = slice(block * LANES, min((block + 1) * LANES, rows.shape[2]))
        own = slice(block * size, (block + 1) * size), slice(lanes.stop - lanes.start)
        words[own] = _bitcast(rows[r, :, lanes], I32)

        def spread(index, block=block):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            parts = _unpack(words[place], rows.dtype)
            for part, positions in enumerate(parts):
                scattered[block, halo + index * len(parts) + part] = positions

        for_each(run, spread)
        fill_halo(scattered.at[block], halo)


def gather(results, rows, r, words) -> None:
    """Gathers results into row r, the inverse of `scatter`.

    Args:
      results: results(q) yields vector q of each block of channels.
      rows: output [rows, L, C].
      words: scratch memory of 32-bit words.
    """
    per_word = 4 // rows.dtype.itemsize
    size = rows.shape[1] // per_word
    run = size // SUBLANES

    def gather_words(index):
        parts = [results(index * per_word + part) for part in range(per_word)]
        for block, vectors in enumerate(zip(*parts, strict=True)):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            words[place] = _pack(vectors, rows.dtype)

    for_each(run, gather_words)
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
