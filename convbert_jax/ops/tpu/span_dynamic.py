"""Span-based dynamic convolution as one Mosaic kernel for TPU: filters never reach HBM.

If the span key is None, the filters depend on the query alone. If values is None, the query is
convolved, and read only once.

The forward pass computes logits, softmax over the taps and the banded products of banded.py on
rows in VMEM. The backward pass recomputes the filters from the inputs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops import xla
from convbert_jax.ops.tpu import banded, dynamic, layout
from convbert_jax.ops.tpu.banded import Grid, call, is_first_step, whole
from convbert_jax.ops.tpu.layout import (
    F32,
    LANES,
    SUBLANES,
    BandRows,
    Bands,
    dot,
    in_pieces,
    masked,
    tap_groups,
)

# Limit of the centered logits, so that exp stays finite.
LARGEST_POWER = 80.0
NOTHING = -1e30  # logit of a lane without a tap


def span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret=False
):
    """Computes `reference.span_dynamic_conv`; span_key and values may be None.

    For filters too long for one band, XLA computes logits and softmax. `interpret` as in
    `pallas_call`: run without a TPU.
    """
    arrays = (query, span_key, values, projection, bias, segment_ids)
    if len(tap_groups(offsets)) > 1:
        return _by_parts(*arrays, heads, offsets, interpret)

    def kernel(*arrays):
        return _span_dynamic_conv(*arrays, heads, offsets, interpret)

    batch, length, channels = query.shape
    bands = BandRows((batch, length, heads, channels // heads), offsets).bands
    of_gradients = 1 + 2 * sum(x is not None for x in arrays[:3])  # inputs, gradients, cotangent
    # The projection, its copy in slots, and its double-buffered float32 gradient. `position` counts
    # the filters before masking.
    parameters = bands.slot_lanes * channels * (2 * 4 + 3 * query.dtype.itemsize)
    longest = layout.longest(
        bands,
        query.dtype,
        arrays=of_gradients,
        copies=2,
        position=4 * bands.slot_lanes,
        fixed=parameters,
    )
    return in_pieces(kernel, arrays, (0, 1, 2, 5), offsets, longest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret
):
    batch, length, channels = query.shape
    rows = BandRows((batch, length, heads, channels // heads), offsets)
    out = _forward_call(
        rows.out(query), _out(rows, span_key), _out(rows, values), projection, bias,
        rows.ids(segment_ids), rows.bands, interpret=interpret,
    )  # fmt: skip
    return rows.back(out)


def _forward(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    saved = query, span_key, values, projection, bias, segment_ids
    return _span_dynamic_conv(*saved, heads, offsets, interpret), saved


def _backward(heads, offsets, interpret, saved, cotangent):
    query, span_key, values, projection, bias, segment_ids = saved
    batch, length, channels = query.shape
    rows = BandRows((batch, length, heads, channels // heads), offsets)
    *gradients, d_projection, d_bias = _backward_call(
        rows.out(query), _out(rows, span_key), _out(rows, values), projection, bias,
        rows.ids(segment_ids), rows.out(cotangent), rows.bands, interpret=interpret,
    )  # fmt: skip
    gradients = map(rows.back, gradients)
    d_arrays = [None if x is None else next(gradients) for x in (query, span_key, values)]
    return *d_arrays, d_projection, d_bias, None


_span_dynamic_conv.defvjp(_forward, _backward)


def _out(rows, array):
    return None if array is None else rows.out(array)


def _by_parts(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    filters = xla.span_filters(query, span_key, projection, bias, heads, query.dtype)
    by_head = (query if values is None else values).reshape(*query.shape[:2], heads, -1)
    out = dynamic.dynamic_conv(by_head, filters, segment_ids, offsets, interpret)
    return out.reshape(query.shape)


def _forward_call(query, span_key, values, projection, bias, segment_ids, bands, *, interpret):
    """Runs the forward kernel; heads are side by side in the channels."""
    dtype = query.dtype
    arrays = [x for x in (query, span_key, values) if x is not None]
    rows = layout.rows_per_step(
        bands, len(query), dtype, "span_forward", arrays=len(arrays) + 1, copies=1
    )
    grid = Grid(len(query), rows)
    constants = _constants(projection, bias, bands, dtype, mirrored=False)
    kernel = functools.partial(_forward_kernel, bands)
    return call(
        _of_all(kernel, span_key, values, [0]),
        bands, grid, segment_ids, [*arrays, *constants],
        [*map(grid.row_block, arrays), *map(whole, constants)],
        outputs=[jax.ShapeDtypeStruct(query.shape, dtype)],
        output_specs=[grid.row_block(query)],
        scratch=[
            banded.halo_scratch(bands, dtype), banded.slot_scratch(bands), *_placed(bands, dtype),
        ],
        interpret=interpret,
    )[0]  # fmt: skip


def _of_all(kernel, span_key, values, queries):
    """Wraps `kernel`, which takes query, span key and values, for a call without some of them.

    A missing span key becomes None; missing values become the reference of the query.

    Args:
      queries: indices of the query and, in a backward kernel, of its gradient.
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
    bands, ids, query, span_key, values, projection, bias, placing, same_slot, out,
    copy, filters, placed, levels,
):  # fmt: skip
    @pl.when(is_first_step())
    def _():
        _place(bands, projection, bias, placing, same_slot, placed, levels)

    @pl.loop(0, query.shape[0])
    def _(r):
        ids.load(r)
        banded.copy_row(bands, values, r, ids.real(), copy)
        products = _products(query, span_key, r)
        for v in range(bands.vectors):
            filters[v] = _softmax(products, placed[v], levels[v, :1], same_slot)

        def window(start, size):
            visible = ids.visible(bands, start, size)
            part = [masked(visible, filters[v, pl.ds(start, size)]) for v in range(bands.vectors)]
            banded.convolve(bands, part, copy, start, size, out, r)

        banded.for_windows(bands, window)


def _place(bands, projection, bias, placing, same_slot, placed, levels) -> None:
    """Moves projection and bias into slots and subtracts the mean of each slot.

    A softmax does not change if a constant is subtracted from all logits of a head. Subtracting
    their maximum would cost rotations; their mean is linear, so it is removed in advance.
    """
    taps, dtype = len(bands.offsets), placed.dtype
    same = same_slot[...].astype(F32)
    for v in range(bands.vectors):
        lanes = placing[:, v * LANES : (v + 1) * LANES]
        part = dot(projection[...], lanes.astype(dtype))
        placed[v] = (part - dot(part, same) / taps).astype(dtype)
        level = dot(bias[...].astype(F32), lanes)
        level = jnp.broadcast_to(level - dot(level, same) / taps, (SUBLANES, LANES))
        used = jnp.sum(lanes, axis=0, keepdims=True) > 0
        levels[v] = jnp.where(used, level, NOTHING)


def _softmax(products, projection, level, same_slot):
    """Returns the filters [L, 128] in their slots, 0 in unused lanes."""
    logits = dot(products, projection) + level
    powers = jnp.exp(jnp.minimum(logits, LARGEST_POWER))
    total = dot(powers.astype(products.dtype), same_slot[...])
    return powers / jnp.maximum(total, jnp.finfo(F32).tiny)


def _backward_call(
    query, span_key, values, projection, bias, segment_ids, cotangent, bands, *, interpret
):
    """Runs the backward kernel.

    Returns:
      Cotangents of query, of span_key and values unless None, of projection and bias.
    """
    dtype, opposite = query.dtype, bands.opposite
    given = [x for x in (query, span_key, values) if x is not None]
    rows = layout.rows_per_step(
        bands, len(query), dtype, "span_backward", arrays=2 * len(given) + 1, copies=2
    )
    grid = Grid(len(query), rows)
    constants = _constants(projection, bias, opposite, dtype, mirrored=True)
    like = jax.ShapeDtypeStruct(query.shape, dtype)
    sums = [
        jax.ShapeDtypeStruct((grid.sums, opposite.slot_lanes, bands.channels), F32),
        jax.ShapeDtypeStruct((grid.sums, opposite.vectors, SUBLANES, LANES), F32),
    ]
    arrays = [*given, cotangent]
    kernel = functools.partial(_backward_kernel, bands)
    *gradients, d_projection, d_bias = call(
        _of_all(kernel, span_key, values, [0, 8]),
        bands, grid, segment_ids, [*arrays, *constants],
        [*map(grid.row_block, arrays), *map(whole, constants)],
        outputs=[*[like] * len(given), *sums],
        output_specs=[grid.row_block(query)] * len(given) + [grid.sum_block(x) for x in sums],
        scratch=[
            *banded.backward_scratch(bands, dtype),
            banded.slot_scratch(opposite),
            *_placed(opposite, dtype),
        ],
        interpret=interpret,
    )  # fmt: skip
    reading = jnp.asarray(opposite.placing(mirrored=True))
    d_projection = dot(d_projection.sum(axis=0), reading, contract=(0, 1)).astype(projection.dtype)
    d_bias = dot(d_bias.sum(axis=(0, 2)).reshape(1, -1), reading, contract=(1, 1))[0]
    return *gradients, d_projection, d_bias.astype(bias.dtype)


def _backward_kernel(
    bands, ids, query, span_key, values, cotangent, projection, bias, placing, same_slot,
    d_query, d_span_key, d_values, d_projection, d_bias,
    backwards, copy, filters, gradients, normalized, placed, levels,
):  # fmt: skip
    dtype, opposite = d_values.dtype, bands.opposite
    vectors = [(v, slice(v * LANES, (v + 1) * LANES)) for v in range(opposite.vectors)]

    @pl.when(is_first_step())
    def _():
        _place(opposite, projection, bias, placing, same_slot, placed, levels)
        d_projection[...] = jnp.zeros(d_projection.shape, F32)
        d_bias[...] = jnp.zeros(d_bias.shape, F32)

    @pl.loop(0, query.shape[0])
    def _(r):
        ids.load(r)
        real, visible = ids.real(), ids.visible(opposite, 0, bands.length, sign=-1)
        products = _products(query, span_key, r)
        for v, _ in vectors:
            normalized[v] = masked(real, _softmax(products, placed[v], levels[v, :1], same_slot))
            banded.fill_edges(filters.at[v], masked(visible, normalized[v]))
        banded.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, copy
        )
        d_logits = []
        for v, _ in vectors:
            shares = normalized[v] * gradients[v]
            along = dot(shares.astype(dtype), same_slot[...])
            part = shares - normalized[v] * along
            d_bias[0, v] += part.reshape(-1, SUBLANES, LANES).sum(axis=0)
            d_logits.append((part.astype(dtype), part.T.astype(dtype)))
        for begin in range(0, bands.channels, LANES):
            block = slice(begin, min(begin + LANES, bands.channels))
            _gradients_of_products(
                real, r, block, vectors, d_logits, placed,
                query, span_key, d_query, d_span_key, d_values, d_projection,
            )  # fmt: skip


def _gradients_of_products(
    real, r, block, vectors, d_logits, placed,
    query, span_key, d_query, d_span_key, d_values, d_projection,
):  # fmt: skip
    """Writes the gradients of a block of channels, given the gradients of the logits."""
    dtype = d_query.dtype
    asked = query[r, :, block].astype(F32)
    real = None if real is None else real[:, : asked.shape[1]]
    asked = masked(real, asked)
    d_products = sum(
        dot(part, placed[v, block], contract=(1, 1))
        for (v, _), (part, _) in zip(vectors, d_logits, strict=True)
    )
    products = asked
    if span_key is not None:
        key = masked(real, span_key[r, :, block].astype(F32))
        products = asked * key
        d_span_key[r, :, block] = (d_products * asked).astype(dtype)
        d_products = d_products * key
    if d_query is d_values:
        d_products += d_values[r, :, block].astype(F32)
    d_query[r, :, block] = d_products.astype(dtype)
    products = products.astype(dtype)
    for (_, lanes), (_, turned) in zip(vectors, d_logits, strict=True):
        d_projection[0, lanes, block] += dot(turned, products)


def _products(query, span_key, r):
    if span_key is None:
        return query[r]
    exact = query[r].astype(F32) * span_key[r].astype(F32)
    return exact.astype(query.dtype)


def _constants(projection, bias, bands: Bands, dtype, *, mirrored):
    """Returns the constant kernel inputs: projection, bias, `placing` and `same_slot` matrices.

    The projection is rounded here: the compiler's static profiler fails on kernels that round it
    before the product.
    """
    placing = jnp.asarray(bands.placing(mirrored=mirrored))
    projection = projection.astype(dtype)
    return [projection, bias.reshape(1, -1), placing, jnp.asarray(bands.same_slot(), dtype)]


def _placed(bands: Bands, dtype):
    """Returns the scratch memory for the results of `_place`."""
    return [
        pltpu.VMEM((bands.vectors, bands.channels, LANES), dtype),
        pltpu.VMEM((bands.vectors, SUBLANES, LANES), F32),
    ]
