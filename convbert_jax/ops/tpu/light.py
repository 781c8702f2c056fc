"""Light convolution as Mosaic kernels for TPU: the bands of bands.py, the same at all positions.

The filters of a head are put into its slot once, not read for each position; their gradient is
summed over the positions of a grid step on the chip.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops.tpu import block_sizes, windows
from convbert_jax.ops.tpu.bands import LARGEST_REACH, SUBLANES
from convbert_jax.ops.tpu.rows import BandRows
from convbert_jax.ops.tpu.windows import F32, dot, row_block, whole

FEWEST_TAPS = 9  # of benchmarks/RESULTS.md, section 5


def light_suits(offsets: tuple[int, ...]) -> bool:
    """Whether the taps fit into one band, and are so many that it is cheaper than the depthwise
    kernel, whose work grows with them.
    """
    return len(offsets) >= FEWEST_TAPS and max(map(abs, offsets)) <= LARGEST_REACH


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def light_conv(values, filters, segment_ids, offsets, interpret=False):
    """values [B, L, H, D], filters [H, K]; taps of one band. `interpret` as in `pallas_call`."""
    rows = BandRows(values.shape, offsets)
    dtype = values.dtype
    values_together = rows.out(values)
    arrays = [values_together, _slots(filters, rows.bands, mirrored=False)]
    block = block_sizes.rows(
        rows.bands, len(values_together), dtype, "light_forward", arrays=2, copies=1
    )
    out = windows.call(
        functools.partial(_forward_kernel, rows.bands, block),
        rows.bands, rows.ids(segment_ids), arrays,
        [row_block(block, values_together), whole(arrays[1])],
        outputs=[jax.ShapeDtypeStruct(values_together.shape, dtype)],
        output_specs=[row_block(block, values_together)],
        scratch=[windows.copies(rows.bands, dtype)],
        rows=block,
        interpret=interpret,
    )[0]  # fmt: skip
    return rows.back(out).reshape(values.shape)


def _forward(values, filters, segment_ids, offsets, interpret):
    out = light_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    rows = BandRows(values.shape, offsets)
    bands, dtype = rows.bands, values.dtype
    arrays = [rows.out(values), rows.out(cotangent), _slots(filters, bands, mirrored=True)]
    block = block_sizes.rows(bands, len(arrays[0]), dtype, "light_backward", arrays=3, copies=2)
    # Each step sums over its own positions, so that steps may run on two cores.
    sums = jax.ShapeDtypeStruct((len(arrays[0]) // block, 1, bands.slot_lanes), F32)
    d_values, d_filters = windows.call(
        functools.partial(_backward_kernel, bands, block),
        bands, rows.ids(segment_ids), arrays,
        [*(row_block(block, x) for x in arrays[:2]), whole(arrays[2])],
        outputs=[jax.ShapeDtypeStruct(arrays[0].shape, dtype), sums],
        output_specs=[row_block(block, arrays[0]), row_block(1, sums)],
        scratch=windows.backward_scratch(bands, dtype),
        rows=block,
        interpret=interpret,
    )  # fmt: skip
    reading = jnp.asarray(bands.placing(mirrored=True).T)
    d_filters = dot(d_filters.sum(axis=0), reading).reshape(filters.shape)
    return rows.back(d_values).reshape(values.shape), d_filters.astype(filters.dtype), None


light_conv.defvjp(_forward, _backward)


def _slots(filters, bands, *, mirrored):
    """[8, slot lanes] in float32 the filters in their slots, the same in each row."""
    placed = dot(filters.astype(F32).reshape(1, -1), jnp.asarray(bands.placing(mirrored=mirrored)))
    return jnp.broadcast_to(placed, (SUBLANES, bands.slot_lanes))


def _forward_kernel(bands, rows, ids, values, slots, out, apart):
    @pl.loop(0, rows)
    def _(r):
        ids.load(r)
        windows.keep_apart(bands, values[r], ids.real(), apart)

        def window(start, size):
            mask = ids.mask(start, size, bands.offsets)
            filters = jnp.broadcast_to(slots[:1], (size, bands.slot_lanes))
            windows.convolve(bands, filters, mask, apart, start, size, out, r)

        windows.for_windows(bands, window)


def _backward_kernel(
    bands, rows, ids, values, cotangent, slots, d_values, d_filters,
    backwards, apart, filters, gradients,
):  # fmt: skip
    d_filters[...] = jnp.zeros(d_filters.shape, F32)
    filters[...] = jnp.broadcast_to(slots[:1], filters.shape)

    @pl.loop(0, rows)
    def _(r):
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, apart
        )
        d_filters[0] += gradients[...].sum(axis=0, keepdims=True)
