"""Light convolution as Mosaic kernels for TPU: banded products with the same filters everywhere.

The filters of a head are moved into its slot once instead of once per position. Their gradient is
summed over the positions of a grid step on chip. See bands.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops.tpu import block_sizes, windows
from convbert_jax.ops.tpu.bands import SUBLANES, fits
from convbert_jax.ops.tpu.grid import Grid, call, is_first_step, whole
from convbert_jax.ops.tpu.rows import BandRows, in_pieces
from convbert_jax.ops.tpu.windows import F32, LANES, dot, only

FEWEST_TAPS = 9  # benchmarks/RESULTS.md, section 5


def light_suits(offsets: tuple[int, ...]) -> bool:
    """Returns whether the taps fit into one band and the band is faster than the depthwise kernel.

    The cost of the depthwise kernel grows with the number of taps.
    """
    return len(offsets) >= FEWEST_TAPS and fits(offsets)


def light_conv(values, filters, segment_ids, offsets, interpret=False):
    """Convolves values [B, L, H, D] with filters [H, K], whose taps must fit into one band.

    `interpret` as in `pallas_call`: run without a TPU.
    """

    def kernel(values, filters, segment_ids):
        return _light_conv(values, filters, segment_ids, offsets, interpret)

    bands = BandRows(values.shape, offsets).bands
    longest = block_sizes.longest(bands, values.dtype, arrays=4, copies=2)
    return in_pieces(kernel, (values, filters, segment_ids), (0, 2), offsets, longest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _light_conv(values, filters, segment_ids, offsets, interpret):
    rows = BandRows(values.shape, offsets)
    bands, dtype = rows.bands, values.dtype
    arrays = [rows.out(values), _slots(filters, bands)]
    block = block_sizes.rows(bands, len(arrays[0]), dtype, "light_forward", arrays=2, copies=1)
    grid = Grid(len(arrays[0]), block)
    out = call(
        functools.partial(_forward_kernel, bands),
        bands, grid, rows.ids(segment_ids), arrays, [grid.row_block(arrays[0]), whole(arrays[1])],
        outputs=[jax.ShapeDtypeStruct(arrays[0].shape, dtype)],
        output_specs=[grid.row_block(arrays[0])],
        scratch=[windows.copies(bands, dtype)],
        interpret=interpret,
    )[0]  # fmt: skip
    return rows.back(out).reshape(values.shape)


def _forward(values, filters, segment_ids, offsets, interpret):
    out = _light_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    rows = BandRows(values.shape, offsets)
    bands, dtype = rows.bands, values.dtype
    slots = _slots(filters[:, ::-1], bands.opposite)
    arrays = [rows.out(values), rows.out(cotangent), slots]
    block = block_sizes.rows(bands, len(arrays[0]), dtype, "light_backward", arrays=3, copies=2)
    grid = Grid(len(arrays[0]), block)
    sums = jax.ShapeDtypeStruct((grid.sums, *slots.shape), F32)
    d_values, d_filters = call(
        functools.partial(_backward_kernel, bands),
        bands, grid, rows.ids(segment_ids), arrays,
        [*(grid.row_block(x) for x in arrays[:2]), whole(slots)],
        outputs=[jax.ShapeDtypeStruct(arrays[0].shape, dtype), sums],
        output_specs=[grid.row_block(arrays[0]), grid.sum_block(sums)],
        scratch=windows.backward_scratch(bands, dtype),
        interpret=interpret,
    )  # fmt: skip
    reading = jnp.asarray(bands.opposite.placing(mirrored=True).T)
    d_filters = dot(d_filters.sum(axis=(0, 1)).reshape(1, -1), reading).reshape(filters.shape)
    return rows.back(d_values).reshape(values.shape), d_filters.astype(filters.dtype), None


_light_conv.defvjp(_forward, _backward)


def _slots(filters, bands):
    """Returns the filters in their slots in float32, [8, slot lanes], the same in all rows."""
    placed = dot(filters.astype(F32).reshape(1, -1), jnp.asarray(bands.placing()))
    return jnp.broadcast_to(placed, (SUBLANES, bands.slot_lanes))


def _everywhere(slots, vector, size):
    return jnp.broadcast_to(slots[:1, vector * LANES : (vector + 1) * LANES], (size, LANES))


def _forward_kernel(bands, ids, values, slots, out, copy):
    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        windows.copy_row(bands, values, r, ids.real(), copy)

        def window(start, size):
            visible = ids.visible(bands, start, size)
            filters = [only(visible, _everywhere(slots, v, size)) for v in range(bands.vectors)]
            windows.convolve(bands, filters, copy, start, size, out, r)

        windows.for_windows(bands, window)


def _backward_kernel(
    bands, ids, values, cotangent, slots, d_values, d_filters, backwards, copy, filters, gradients
):
    opposite = bands.opposite

    @pl.when(is_first_step())
    def _():
        d_filters[...] = jnp.zeros(d_filters.shape, F32)

    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        visible = ids.visible(opposite, 0, bands.length, sign=-1)
        for v in range(opposite.vectors):
            row = only(visible, _everywhere(slots, v, bands.length))
            windows.fill_edges(filters.at[v], row)
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, copy
        )
        for v in range(opposite.vectors):
            lanes = slice(v * LANES, (v + 1) * LANES)
            parts = gradients[v].reshape(-1, SUBLANES, LANES)
            d_filters[0, :, lanes] += parts.sum(axis=0)
