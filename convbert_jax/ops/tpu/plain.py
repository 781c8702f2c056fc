"""Dynamic convolution as Mosaic kernels for TPU: banded matrix products (see bands.py)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops import taps
from convbert_jax.ops.tpu import block_sizes, windows
from convbert_jax.ops.tpu.bands import LANES, tap_groups
from convbert_jax.ops.tpu.grid import Grid, call, whole
from convbert_jax.ops.tpu.rows import BandRows, in_pieces
from convbert_jax.ops.tpu.windows import only


def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.dynamic_conv`. `interpret` as in `pallas_call`: run without a TPU."""

    def kernel(values, filters, segment_ids):
        return _dynamic_conv(values, filters, segment_ids, offsets, interpret)

    # Filters too long for one band are split into several; the widest one limits the length.
    part = max((part for _, part in tap_groups(offsets)), key=len)
    bands = BandRows(values.shape, part).bands
    longest = block_sizes.longest(bands, values.dtype, arrays=5, copies=2)
    return in_pieces(kernel, (values, filters, segment_ids), (0, 1, 2), offsets, longest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dynamic_conv(values, filters, segment_ids, offsets, interpret):
    def one(values, filters, segment_ids, offsets):
        rows = BandRows(values.shape, offsets)
        out = _forward_call(
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
        read = taps.shifted(values, (base,))[0]
        total = total + one(read, filters[..., chosen], None, part).astype(jnp.float32)
    return total.astype(values.dtype)


def _forward(values, filters, segment_ids, offsets, interpret):
    out = _dynamic_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved

    def one(values, filters, segment_ids, offsets):
        rows = BandRows(values.shape, offsets)
        d_values, d_filters = _backward_call(
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
        read = taps.shifted(clean, (base,))[0]
        d_read, d_part = one(read, filters[..., chosen], None, part)
        d_values = d_values + taps.shifted(d_read, (-base,))[0].astype(jnp.float32)
        d_filters.append(d_part)
    d_filters = _visible(jnp.concatenate(d_filters, axis=-1), segment_ids, offsets)
    return d_values.astype(values.dtype), d_filters, None


_dynamic_conv.defvjp(_forward, _backward)


def _parts(groups):
    """Yields (base, offsets, slice of the taps) of each group."""
    first = 0
    for base, offsets in groups:
        yield base, offsets, slice(first, first + len(offsets))
        first += len(offsets)


def _visible(filters, segment_ids, offsets):
    if segment_ids is None:
        return filters
    allowed = jnp.stack(taps.visible(segment_ids, offsets), axis=-1)
    return jnp.where(allowed[:, :, None], filters, 0)


def _real(array, segment_ids):
    return array if segment_ids is None else jnp.where(segment_ids[..., None, None] != 0, array, 0)


# --- Kernels ---


def _forward_call(values, filters, segment_ids, bands, *, interpret):
    """Runs the forward kernel for one group of taps; heads are side by side in the channels."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_forward", arrays=2, copies=1)
    grid = Grid(len(values), rows)
    placing = jnp.asarray(bands.placing(), dtype)
    return call(
        functools.partial(_forward_kernel, bands),
        bands, grid, segment_ids, [values, filters, placing],
        [grid.row_block(values), grid.row_block(filters), whole(placing)],
        outputs=[jax.ShapeDtypeStruct(values.shape, dtype)],
        output_specs=[grid.row_block(values)],
        scratch=[windows.copies(bands, dtype), windows.slots(bands)],
        interpret=interpret,
    )[0]  # fmt: skip


def _forward_kernel(bands, ids, values, filters, placing, out, copy, slots):
    @pl.loop(0, values.shape[0])
    def _(r):
        ids.load(r)
        windows.copy_row(bands, values, r, ids.real(), copy)
        for v in range(bands.vectors):
            slots[v] = windows.dot(filters[r], placing[:, v * LANES : (v + 1) * LANES])

        def window(start, size):
            visible = ids.visible(bands, start, size)
            part = [only(visible, slots[v, pl.ds(start, size)]) for v in range(bands.vectors)]
            windows.convolve(bands, part, copy, start, size, out, r)

        windows.for_windows(bands, window)


def _backward_call(values, filters, segment_ids, cotangent, bands, *, interpret):
    """Runs the backward kernel; returns the cotangents of values and filters."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_backward", arrays=3, copies=2)
    grid = Grid(len(values), rows)
    placing = jnp.asarray(bands.opposite.placing(mirrored=True), dtype)
    d_values, d_filters = call(
        functools.partial(_backward_kernel, bands),
        bands, grid, segment_ids, [values, filters, cotangent, placing],
        [*map(grid.row_block, (values, filters, cotangent)), whole(placing)],
        outputs=[
            jax.ShapeDtypeStruct(values.shape, dtype),
            jax.ShapeDtypeStruct(filters.shape, dtype),
        ],
        output_specs=[grid.row_block(values), grid.row_block(filters)],
        scratch=windows.backward_scratch(bands, dtype),
        interpret=interpret,
    )  # fmt: skip
    return d_values, d_filters


def _backward_kernel(
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
            row = only(visible, windows.dot(filters[r], placing[:, part]))
            windows.fill_edges(slots.at[v], row)
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, slots, d_values, gradients, backwards, copy,
            keep=windows.only_by_bits,
        )  # fmt: skip
        total = 0.0
        for v, part in enumerate(lanes):
            given = gradients[v].astype(d_filters.dtype)
            total = total + windows.dot(given, placing[:, part], contract=(1, 1))
        d_filters[r] = total.astype(d_filters.dtype)
