"""Span-based dynamic convolution for GPUs: computes filters, then the convolution of plain.py.

If the span key is None, the filters depend on the query alone.

Forward: one kernel reads query and span key once and computes the filters of several heads. Filters
go through memory and are kept as residuals. Taps are padded to a power of two per head, so that
filters are read in whole words (16 for 64 channels at K = 9).

Backward: the kernel of plain.py returns the gradients of values and logits; a last kernel returns
the gradients of query, span key and projection.

[B, L, C] arrays are read or written only as often as necessary: 4 times forward, 7 backward.
"""

import functools
import math

import jax
import jax.numpy as jnp

from convbert_jax.ops.gpu import plain, triton

CHUNK = 64  # channels per step of a product
# Logits per position and program; a quarter for float32, whose products do not use tensor cores.
COLUMNS = 256
WARPS = 4  # for at most half as many columns, else twice as many
# Accumulators per program of the projection's gradient, half for float32; more would spill
# registers.
MOST_SUMS = 64 * 128
# Programs of the projection's gradient, which split the positions: two per multiprocessor of an
# H100. Slightly more would leave most multiprocessors idle in the last wave.
PROGRAMS = 264
NOT_A_TAP = -1e30  # logit of a padding column: its weight is 0, and not NaN if all are padding


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret=False
):
    """Computes `reference.span_dynamic_conv`. `interpret`: run in Pallas' interpreter."""
    arrays = (query, span_key, values, projection, bias, segment_ids)
    return _forward(*arrays, heads, offsets, interpret)[0]


def _forward(query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret):
    filters = _make_filters(query, span_key, projection, bias, heads, interpret)
    by_head = values.reshape(*values.shape[:2], heads, -1)
    out = plain.convolve(by_head, filters, segment_ids, offsets, interpret)
    saved = (query, span_key, values, projection, bias, segment_ids, filters)
    return out.reshape(values.shape), saved


def _backward(heads, offsets, interpret, saved, cotangent):
    query, span_key, values, projection, bias, segment_ids, filters = saved
    by_head = (*values.shape[:2], heads, -1)
    d_values, d_logits = plain.convolve_backward(
        values.reshape(by_head), filters, segment_ids, cotangent.reshape(by_head), offsets,
        interpret, of_logits=True,
    )  # fmt: skip
    d_query, d_span_key, d_projection = _through_product(
        query, span_key, projection, segment_ids, d_logits, interpret
    )
    taps = len(offsets)
    d_bias = d_logits[..., :taps].astype(jnp.float32).sum(axis=(0, 1)).reshape(bias.shape)
    return (
        d_query, d_span_key, d_values.reshape(values.shape),
        d_projection.astype(projection.dtype), d_bias.astype(bias.dtype), None,
    )  # fmt: skip


span_dynamic_conv.defvjp(_forward, _backward)


def _make_filters(query, span_key, projection, bias, heads, interpret):
    """Computes softmax((query * span_key) projection + bias) over the taps of each head.

    Returns:
      [B, L, H, T] in the dtype of the query; T is K rounded up to a power of two, padded with 0.
    """
    *rows, channels = query.shape
    count = math.prod(rows)
    taps = triton.power_of_two(projection.shape[1] // heads)
    # `group` heads per program; the last one may have fewer.
    most = COLUMNS if query.dtype.itemsize == 2 else COLUMNS // 4
    group = min(triton.power_of_two(heads), max(1, most // taps))
    group = max(group, math.ceil(triton.TENSOR_CORE / taps))
    groups = math.ceil(heads / group)
    matrix = _by_tap(projection, heads, taps, groups * group, 0).astype(query.dtype)
    logits = _by_tap(bias[None].astype(jnp.float32), heads, taps, groups * group, NOT_A_TAP)
    return triton.call(
        functools.partial(
            _filters_kernel, count=count, channels=channels, heads=heads, group=group, taps=taps
        ),
        (math.ceil(count / triton.BLOCK), groups),
        [query.reshape(count, channels), _flat(span_key), matrix, logits[0]],
        None,
        jax.ShapeDtypeStruct((count, heads, taps), query.dtype),
        interpret,
        WARPS if group * taps < COLUMNS else 2 * WARPS,
    ).reshape(*rows, heads, taps)


def _by_tap(matrix, heads: int, taps: int, all_heads: int, fill: float):
    """Pads the taps and heads of [N, H K] with `fill` to [N, all_heads * taps]."""
    by_head = matrix.reshape(len(matrix), heads, -1)
    behind = ((0, 0), (0, all_heads - heads), (0, taps - by_head.shape[2]))
    return jnp.pad(by_head, behind, constant_values=fill).reshape(len(matrix), -1)


def _flat(x):
    return None if x is None else x.reshape(-1, x.shape[-1])


def _through_product(query, span_key, projection, segment_ids, d_logits, interpret):
    """Returns the gradients of query, span key and projection, the last one in float32."""
    *rows, channels = query.shape
    count = math.prod(rows)
    heads, taps = d_logits.shape[-2:]
    outputs = heads * taps
    columns = triton.power_of_two(max(triton.TENSOR_CORE, outputs))
    most = MOST_SUMS if query.dtype.itemsize == 2 else MOST_SUMS // 2
    chunk = max(triton.TENSOR_CORE, min(CHUNK, most // columns))
    chunks = math.ceil(channels / chunk)
    splits = max(1, min(PROGRAMS // chunks, math.ceil(count / triton.BLOCK)))
    flat = jax.ShapeDtypeStruct((count, channels), query.dtype)
    keyed = span_key is not None
    d_query, d_span_key, sums = triton.call(
        functools.partial(
            _products_kernel, count=count, channels=channels, outputs=outputs, chunk=chunk,
            splits=splits,
        ),
        (chunks, splits),
        [
            _flat(query),
            _flat(span_key),
            _by_tap(projection, heads, taps, heads, 0).astype(query.dtype),
            d_logits.reshape(count, outputs),
        ],
        None if segment_ids is None else segment_ids.reshape(count),
        (
            flat,
            flat if keyed else None,
            jax.ShapeDtypeStruct((splits, channels, outputs), jnp.float32),
        ),
        interpret,
        WARPS if columns < COLUMNS and query.dtype.itemsize == 2 else 2 * WARPS,
    )  # fmt: skip
    d_projection = sums.sum(axis=0).reshape(channels, heads, taps)
    d_projection = d_projection[..., : projection.shape[1] // heads].reshape(projection.shape)
    d_span_key = d_span_key.reshape(query.shape) if keyed else None
    return d_query.reshape(query.shape), d_span_key, d_projection


# --- Kernels. Rows and positions are one axis ---


def _filters_kernel(_, query, span_key, matrix, bias, out, *, count, channels, heads, group, taps):
    """Computes filters; a program is (block of positions, group of heads)."""
    positions = triton.block_range(triton.program_id(0))
    columns = triton.program_id(1) * group * taps + triton.padded_range(group * taps)
    real = (positions < count)[:, None]

    def step(i, logits):
        lanes = triton.padded_range(CHUNK, i * CHUNK)
        inside = lanes < channels
        place = (positions[:, None], lanes[None, :])
        mask = real & inside[None, :]
        product = triton.load(query.at[place], mask)
        if span_key is not None:
            product *= triton.load(span_key.at[place], mask)
        factor = triton.load(matrix.at[lanes[:, None], columns[None, :]], inside[:, None])
        return logits + triton.dot(product, factor)

    logits = jnp.zeros((len(positions), len(columns)), jnp.float32)
    logits = jax.lax.fori_loop(0, math.ceil(channels / CHUNK), step, logits)
    logits += triton.load_f32(bias.at[columns], None)[None, :]
    by_head = logits.reshape(len(positions), group, taps)
    powers = jnp.exp(by_head - jnp.max(by_head, axis=2, keepdims=True))
    filters = powers / jnp.sum(powers, axis=2, keepdims=True)
    own = triton.program_id(1) * group + triton.padded_range(group)
    tap = triton.padded_range(taps)
    place = out.at[positions[:, None, None], own[None, :, None], tap[None, None, :]]
    triton.store(place, filters, real[:, :, None] & (own < heads)[None, :, None])


def _products_kernel(
    ids, query, span_key, projection, d_logits, d_query, d_span_key, d_projection,
    *, count, channels, outputs, chunk, splits,
):  # fmt: skip
    """Computes the gradient of logits = (query * span_key) projection.

    A program is (chunk of channels, split of the positions). Padding is masked, since it may hold
    NaN and 0 * NaN is NaN.
    """
    split = triton.program_id(1)
    lanes = triton.padded_range(chunk, triton.program_id(0) * chunk)
    columns = triton.padded_range(max(triton.TENSOR_CORE, outputs))
    inside, used = lanes < channels, columns < outputs
    place = projection.at[lanes[None, :], columns[:, None]]
    transposed = triton.load(place, inside[None, :] & used[:, None])
    steps = math.ceil(math.ceil(count / triton.BLOCK) / splits)

    def step(i, sums):
        positions = triton.block_range(split * steps + i)
        real = positions < count
        if ids is not None:
            real &= triton.load(ids.at[positions], real) != 0
        mask = real[:, None] & used[None, :]
        gradient = triton.load(d_logits.at[positions[:, None], columns[None, :]], mask)
        d_product = triton.dot(gradient, transposed)
        place = (positions[:, None], lanes[None, :])
        mask = real[:, None] & inside[None, :]
        product = triton.load(query.at[place], mask)
        stored = (positions < count)[:, None] & inside[None, :]
        if span_key is not None:
            one, other = product, triton.load(span_key.at[place], mask)
            triton.store(d_span_key.at[place], d_product * one.astype(jnp.float32), stored)
            d_product *= other.astype(jnp.float32)
            product = one * other
        triton.store(d_query.at[place], d_product, stored)
        return sums + triton.dot(product.T, gradient)

    sums = jnp.zeros((len(lanes), len(columns)), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, sums)
    place = d_projection.at[split, lanes[:, None], columns[None, :]]
    triton.store(place, sums, inside[:, None] & used[None, :])
