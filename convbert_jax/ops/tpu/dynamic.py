"""Dynamic and light convolution as Mosaic kernels for TPU: banded matrix products (see layout.py).

In light convolution all positions have the same filters. They are moved into their slots once
instead of once per position, and their gradient is summed over the positions of a grid step on
chip.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops import xla
from convbert_jax.ops.tpu import banded, layout
from convbert_jax.ops.tpu.banded import Grid, call, is_first_step, whole
from convbert_jax.ops.tpu.layout import (
    F32,
    LANES,
    SUBLANES,
    BandRows,
    dot,
    fits,
    in_pieces,
    masked,
    masked_bitwise,
    tap_groups,
)


def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.dynamic_conv`. `interpret` as in `pallas_call`: run without a TPU."""

    def kernel(values, filters, segment_ids):
        return _dynamic_conv(values, filters, segment_ids, offsets, interpret)

    # Filters too long for one band are split into several; the widest one limits the length.
    part = max((part for _, part in tap_groups(offsets)), key=len)
    bands = BandRows(values.shape, part).bands
    longest = layout.longest(bands, values.dtype, arrays=5, copies=2)
    return in_pieces(kernel, (values, filters, segment_ids), (0, 1, 2), offsets, longest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dynamic_conv(values, filters, segment_ids, offsets, interpret):
    def one(values, filters, segment_ids, offsets):
        rows = BandRows(values.shape, offsets)
        out = _dynamic_forward_call(
            rows.out(values), rows.out(filters), rows.ids(segment_ids), rows.bands,
            interpret=interpret,
        )  # fmt: skip
        return rows.back(out).reshape(values.shape)

    groups = tap_groups(offsets)
    if len(groups) == 1 and groups[0][0] == 0:
        return one(values, filters, segment_ids, offsets)
    filters = _visible(filters, segment_ids, offsets)
    values = _real(values, segment_ids)
    total = 0.0
    for base, part, chosen in _parts(groups):
        read = xla.shift(values, (base,))[0]
        total = total + one(read, filters[..., chosen], None, part).astype(jnp.float32)
    return total.astype(values.dtype)


def _dynamic_forward(values, filters, segment_ids, offsets, interpret):
    out = _dynamic_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _dynamic_backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved

    def one(values, filters, segment_ids, offsets):
        rows = BandRows(values.shape, offsets)
        d_values, d_filters = _dynamic_backward_call(
            rows.out(values), rows.out(filters), rows.ids(segment_ids), rows.out(cotangent),
            rows.bands, interpret=interpret,
        )  # fmt: skip
        return rows.back(d_values).reshape(values.shape), rows.back(d_filters).reshape(
            filters.shape
        )

    groups = tap_groups(offsets)
    if len(groups) == 1 and groups[0][0] == 0:
        return *one(values, filters, segment_ids, offsets), None
    cotangent = _real(cotangent, segment_ids)
    filters = _visible(filters, segment_ids, offsets)
    clean = _real(values, segment_ids)
    d_values, d_filters = 0.0, []
    for base, part, chosen in _parts(groups):
        read = xla.shift(clean, (base,))[0]
        d_read, d_part = one(read, filters[..., chosen], None, part)
        d_values = d_values + xla.shift(d_read, (-base,))[0].astype(jnp.float32)
        d_filters.append(d_part)
    d_filters = _visible(jnp.concatenate(d_filters, axis=-1), segment_ids, offsets)
    return d_values.astype(values.dtype), d_filters, None


_dynamic_conv.defvjp(_dynamic_forward, _dynamic_backward)


def _parts(groups):
    """Yields (base, offsets, slice of the taps) of each group."""
    first = 0
    for base, offsets in groups:
        yield base, offsets, slice(first, first + len(offsets))
        first += len(offsets)


def _visible(filters, segment_ids, offsets):
    if segment_ids is None:
        return filters
    allowed = jnp.stack(xla.visible_taps(segment_ids, offsets), axis=-1)
    return jnp.where(allowed[:, :, None], filters, 0)


def _real(array, segment_ids):
    return array if segment_ids is None else jnp.where(segment_ids[..., None, None] != 0, array, 0)


def _dynamic_forward_call(values, filters, segment_ids, bands, *, interpret):
    """Runs the forward kernel for one group of taps; heads are side by side in the channels."""
    dtype = values.dtype
    rows = layout.rows_per_step(bands, len(values), dtype, "plain_forward", arrays=2, copies=1)
    grid = Grid(len(values), rows)
    placing = jnp.asarray(bands.placing(), dtype)
    return call(
        functools.partial(_dynamic_forward_kernel, bands),
        bands, grid, segment_ids, [values, filters, placing],
        [grid.row_block(values), grid.row_block(filters), whole(placing)],
        outputs=[jax.ShapeDtypeStruct(values.shape, dtype)],
        output_specs=[grid.row_block(values)],
        scratch=[banded.halo_scratch(bands, dtype), banded.slot_scratch(bands)],
        interpret=interpret,
    )[0]  # fmt: skip


def _dynamic_forward_kernel(bands, ids, values, filters, placing, out, copy, slots):
    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        banded.copy_row(bands, values, r, ids.real(), copy)
        for v in range(bands.vectors):
            slots[v] = dot(filters[r], placing[:, v * LANES : (v + 1) * LANES])

        def window(start, size):
            visible = ids.visible(bands, start, size)
            part = [masked(visible, slots[v, pl.ds(start, size)]) for v in range(bands.vectors)]
            banded.convolve(bands, part, copy, start, size, out, r)

        banded.for_windows(bands, window)


def _dynamic_backward_call(values, filters, segment_ids, cotangent, bands, *, interpret):
    """Runs the backward kernel; returns the cotangents of values and filters."""
    dtype = values.dtype
    rows = layout.rows_per_step(bands, len(values), dtype, "plain_backward", arrays=3, copies=2)
    grid = Grid(len(values), rows)
    placing = jnp.asarray(bands.opposite.placing(mirrored=True), dtype)
    d_values, d_filters = call(
        functools.partial(_dynamic_backward_kernel, bands),
        bands, grid, segment_ids, [values, filters, cotangent, placing],
        [*map(grid.row_block, (values, filters, cotangent)), whole(placing)],
        outputs=[
            jax.ShapeDtypeStruct(values.shape, dtype),
            jax.ShapeDtypeStruct(filters.shape, dtype),
        ],
        output_specs=[grid.row_block(values), grid.row_block(filters)],
        scratch=banded.backward_scratch(bands, dtype),
        interpret=interpret,
    )  # fmt: skip
    return d_values, d_filters


def _dynamic_backward_kernel(
    bands, ids, values, filters, cotangent, placing, d_values, d_filters,
    backwards, copy, slots, gradients,
):  # fmt: skip
    opposite = bands.opposite
    lanes = [slice(v * LANES, (v + 1) * LANES) for v in range(opposite.vectors)]

    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        visible = ids.visible(opposite, 0, bands.length, sign=-1)
        for v, part in enumerate(lanes):
            row = masked(visible, dot(filters[r], placing[:, part]))
            banded.fill_edges(slots.at[v], row)
        banded.gradients_of_row(
            bands, ids, r, values, cotangent, slots, d_values, gradients, backwards, copy,
            keep=masked_bitwise,
        )  # fmt: skip
        total = 0.0
        for v, part in enumerate(lanes):
            given = gradients[v].astype(d_filters.dtype)
            total = total + dot(given, placing[:, part], contract=(1, 1))
        d_filters[r] = total.astype(d_filters.dtype)


# --- Light convolution ---


FEWEST_TAPS = 9  # benchmarks/notes/tpu_kernels.md


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
    longest = layout.longest(bands, values.dtype, arrays=4, copies=2)
    return in_pieces(kernel, (values, filters, segment_ids), (0, 2), offsets, longest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _light_conv(values, filters, segment_ids, offsets, interpret):
    rows = BandRows(values.shape, offsets)
    bands, dtype = rows.bands, values.dtype
    arrays = [rows.out(values), _slots(filters, bands)]
    block = layout.rows_per_step(bands, len(arrays[0]), dtype, "light_forward", arrays=2, copies=1)
    grid = Grid(len(arrays[0]), block)
    out = call(
        functools.partial(_light_forward_kernel, bands),
        bands, grid, rows.ids(segment_ids), arrays, [grid.row_block(arrays[0]), whole(arrays[1])],
        outputs=[jax.ShapeDtypeStruct(arrays[0].shape, dtype)],
        output_specs=[grid.row_block(arrays[0])],
        scratch=[banded.halo_scratch(bands, dtype)],
        interpret=interpret,
    )[0]  # fmt: skip
    return rows.back(out).reshape(values.shape)


def _light_forward(values, filters, segment_ids, offsets, interpret):
    out = _light_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _light_backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    rows = BandRows(values.shape, offsets)
    bands, dtype = rows.bands, values.dtype
    slots = _slots(filters[:, ::-1], bands.opposite)
    arrays = [rows.out(values), rows.out(cotangent), slots]
    block = layout.rows_per_step(bands, len(arrays[0]), dtype, "light_backward", arrays=3, copies=2)
    grid = Grid(len(arrays[0]), block)
    sums = jax.ShapeDtypeStruct((grid.sums, *slots.shape), F32)
    d_values, d_filters = call(
        functools.partial(_light_backward_kernel, bands),
        bands, grid, rows.ids(segment_ids), arrays,
        [*(grid.row_block(x) for x in arrays[:2]), whole(slots)],
        outputs=[jax.ShapeDtypeStruct(arrays[0].shape, dtype), sums],
        output_specs=[grid.row_block(arrays[0]), grid.sum_block(sums)],
        scratch=banded.backward_scratch(bands, dtype),
        interpret=interpret,
    )  # fmt: skip
    reading = jnp.asarray(bands.opposite.placing(mirrored=True).T)
    d_filters = dot(d_filters.sum(axis=(0, 1)).reshape(1, -1), reading).reshape(filters.shape)
    return rows.back(d_values).reshape(values.shape), d_filters.astype(filters.dtype), None


_light_conv.defvjp(_light_forward, _light_backward)


def _slots(filters, bands):
    """Returns the filters in their slots in float32, [8, slot lanes], the same in all rows."""
    placed = dot(filters.astype(F32).reshape(1, -1), jnp.asarray(bands.placing()))
    return jnp.broadcast_to(placed, (SUBLANES, bands.slot_lanes))


def _everywhere(slots, vector, size):
    return jnp.broadcast_to(slots[:1, vector * LANES : (vector + 1) * LANES], (size, LANES))


def _light_forward_kernel(bands, ids, values, slots, out, copy):
    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        banded.copy_row(bands, values, r, ids.real(), copy)

        def window(start, size):
            visible = ids.visible(bands, start, size)
            filters = [masked(visible, _everywhere(slots, v, size)) for v in range(bands.vectors)]
            banded.convolve(bands, filters, copy, start, size, out, r)

        banded.for_windows(bands, window)


def _light_backward_kernel(
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
            row = masked(visible, _everywhere(slots, v, bands.length))
            banded.fill_edges(filters.at[v], row)
        banded.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, copy
        )
        for v in range(opposite.vectors):
            lanes = slice(v * LANES, (v + 1) * LANES)
            parts = gradients[v].reshape(-1, SUBLANES, LANES)
            d_filters[0, :, lanes] += parts.sum(axis=0)
