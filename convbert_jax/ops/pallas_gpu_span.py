"""Span-based dynamic convolution for GPUs: one kernel forward, three backward.

Built from the parts of pallas_gpu.py, which alone knows the backend.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import pallas_gpu as gpu

CHUNK = 64  # channels of one step of a product
WARPS = 8  # with 4, ptxas runs out of registers for sm_90
# Sums of the kernel's gradient over positions are split over so many programs per chunk.
SPLITS = 64
# A program of that gradient holds so many sums; more would spill registers.
MOST_SUMS = 64 * 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"],
    values: Float[Array, "B L C"],
    kernel: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    segment_ids: Int[Array, "B L"] | None,
    heads: int,
    offsets: tuple[int, ...],
    interpret: bool = False,
) -> Float[Array, "B L C"]:
    """LConv(values, softmax((query * span_key) kernel + bias)) (ConvBERT eq. 4), in one kernel.

    The softmax runs over the K taps of each head, visible or not, in float32; taps that are not
    visible get weight 0 after it. The backward computes the weights again.

    Args:
      kernel: logits of all heads, [C, H * K], each head's K taps together.
      segment_ids: as in `dynamic_conv`.
      interpret: as in `dynamic_conv`.
    """
    _, length, channels = values.shape
    body = functools.partial(
        _span_forward_kernel, heads=heads, offsets=offsets, length=length, channels=channels
    )
    return gpu.call(
        body,
        gpu.blocks(values),
        [query, span_key, values, kernel, bias],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
        WARPS,
    )


def _span_forward(query, span_key, values, kernel, bias, segment_ids, heads, offsets, interpret):
    arrays = (query, span_key, values, kernel, bias, segment_ids)
    return span_dynamic_conv(*arrays, heads, offsets, interpret), arrays


def _span_backward(heads, offsets, interpret, saved, cotangent):
    """Three kernels: weights again and the logits' gradient; the values'; what made the logits.

    The weights go through memory here, in the dtype of the values: K / D of one more array, for the
    gradient of a position's value needs the weights of its neighbors.
    """
    query, span_key, values, kernel, bias, segment_ids = saved
    batch, length, channels = values.shape
    width, outputs = channels // heads, heads * len(offsets)
    blocks = gpu.blocks(values)
    size = {"heads": heads, "offsets": offsets, "length": length, "channels": channels}
    weights, d_logits = gpu.call(
        functools.partial(_span_logits_kernel, **size),
        blocks,
        [query, span_key, values, kernel, bias, cotangent],
        segment_ids,
        [jax.ShapeDtypeStruct((batch, length, outputs), values.dtype)] * 2,
        interpret,
        WARPS,
    )
    by_head = (batch, length, heads, -1)
    d_values = gpu.call(
        functools.partial(gpu.values_kernel, offsets=offsets, length=length, width=width),
        (*blocks, heads),
        [weights.reshape(by_head), cotangent.reshape(by_head)],
        segment_ids,
        jax.ShapeDtypeStruct((batch, length, heads, width), values.dtype),
        interpret,
    )
    rows = batch * length
    columns = gpu.power_of_two(max(gpu.TENSOR_CORE, outputs))
    chunk = max(gpu.TENSOR_CORE, min(CHUNK, MOST_SUMS // columns))
    splits = min(SPLITS, math.ceil(rows / gpu.BLOCK))
    partial_kernels = jax.ShapeDtypeStruct((splits, channels, outputs), jnp.float32)
    flat = jax.ShapeDtypeStruct((rows, channels), values.dtype)
    d_query, d_span_key, d_kernel = gpu.call(
        functools.partial(
            _products_kernel, rows=rows, channels=channels, outputs=outputs, chunk=chunk,
            splits=splits,
        ),
        (math.ceil(channels / chunk), splits),
        [
            query.reshape(flat.shape),
            span_key.reshape(flat.shape),
            kernel,
            d_logits.reshape(rows, outputs),
        ],
        None if segment_ids is None else segment_ids.reshape(rows),
        (flat, flat, partial_kernels),
        interpret,
        WARPS,
    )  # fmt: skip
    return (
        d_query.reshape(query.shape),
        d_span_key.reshape(query.shape),
        d_values.reshape(values.shape),
        d_kernel.sum(axis=0).astype(kernel.dtype),
        d_logits.astype(jnp.float32).sum(axis=(0, 1)).astype(bias.dtype),
        None,
    )


span_dynamic_conv.defvjp(_span_forward, _span_backward)


# --- Kernels. A program is (block of positions, row) and goes through the heads, so that query and
# span key come from memory once and for the other heads from the cache ---


def _head_weights(
    query, span_key, kernel, bias, row, positions, head, *, offsets, length, channels
):
    """Softmax of one head's logits, [positions, taps]; unused columns 0."""
    taps = gpu.taps_range(offsets)
    used = taps < len(offsets)
    columns = head * len(offsets) + taps

    def step(i, logits):
        lanes = gpu.padded_range(CHUNK, i * CHUNK)
        place = (row, positions[:, None], lanes[None, :])
        mask = (positions < length)[:, None] & (lanes < channels)[None, :]
        product = gpu.load(query.at[place], mask)
        product *= gpu.load(span_key.at[place], mask)
        mask = (lanes < channels)[:, None] & used[None, :]
        weight = gpu.load(kernel.at[lanes[:, None], columns[None, :]], mask)
        return logits + gpu.dot(product, weight.astype(product.dtype))

    logits = jnp.zeros((len(positions), len(taps)), jnp.float32)
    logits = jax.lax.fori_loop(0, math.ceil(channels / CHUNK), step, logits)
    logits += gpu.load_f32(bias.at[columns], used)[None, :]
    logits = jnp.where(used[None, :], logits, -jnp.inf)
    powers = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return powers / jnp.sum(powers, axis=1, keepdims=True)


def _span_forward_kernel(
    ids, query, span_key, values, kernel, bias, out, *, heads, offsets, length, channels
):
    positions = gpu.padded_range(gpu.BLOCK, gpu.program_id(0) * gpu.BLOCK)
    row, width = gpu.program_id(1), channels // heads
    lanes, taps = gpu.padded_range(width), gpu.taps_range(offsets)
    inside = (lanes < width)[None, :]

    def one(head, _):
        weights = _head_weights(
            query, span_key, kernel, bias, row, positions, head,
            offsets=offsets, length=length, channels=channels,
        )  # fmt: skip
        own = head * width + lanes[None, :]
        total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
        for tap, offset in enumerate(offsets):
            reads, seen = gpu.visible(ids, row, positions, offset, length)
            weight = jnp.sum(jnp.where((taps == tap)[None, :], weights, 0), axis=1)
            weight = jnp.where(seen, weight, 0)
            value = gpu.load_f32(values.at[row, reads[:, None], own], seen[:, None] & inside)
            total += value * weight[:, None]
        mask = (positions < length)[:, None] & inside
        gpu.store(out.at[row, positions[:, None], own], total, mask)
        return 0

    jax.lax.fori_loop(0, heads, one, 0)


def _span_logits_kernel(
    ids, query, span_key, values, kernel, bias, cotangent, weights_out, d_logits,
    *, heads, offsets, length, channels,
):  # fmt: skip
    positions = gpu.padded_range(gpu.BLOCK, gpu.program_id(0) * gpu.BLOCK)
    row, width = gpu.program_id(1), channels // heads
    lanes, taps = gpu.padded_range(width), gpu.taps_range(offsets)
    inside = (lanes < width)[None, :]
    _, real = gpu.visible(ids, row, positions, 0, length)

    def one(head, _):
        weights = _head_weights(
            query, span_key, kernel, bias, row, positions, head,
            offsets=offsets, length=length, channels=channels,
        )  # fmt: skip

        def read(source, at, mask):
            place = source.at[row, at[:, None], head * width + lanes[None, :]]
            return gpu.load_f32(place, mask[:, None] & inside)

        gradient = gpu.weights_gradient(
            ids, row, positions, read(cotangent, positions, real),
            functools.partial(read, values), offsets, length,
        )  # fmt: skip
        along = jnp.sum(weights * gradient, axis=1, keepdims=True)
        gradient = jnp.where(real[:, None], weights * (gradient - along), 0)
        columns = head * len(offsets) + taps
        place = (row, positions[:, None], columns[None, :])
        mask = (positions < length)[:, None] & (taps < len(offsets))[None, :]
        gpu.store(weights_out.at[place], weights, mask)
        gpu.store(d_logits.at[place], gradient, mask)
        return 0

    jax.lax.fori_loop(0, heads, one, 0)


def _products_kernel(
    ids, query, span_key, kernel, d_logits, d_query, d_span_key, d_kernel,
    *, rows, channels, outputs, chunk, splits,
):  # fmt: skip
    """Back through logits = (query * span_key) kernel, a program being (chunk of channels, split).

    Rows and positions are one axis here. Padding is masked: 0 times a NaN in it would be one.
    """
    split = gpu.program_id(1)
    lanes = gpu.padded_range(chunk, gpu.program_id(0) * chunk)
    columns = gpu.padded_range(max(gpu.TENSOR_CORE, outputs))
    inside, used = lanes < channels, columns < outputs
    place = kernel.at[lanes[None, :], columns[:, None]]
    transposed = gpu.load(place, inside[None, :] & used[:, None])
    steps = math.ceil(math.ceil(rows / gpu.BLOCK) / splits)

    def step(i, sums):
        positions = gpu.padded_range(gpu.BLOCK, (split * steps + i) * gpu.BLOCK)
        real = positions < rows
        if ids is not None:
            real &= gpu.load(ids.at[positions], real) != 0
        mask = real[:, None] & used[None, :]
        gradient = gpu.load(d_logits.at[positions[:, None], columns[None, :]], mask)
        d_product = gpu.dot(gradient, transposed.astype(gradient.dtype))
        place = (positions[:, None], lanes[None, :])
        mask = real[:, None] & inside[None, :]
        one, other = (gpu.load(x.at[place], mask) for x in (query, span_key))
        mask = (positions < rows)[:, None] & inside[None, :]
        d_one, d_other = d_product * other.astype(jnp.float32), d_product * one.astype(jnp.float32)
        gpu.store(d_query.at[place], d_one, mask)
        gpu.store(d_span_key.at[place], d_other, mask)
        return sums + gpu.dot((one * other).T, gradient)

    sums = jnp.zeros((len(lanes), len(columns)), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, sums)
    place = d_kernel.at[split, lanes[:, None], columns[None, :]]
    gpu.store(place, sums, inside[:, None] & used[None, :])
