"""Span-based dynamic convolution as one Mosaic kernel for TPU: filters never reach HBM.

Without a span key the same kernels make the filters of the query alone: there is None in its place.
Without values they sum the query, which is then read once.
Forward: logits, softmax over the taps and the banded products of windows.py on rows that
are already on the chip. Backward: the same filters are computed again from the inputs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops import xla
from convbert_jax.ops.tpu import block_sizes, plain, windows
from convbert_jax.ops.tpu.bands import LANES, Bands, tap_groups
from convbert_jax.ops.tpu.rows import BandRows
from convbert_jax.ops.tpu.windows import F32, dot, row_block, whole

# exp stays finite: no tap is weighed more than e^80 times the mean of its head.
LARGEST_POWER = 80.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret=False
):
    """Filters too long for one band take their logits and softmax from XLA."""
    batch, length, channels = query.shape
    if len(tap_groups(offsets)) > 1:
        arrays = (query, span_key, values, projection, bias)
        return _by_parts(*arrays, segment_ids, heads, offsets, interpret)
    rows = BandRows((batch, length, heads, channels // heads), offsets)
    out = _forward_call(
        rows.out(query), _out(rows, span_key), _out(rows, values), projection, bias,
        rows.ids(segment_ids), rows.bands, interpret=interpret,
    )  # fmt: skip
    return rows.back(out)


def _forward(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    saved = query, span_key, values, projection, bias, segment_ids
    return span_dynamic_conv(*saved, heads, offsets, interpret), saved


def _backward(heads, offsets, interpret, saved, cotangent):
    query, span_key, values, projection, bias, segment_ids = saved
    batch, length, channels = query.shape
    if len(tap_groups(offsets)) > 1:

        def by_parts(*arrays):
            return _by_parts(*arrays, segment_ids, heads, offsets, interpret)

        return *jax.vjp(by_parts, *saved[:5])[1](cotangent), None
    rows = BandRows((batch, length, heads, channels // heads), offsets)
    *gradients, d_projection, d_bias = _backward_call(
        rows.out(query), _out(rows, span_key), _out(rows, values), projection, bias,
        rows.ids(segment_ids), rows.out(cotangent), rows.bands, interpret=interpret,
    )  # fmt: skip
    gradients = map(rows.back, gradients)
    d_arrays = [None if x is None else next(gradients) for x in (query, span_key, values)]
    return *d_arrays, d_projection, d_bias, None


span_dynamic_conv.defvjp(_forward, _backward)


def _out(rows, array):
    return None if array is None else rows.out(array)


def _by_parts(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    filters = xla.span_filters(query, span_key, projection, bias, heads, query.dtype)
    by_head = (query if values is None else values).reshape(*query.shape[:2], heads, -1)
    out = plain.dynamic_conv(by_head, filters, segment_ids, offsets, interpret)
    return out.reshape(query.shape)


# --- Kernels ---


def _forward_call(query, span_key, values, projection, bias, segment_ids, bands, *, interpret):
    """The whole op, heads side by side."""
    dtype = query.dtype
    arrays = [x for x in (query, span_key, values) if x is not None]
    rows = block_sizes.rows(
        bands, len(query), dtype, "span_forward", arrays=len(arrays) + 1, copies=1
    )
    constants = _constants(projection, bias, bands, dtype, mirrored=False)
    kernel = functools.partial(_forward_kernel, bands, rows)
    return windows.call(
        _of_all(kernel, span_key, values, [0]),
        bands, segment_ids, [*arrays, *constants],
        [*(row_block(rows, x) for x in arrays), *map(whole, constants)],
        outputs=[jax.ShapeDtypeStruct(query.shape, dtype)],
        output_specs=[row_block(rows, query)],
        scratch=[windows.copies(bands, dtype), windows.slots(bands)],
        rows=rows,
        interpret=interpret,
    )[0]  # fmt: skip


def _of_all(kernel, span_key, values, queries):
    """`kernel`, which takes query, span key and values, of what there is of them: without a span
    key None, without values the reference of the query once more.

    Args:
      queries: places of the query and, in a backward kernel, of its gradient.
    """

    def body(ids, *references):
        references = list(references)
        for place in queries:
            if span_key is None:
                references.insert(place + 1, None)
            if values is None:
                references.insert(place + 2, references[place])
        kernel(ids, *references)

    return body


def _forward_kernel(
    bands, rows, ids, query, span_key, values, projection, bias, same_slot, out, apart, filters
):
    @pl.loop(0, rows)
    def _(r):
        ids.load(r)
        windows.keep_apart(bands, values[r], ids.real(), apart)
        filters[...] = _softmax(_products(query, span_key, r), projection, bias, same_slot, bands)

        def window(start, size):
            mask = ids.mask(start, size, bands.offsets)
            part = filters[pl.ds(start, size)]
            windows.convolve(bands, part, mask, apart, start, size, out, r)

        windows.for_windows(bands, window)


def _softmax(products, projection, bias, same_slot, bands):
    """[L, slot lanes] filters in their slots, 0 in unused lanes.

    Any number that is the same for all taps of a head may be taken off its logits; their mean
    costs one product where the largest would cost rotations.
    """
    level, used = bias[:1], bias[1:]
    logits = dot(products, projection[...]) + level
    mean = dot(logits.astype(products.dtype), same_slot[...]) / len(bands.offsets)
    powers = jnp.exp(jnp.minimum(logits - mean, LARGEST_POWER)) * used
    total = jnp.maximum(dot(powers.astype(products.dtype), same_slot[...]), jnp.finfo(F32).tiny)
    return powers / total


def _backward_call(
    query, span_key, values, projection, bias, segment_ids, cotangent, bands, *, interpret
):
    """Cotangents of query, of span_key and values if there are any, of projection and bias."""
    dtype = query.dtype
    given = [x for x in (query, span_key, values) if x is not None]
    rows = block_sizes.rows(
        bands, len(query), dtype, "span_backward", arrays=2 * len(given) + 1, copies=2
    )
    steps = len(query) // rows
    lanes = bands.slot_lanes
    constants = _constants(projection, bias, bands, dtype, mirrored=True)
    like = jax.ShapeDtypeStruct(query.shape, dtype)
    # Each step sums over its own positions, so that steps may run on two cores.
    sums = [
        jax.ShapeDtypeStruct((steps, bands.channels, lanes), F32),
        jax.ShapeDtypeStruct((steps, 1, lanes), F32),
    ]
    arrays = [*given, cotangent]
    kernel = functools.partial(_backward_kernel, bands, rows)
    *gradients, d_projection, d_bias = windows.call(
        _of_all(kernel, span_key, values, [0, 7]),
        bands, segment_ids, [*arrays, *constants],
        [*(row_block(rows, x) for x in arrays), *map(whole, constants)],
        outputs=[*[like] * len(given), *sums],
        output_specs=[row_block(rows, query)] * len(given)
        + [row_block(1, shape) for shape in sums],
        scratch=windows.backward_scratch(bands, dtype),
        rows=rows,
        interpret=interpret,
    )  # fmt: skip
    reading = jnp.asarray(bands.placing(mirrored=True).T)
    d_projection = dot(d_projection.sum(axis=0), reading).astype(projection.dtype)
    d_bias = dot(d_bias.sum(axis=0), reading)[0].astype(bias.dtype)
    return *gradients, d_projection, d_bias


def _backward_kernel(
    bands, rows, ids, query, span_key, values, cotangent, projection, bias, same_slot,
    d_query, d_span_key, d_values, d_projection, d_bias, backwards, apart, filters, gradients,
):  # fmt: skip
    dtype = d_values.dtype
    inside = slice(bands.halo, bands.halo + bands.length)
    d_projection[...] = jnp.zeros(d_projection.shape, F32)
    d_bias[...] = jnp.zeros(d_bias.shape, F32)

    @pl.loop(0, rows)
    def _(r):
        products = _products(query, span_key, r)
        fill = _softmax(products, projection, bias, same_slot, bands)
        windows.fill_halo(bands, filters, fill)
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, apart
        )
        shares = filters[inside] * gradients[...]
        along = dot(shares.astype(dtype), same_slot[...])
        real = ids.real()
        d_logits = _only(real, shares - filters[inside] * along)
        d_bias[0] += d_logits.sum(axis=0, keepdims=True)
        d_logits = d_logits.astype(dtype)
        d_products = dot(d_logits, projection[...], contract=(1, 1))
        if span_key is not None:
            d_span_key[r] = _only(real, d_products * query[r].astype(F32)).astype(dtype)
            d_products *= span_key[r].astype(F32)
        d_products = _only(real, d_products)
        if d_query is d_values:
            d_products += d_values[r].astype(F32)
        d_query[r] = d_products.astype(dtype)
        products = _only(real, _products(query, span_key, r).astype(F32)).astype(dtype)
        d_projection[0] += dot(products, d_logits, contract=(0, 0))


def _products(query, span_key, r):
    if span_key is None:
        return query[r]
    exact = query[r].astype(F32) * span_key[r].astype(F32)
    return exact.astype(query.dtype)


def _only(real, x):
    """x where the row is no padding, else 0."""
    if real is None:
        return x
    # Selected, so that NaN is gone, and multiplied: the compiler fails on products of selections.
    parts = []
    for lane in range(0, x.shape[1], LANES):
        part = x[:, lane : lane + LANES]
        own = real[:, : part.shape[1]]
        parts.append(jnp.where(own, part, 0.0) * own.astype(F32))
    return jnp.concatenate(parts, axis=1)


def _constants(projection, bias, bands: Bands, dtype, *, mirrored):
    """Projection in slots; [2, slot lanes] bias, 1 in lanes used; the sum of a slot."""
    placing = bands.placing(mirrored=mirrored)
    slots = dot(projection.astype(dtype), jnp.asarray(placing, dtype)).astype(dtype)
    level = dot(bias.astype(F32)[None], jnp.asarray(placing))
    levels = jnp.concatenate([level, jnp.asarray(placing.max(axis=0, keepdims=True))])
    return [slots, levels, jnp.asarray(bands.same_slot(mirrored=mirrored), dtype)]
