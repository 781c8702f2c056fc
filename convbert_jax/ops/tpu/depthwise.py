"""Depthwise convolution over time as Mosaic kernels for TPU: shift and accumulate on chip.

XLA fuses the taps into the following matrix product and recomputes them for each of its tiles. Here
each input is read once. Shifting positions between the 8 sublanes of a vector register would cost a
rotation and a selection per tap. Positions are therefore scattered to the sublanes in runs (see
dealing.py), so that a tap reads another vector at no cost.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import LANES, SUBLANES, round_up
from convbert_jax.ops.tpu.dealing import collect, deal, deal_ids
from convbert_jax.ops.tpu.rows import Rows, in_pieces
from convbert_jax.ops.tpu.rows import halo as halo_of

F32, I32 = jnp.float32, jnp.int32
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


def _forward_kernel(offsets, ids, x, filters, out, dealt, words, columns):
    halo = halo_of(offsets)

    @pl.loop(0, x.shape[0])
    def _(r):
        deal_ids(ids, r, columns, halo)
        deal(x, r, dealt, words, halo)

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

        collect(results, out, r, words)


def _backward_kernel(offsets, ids, x, cotangent, filters, d_x, sums, dealt, words, columns):
    halo, blocks = halo_of(offsets), dealt.shape[0] // 2
    opposite = tuple(-offset for offset in offsets)
    sums[...] = jnp.zeros(sums.shape, F32)

    @pl.loop(0, x.shape[0])
    def _(r):
        deal_ids(ids, r, columns, halo)
        deal(x, r, dealt.at[:blocks], words, halo)
        deal(cotangent, r, dealt.at[blocks:], words, halo)

        def results(q):
            masks = _masks(columns, q + halo, opposite)
            real = None if columns is None else columns[q + halo] != 0
            for block in range(blocks):
                lanes = slice(block * LANES, (block + 1) * LANES)
                # Padding may hold NaN, and 0 * NaN is NaN.
                own, total = _only(real, dealt[block, q + halo]), None
                for tap, offset in enumerate(opposite):
                    # Cotangent of the positions that read this one through the tap.
                    given = _only(masks[tap], dealt[blocks + block, q + halo + offset])
                    product = filters[tap, :, lanes] * given
                    total = product if total is None else total + product
                    sums[0, tap, :, lanes] += own * given
                yield total

        collect(results, d_x, r, words)


def _only(mask, x):
    return x if mask is None else jnp.where(mask, x, 0.0)


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
    halo, count = halo_of(offsets), length // SUBLANES
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
            vmem_limit_bytes=block_sizes.vmem_limit(),
        ),
        interpret=interpret,
    )(*ids, *arrays, filters)


def _choose_block(batch, length, channels, arrays, size, halo):
    """Returns (rows, channels) per grid step: as many as fit, channels first."""
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
