"""Depthwise convolution over time as Mosaic kernels for TPU: shift and accumulate on the chip.

XLA fuses the taps into the matrix product that follows and computes them again for each of its
tiles. Here each input is read once. A vector register has 8 sublanes, and moving positions from one
to the next costs a rotation and a selection per tap, so positions are *dealt* to the sublanes in
runs: of a row of L = 8 Q positions, sublane s of vector q holds position s Q + q. What a tap reads
is then another vector, for nothing; only the ends of the runs are rotated, once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from convbert_jax.ops import block_sizes
from convbert_jax.ops.bands import LANES, SUBLANES
from convbert_jax.ops.pallas_tpu_rows import Rows

F32, I32 = jnp.float32, jnp.int32
MOST_ROWS = 4
# Rows of more positions are worked on in pieces, which overlap.
LONGEST = 4096
# Vectors of positions worked on together: the instructions of one fill the waits of another.
UNROLLED = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def depthwise_conv(
    x: Float[Array, "B L C"],
    filters: Float[Array, "K C"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: tuple[int, ...],
    interpret: object = False,
) -> Float[Array, "B L C"]:
    """out[b, t, c] = sum over i of filters[i, c] * x[b, t + offsets[i], c].

    Args:
      segment_ids, interpret: as in `dynamic_conv`, `pallas_call`.
    """
    if _is_long(x, offsets):
        return _in_pieces(x, filters, segment_ids, offsets, interpret)
    rows = _Rows(x, segment_ids)
    arrays = [rows.out(x)]
    out = _call(_forward_kernel, rows, offsets, arrays, filters, x.dtype, interpret)[0]
    return rows.back(out)


def _forward(x, filters, segment_ids, offsets, interpret):
    return depthwise_conv(x, filters, segment_ids, offsets, interpret), (x, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    x, filters, segment_ids = saved
    if _is_long(x, offsets):

        def by_pieces(x, filters):
            return _in_pieces(x, filters, segment_ids, offsets, interpret)

        return *jax.vjp(by_pieces, x, filters)[1](cotangent), None
    rows = _Rows(x, segment_ids)
    arrays = [rows.out(x), rows.out(cotangent)]
    d_x, sums = _call(
        _backward_kernel, rows, offsets, arrays, filters, x.dtype, interpret, sums=True
    )
    d_filters = sums.sum(axis=(0, 2))[:, : x.shape[2]].astype(filters.dtype)
    return rows.back(d_x), d_filters, None


depthwise_conv.defvjp(_forward, _backward)


def _forward_kernel(offsets, ids, x, filters, out, dealt, words, columns):
    halo = _halo(offsets)

    @pl.loop(0, x.shape[0])
    def _(r):
        _deal_ids(ids, r, columns, halo)
        _deal(x, r, dealt, words, halo)

        def results(q):
            masks = _masks(columns, q + halo, offsets)
            for block in range(dealt.shape[0]):
                lanes = slice(block * LANES, (block + 1) * LANES)
                total = None
                for tap, offset in enumerate(offsets):
                    read = _only(masks[tap], dealt[block, q + halo + offset])
                    product = filters[tap, :, lanes] * read
                    total = product if total is None else total + product
                yield total

        _collect(results, out, r, words)


def _backward_kernel(offsets, ids, x, cotangent, filters, d_x, sums, dealt, words, columns):
    halo, blocks = _halo(offsets), dealt.shape[0] // 2
    opposite = tuple(-offset for offset in offsets)
    sums[...] = jnp.zeros(sums.shape, F32)

    @pl.loop(0, x.shape[0])
    def _(r):
        _deal_ids(ids, r, columns, halo)
        _deal(x, r, dealt.at[:blocks], words, halo)
        _deal(cotangent, r, dealt.at[blocks:], words, halo)

        def results(q):
            masks = _masks(columns, q + halo, opposite)
            real = None if columns is None else columns[q + halo] != 0
            for block in range(blocks):
                lanes = slice(block * LANES, (block + 1) * LANES)
                # Not even NaN times nothing: what padding holds is in no sum.
                own, total = _only(real, dealt[block, q + halo]), None
                for tap, offset in enumerate(opposite):
                    # What the positions that read this one through the tap got; for both gradients.
                    given = _only(masks[tap], dealt[blocks + block, q + halo + offset])
                    product = filters[tap, :, lanes] * given
                    total = product if total is None else total + product
                    sums[0, tap, :, lanes] += own * given
                yield total

        _collect(results, d_x, r, words)


def _is_long(x, offsets) -> bool:
    return x.shape[1] > max(LONGEST, 4 * _halo(offsets))


def _in_pieces(x, filters, segment_ids, offsets, interpret):
    """Rows too long for on-chip memory as several that overlap by what the taps reach."""
    batch, length, channels = x.shape
    halo = _halo(offsets)
    size = max(LONGEST // 2, 2 * halo)
    pieces = -(-length // size)
    after = pieces * size - length + halo

    def cut(array):
        array = jnp.pad(array, ((0, 0), (halo, after), *((0, 0),) * (array.ndim - 2)))
        parts = [array[:, i * size : (i + 1) * size + 2 * halo] for i in range(pieces)]
        return jnp.stack(parts, axis=1).reshape(batch * pieces, -1, *array.shape[2:])

    ids = None if segment_ids is None else cut(segment_ids)
    out = depthwise_conv(cut(x), filters, ids, offsets, interpret)[:, halo : halo + size]
    return out.reshape(batch, -1, channels)[:, :length]


def _halo(offsets) -> int:
    return max(abs(offset) for offset in offsets)


def _only(mask, x):
    return x if mask is None else jnp.where(mask, x, 0.0)


def _masks(columns, q, offsets):
    """For each tap of vector q whether it may read, or None: everywhere."""
    if columns is None:
        return [None] * len(offsets)
    # Padding reads nothing, itself included: -1 is nobody's id.
    here = jnp.where(columns[q] == 0, -1, columns[q])
    return [columns[q + offset] == here for offset in offsets]


def _deal_ids(ids, r, columns, halo) -> None:
    """The ids of row r, [8, Q] with Q along lanes, to every lane of a vector each."""
    if ids is None:
        return
    count = columns.shape[0] - 2 * halo

    def deal(first, size):
        lanes = ids[r, :, pl.ds(first, LANES)]
        for q in range(size):
            column = jnp.broadcast_to(lanes[:, q : q + 1], (SUBLANES, LANES))
            columns[halo + first + q] = column

    whole = count // LANES
    if whole == 1:
        deal(0, LANES)
    elif whole:

        @pl.loop(0, whole)
        def _(chunk):
            deal(pl.multiple_of(chunk * LANES, LANES), LANES)

    if count % LANES:
        deal(whole * LANES, count % LANES)
    _fill_halo(columns, halo)


def _deal(rows, r, dealt, words, halo) -> None:
    """Row r, [L, C], to dealt [C / 128, halo + Q + halo, 8, 128] in float32.

    By way of words of 32 bits, which hold one position or the two of a 16-bit type.
    """
    size = rows.shape[1] * rows.dtype.itemsize // 4
    run = size // SUBLANES
    for block in range(dealt.shape[0]):
        lanes = slice(block * LANES, (block + 1) * LANES)
        words[block * size : (block + 1) * size] = _bitcast(rows[r, :, lanes], I32)

        def deal(index, block=block):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            parts = _unpack(words[place], rows.dtype)
            for part, positions in enumerate(parts):
                dealt[block, halo + index * len(parts) + part] = positions

        _for_each(run, deal)
        _fill_halo(dealt.at[block], halo)


def _collect(results, rows, r, words) -> None:
    """results(q) yields vector q of each block of channels; to row r, as `_deal` took them."""
    per_word = 4 // rows.dtype.itemsize
    size = rows.shape[1] // per_word
    run = size // SUBLANES

    def collect(index):
        parts = [results(index * per_word + part) for part in range(per_word)]
        for block, vectors in enumerate(zip(*parts, strict=True)):
            place = pl.ds(block * size + index, SUBLANES, stride=run)
            words[place] = _pack(vectors, rows.dtype)

    _for_each(run, collect)
    for start in range(0, rows.shape[2], LANES):
        block = words[start // LANES * size : (start // LANES + 1) * size]
        rows[r, :, start : start + LANES] = _bitcast(block, rows.dtype)


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


def _fill_halo(vectors, halo) -> None:
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

        _for_each(last - first, fill)


def _for_each(count, body) -> None:
    """body(0) ... body(count - 1), some of them unrolled."""
    whole = count // UNROLLED
    if whole > 1:

        @pl.loop(0, whole)
        def _(chunk):
            for index in range(UNROLLED):
                body(chunk * UNROLLED + index)

    for index in range(whole * UNROLLED if whole > 1 else 0, count):
        body(index)


class _Rows(Rows):
    """Rows that share one are kept apart by their ids, which are made even if none are given.

    Channels are padded to whole vectors.
    """

    def __init__(self, x, segment_ids):
        batch, length, channels = x.shape
        super().__init__(batch, length)
        self.channels = channels
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
        array = jnp.pad(array, ((0, 0), (0, 0), (0, -self.channels % LANES)))
        return super().out(array)

    def back(self, array):
        return super().back(array)[..., : self.channels]


def _call(kernel, rows, offsets, arrays, filters, dtype, interpret, *, sums=False):
    """pallas_call over the rows; outputs are [rows, L, C] and, with `sums`, each step's sums."""
    batch, length, channels = arrays[0].shape
    filters = jnp.pad(filters.astype(F32), ((0, 0), (0, channels - filters.shape[1])))
    filters = jnp.broadcast_to(filters[:, None], (len(filters), SUBLANES, channels))
    size = dtype.itemsize
    halo, count = _halo(offsets), length // SUBLANES
    together, block = _choose_block(batch, length, channels, len(arrays), size, halo)
    grid = (batch // together, channels // block)
    row = pl.BlockSpec((together, length, block), lambda step, part: (step, 0, part))
    taps = pl.BlockSpec((len(offsets), SUBLANES, block), lambda step, part: (0, 0, part))
    outputs, output_specs = [jax.ShapeDtypeStruct(arrays[0].shape, dtype)], [row]
    if sums:
        outputs.append(jax.ShapeDtypeStruct((grid[0], len(offsets), SUBLANES, channels), F32))
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
            vmem_limit_bytes=block_sizes.vmem_limit(),
        ),
        interpret=interpret,
    )(*ids, *arrays, filters)


def _choose_block(batch, length, channels, arrays, size, halo):
    """(rows, channels) of a grid step: as many as fit, channels first."""
    budget = block_sizes.budget() - (length + 2 * SUBLANES * halo) * LANES * 4
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
