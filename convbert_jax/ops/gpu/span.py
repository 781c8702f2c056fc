"""Span-based dynamic convolution for GPUs: one kernel forward, three backward.

Without a span key, None everywhere, the same kernels make the filters of the query alone.

Built from the parts of triton.py, which alone knows the backend, and of plain.py.
"""

import functools
import math

import jax
import jax.numpy as jnp

from convbert_jax.ops.gpu import plain, triton

CHUNK = 64  # channels of one step of a product
WARPS = 8  # with 4, ptxas runs out of registers for sm_90
# Sums of the projection's gradient over positions are split over so many programs per chunk.
SPLITS = 64
# A program of that gradient holds so many sums; more would spill registers.
MOST_SUMS = 64 * 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret=False
):
    """The backward pass computes the filters again. `interpret`: without a GPU."""
    _, length, channels = values.shape
    body = functools.partial(
        _span_forward_kernel, heads=heads, offsets=offsets, length=length, channels=channels
    )
    return triton.call(
        body,
        triton.blocks(values),
        [query, span_key, values, projection, bias],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
        WARPS,
    )


def _forward(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    arrays = (query, span_key, values, projection, bias, segment_ids)
    return span_dynamic_conv(*arrays, heads, offsets, interpret), arrays


def _backward(heads, offsets, interpret, saved, cotangent):
    """Three kernels: filters again and the logits' gradient; the values'; what made the logits.

    The filters go through memory here, in the dtype of the values: K / D of one more array, for the
    gradient of a position's value needs the filters of its neighbors.
    """
    query, span_key, values, projection, bias, segment_ids = saved
    batch, length, channels = values.shape
    width, outputs = channels // heads, heads * len(offsets)
    blocks = triton.blocks(values)
    size = {"heads": heads, "offsets": offsets, "length": length, "channels": channels}
    filters, d_logits = triton.call(
        functools.partial(_span_logits_kernel, **size),
        blocks,
        [query, span_key, values, projection, bias, cotangent],
        segment_ids,
        [jax.ShapeDtypeStruct((batch, length, outputs), values.dtype)] * 2,
        interpret,
        WARPS,
    )
    by_head = (batch, length, heads, -1)
    d_values = triton.call(
        functools.partial(plain.values_kernel, offsets=offsets, length=length, width=width),
        (*blocks, heads),
        [filters.reshape(by_head), cotangent.reshape(by_head)],
        segment_ids,
        jax.ShapeDtypeStruct((batch, length, heads, width), values.dtype),
        interpret,
    )
    rows = batch * length
    columns = triton.power_of_two(max(triton.TENSOR_CORE, outputs))
    chunk = max(triton.TENSOR_CORE, min(CHUNK, MOST_SUMS // columns))
    splits = min(SPLITS, math.ceil(rows / triton.BLOCK))
    partial_projections = jax.ShapeDtypeStruct((splits, channels, outputs), jnp.float32)
    flat = jax.ShapeDtypeStruct((rows, channels), values.dtype)
    keyed = span_key is not None
    d_query, d_span_key, d_projection = triton.call(
        functools.partial(
            _products_kernel, rows=rows, channels=channels, outputs=outputs, chunk=chunk,
            splits=splits,
        ),
        (math.ceil(channels / chunk), splits),
        [
            query.reshape(flat.shape),
            span_key.reshape(flat.shape) if keyed else None,
            projection,
            d_logits.reshape(rows, outputs),
        ],
        None if segment_ids is None else segment_ids.reshape(rows),
        (flat, flat if keyed else None, partial_projections),
        interpret,
        WARPS,
    )  # fmt: skip
    return (
        d_query.reshape(query.shape),
        d_span_key.reshape(query.shape) if keyed else None,
        d_values.reshape(values.shape),
        d_projection.sum(axis=0).astype(projection.dtype),
        d_logits.astype(jnp.float32).sum(axis=(0, 1)).astype(bias.dtype),
        None,
    )


span_dynamic_conv.defvjp(_forward, _backward)


# --- Kernels. A program is (block of positions, row) and goes through the heads, so that query and
# span key come from memory once and for the other heads from the cache ---


def _head_filters(
    query, span_key, projection, bias, row, positions, head, *, offsets, length, channels
):
    """Softmax of one head's logits, [positions, taps]; unused columns 0."""
    taps = triton.taps_range(offsets)
    used = taps < len(offsets)
    columns = head * len(offsets) + taps

    def step(i, logits):
        lanes = triton.padded_range(CHUNK, i * CHUNK)
        place = (row, positions[:, None], lanes[None, :])
        mask = (positions < length)[:, None] & (lanes < channels)[None, :]
        product = triton.load(query.at[place], mask)
        if span_key is not None:
            product *= triton.load(span_key.at[place], mask)
        mask = (lanes < channels)[:, None] & used[None, :]
        factor = triton.load(projection.at[lanes[:, None], columns[None, :]], mask)
        return logits + triton.dot(product, factor.astype(product.dtype))

    logits = jnp.zeros((len(positions), len(taps)), jnp.float32)
    logits = jax.lax.fori_loop(0, math.ceil(channels / CHUNK), step, logits)
    logits += triton.load_f32(bias.at[columns], used)[None, :]
    logits = jnp.where(used[None, :], logits, -jnp.inf)
    powers = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return powers / jnp.sum(powers, axis=1, keepdims=True)


def _span_forward_kernel(
    ids, query, span_key, values, projection, bias, out, *, heads, offsets, length, channels
):
    positions = triton.padded_range(triton.BLOCK, triton.program_id(0) * triton.BLOCK)
    row, width = triton.program_id(1), channels // heads
    lanes, taps = triton.padded_range(width), triton.taps_range(offsets)
    inside = (lanes < width)[None, :]

    def one(head, _):
        filters = _head_filters(
            query, span_key, projection, bias, row, positions, head,
            offsets=offsets, length=length, channels=channels,
        )  # fmt: skip
        own = head * width + lanes[None, :]
        total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
        for tap, offset in enumerate(offsets):
            reads, seen = triton.visible(ids, row, positions, offset, length)
            factor = jnp.sum(jnp.where((taps == tap)[None, :], filters, 0), axis=1)
            factor = jnp.where(seen, factor, 0)
            value = triton.load_f32(values.at[row, reads[:, None], own], seen[:, None] & inside)
            total += value * factor[:, None]
        mask = (positions < length)[:, None] & inside
        triton.store(out.at[row, positions[:, None], own], total, mask)
        return 0

    jax.lax.fori_loop(0, heads, one, 0)


def _span_logits_kernel(
    ids, query, span_key, values, projection, bias, cotangent, filters_out, d_logits,
    *, heads, offsets, length, channels,
):  # fmt: skip
    positions = triton.padded_range(triton.BLOCK, triton.program_id(0) * triton.BLOCK)
    row, width = triton.program_id(1), channels // heads
    lanes, taps = triton.padded_range(width), triton.taps_range(offsets)
    inside = (lanes < width)[None, :]
    _, real = triton.visible(ids, row, positions, 0, length)

    def one(head, _):
        filters = _head_filters(
            query, span_key, projection, bias, row, positions, head,
            offsets=offsets, length=length, channels=channels,
        )  # fmt: skip

        def read(source, at, mask):
            place = source.at[row, at[:, None], head * width + lanes[None, :]]
            return triton.load_f32(place, mask[:, None] & inside)

        gradient = plain.filters_gradient(
            ids, row, positions, read(cotangent, positions, real),
            functools.partial(read, values), offsets, length,
        )  # fmt: skip
        along = jnp.sum(filters * gradient, axis=1, keepdims=True)
        gradient = jnp.where(real[:, None], filters * (gradient - along), 0)
        columns = head * len(offsets) + taps
        place = (row, positions[:, None], columns[None, :])
        mask = (positions < length)[:, None] & (taps < len(offsets))[None, :]
        triton.store(filters_out.at[place], filters, mask)
        triton.store(d_logits.at[place], gradient, mask)
        return 0

    jax.lax.fori_loop(0, heads, one, 0)


def _products_kernel(
    ids, query, span_key, projection, d_logits, d_query, d_span_key, d_projection,
    *, rows, channels, outputs, chunk, splits,
):  # fmt: skip
    """Back through logits = (query * span_key) projection; programs: (chunk of channels, split).

    Rows and positions are one axis here. Padding is masked: 0 times a NaN in it would be one.
    """
    split = triton.program_id(1)
    lanes = triton.padded_range(chunk, triton.program_id(0) * chunk)
    columns = triton.padded_range(max(triton.TENSOR_CORE, outputs))
    inside, used = lanes < channels, columns < outputs
    place = projection.at[lanes[None, :], columns[:, None]]
    transposed = triton.load(place, inside[None, :] & used[:, None])
    steps = math.ceil(math.ceil(rows / triton.BLOCK) / splits)

    def step(i, sums):
        positions = triton.padded_range(triton.BLOCK, (split * steps + i) * triton.BLOCK)
        real = positions < rows
        if ids is not None:
            real &= triton.load(ids.at[positions], real) != 0
        mask = real[:, None] & used[None, :]
        gradient = triton.load(d_logits.at[positions[:, None], columns[None, :]], mask)
        d_product = triton.dot(gradient, transposed.astype(gradient.dtype))
        place = (positions[:, None], lanes[None, :])
        mask = real[:, None] & inside[None, :]
        product = triton.load(query.at[place], mask)
        inside_rows = (positions < rows)[:, None] & inside[None, :]
        if span_key is not None:
            one, other = product, triton.load(span_key.at[place], mask)
            triton.store(d_span_key.at[place], d_product * one.astype(jnp.float32), inside_rows)
            d_product *= other.astype(jnp.float32)
            product = one * other
        triton.store(d_query.at[place], d_product, inside_rows)
        return sums + triton.dot(product.T, gradient)

    sums = jnp.zeros((len(lanes), len(columns)), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, sums)
    place = d_projection.at[split, lanes[:, None], columns[None, :]]
    triton.store(place, sums, inside[:, None] & used[None, :])
