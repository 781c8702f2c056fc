"""The dynamic convolution as Mosaic kernels for TPU: banded matrix products (see bands.py)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops import taps
from convbert_jax.ops.tpu import block_sizes, windows
from convbert_jax.ops.tpu.bands import tap_groups
from convbert_jax.ops.tpu.rows import BandRows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """`interpret` as in `pallas_call`: run without a TPU."""

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
    out = dynamic_conv(values, filters, segment_ids, offsets, interpret)
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


dynamic_conv.defvjp(_forward, _backward)


def _parts(groups):
    """(base, offsets, slice of the taps) of each group."""
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
    """The convolution of one group of taps, heads side by side."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_forward", arrays=2, copies=1)
    row = functools.partial(windows.row_block, rows)
    placing = jnp.asarray(bands.placing(), dtype)
    return windows.call(
        functools.partial(_forward_kernel, bands, rows),
        bands, segment_ids, [values, filters, placing],
        [row(values), row(filters), windows.whole(placing)],
        outputs=[jax.ShapeDtypeStruct(values.shape, dtype)],
        output_specs=[row(values)],
        scratch=[windows.copies(bands, dtype), windows.slots(bands)],
        rows=rows,
        interpret=interpret,
    )[0]  # fmt: skip


def _forward_kernel(bands, rows, ids, values, filters, placing, out, apart, in_slots):
    @pl.loop(0, rows)
    def _(r):
        ids.load(r)
        windows.keep_apart(bands, values[r], ids.real(), apart)
        in_slots[...] = windows.dot(filters[r], placing[...])

        def window(start, size):
            mask = ids.mask(start, size, bands.offsets)
            windows.convolve(bands, in_slots[pl.ds(start, size)], mask, apart, start, size, out, r)

        windows.for_windows(bands, window)


def _backward_call(values, filters, segment_ids, cotangent, bands, *, interpret):
    """Cotangents of values and filters."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_backward", arrays=3, copies=2)
    row = functools.partial(windows.row_block, rows)
    placing = jnp.asarray(bands.placing(mirrored=True), dtype)
    d_values, d_filters = windows.call(
        functools.partial(_backward_kernel, bands, rows),
        bands, segment_ids, [values, filters, cotangent, placing],
        [row(values), row(filters), row(cotangent), windows.whole(placing)],
        outputs=[
            jax.ShapeDtypeStruct(values.shape, dtype),
            jax.ShapeDtypeStruct(filters.shape, dtype),
        ],
        output_specs=[row(values), row(filters)],
        scratch=windows.backward_scratch(bands, dtype),
        rows=rows,
        interpret=interpret,
    )  # fmt: skip
    return d_values, d_filters


def _backward_kernel(
    bands, rows, ids, values, filters, cotangent, placing, d_values, d_filters,
    backwards, apart, in_slots, gradients,
):  # fmt: skip
    @pl.loop(0, rows)
    def _(r):
        windows.fill_halo(bands, in_slots, windows.dot(filters[r], placing[...]))
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, in_slots, d_values, gradients, backwards, apart
        )
        d_filters[r] = windows.dot(
            gradients[...].astype(d_filters.dtype), placing[...], contract=(1, 1)
        ).astype(d_filters.dtype)
