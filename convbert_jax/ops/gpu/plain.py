"""Dynamic convolution for GPUs: a program is (block of positions, row, head)."""

import functools

import jax
import jax.numpy as jnp

from convbert_jax.ops.gpu import triton
from convbert_jax.ops.gpu.triton import both, column

# Small programs, so that a multiprocessor runs many at once; on an H100 faster than blocks of 64.
BLOCK = 16  # positions
WARPS = 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.dynamic_conv`. `interpret`: run in Pallas' interpreter."""
    return convolve(values, filters, segment_ids, offsets, interpret)


def _forward(values, filters, segment_ids, offsets, interpret):
    out = dynamic_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    gradients = convolve_backward(
        values, filters, segment_ids, cotangent, offsets, interpret, of_logits=False
    )
    return *gradients, None


dynamic_conv.defvjp(_forward, _backward)


def convolve(values, filters, segment_ids, offsets, interpret):
    """Returns the convolution [B, L, H, D]; filters [B, L, H, >= K] may be padded after K taps."""
    _, length, heads, width = values.shape
    return triton.call(
        functools.partial(_forward_kernel, offsets=offsets, length=length, width=width),
        (*triton.blocks(values, BLOCK), heads),
        [values, filters],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
        WARPS,
    )


def convolve_backward(values, filters, segment_ids, cotangent, offsets, interpret, *, of_logits):
    """Returns the gradients of values and filters; 0 for the padding after the taps.

    With `of_logits`, the second gradient is the one of the logits whose softmax the filters are.
    """
    _, length, heads, width = values.shape
    return triton.call(
        functools.partial(
            _backward_kernel, offsets=offsets, length=length, width=width, of_logits=of_logits
        ),
        (*triton.blocks(values, BLOCK), heads),
        [values, filters, cotangent],
        segment_ids,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (values, filters)),
        interpret,
        WARPS,
    )


# --- Kernels ---


def _forward_kernel(ids, values, filters, out, *, offsets, length, width):
    positions, row, head, lanes, inside = _place(width)
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = triton.visible(ids, row, positions, offset, length)
        factor = triton.load_f32(filters.at[row, positions, head, tap], seen)
        value = values.at[row, reads[:, None], head, lanes[None, :]]
        total += triton.load_f32(value, both(column(seen), inside)) * factor[:, None]
    place = out.at[row, positions[:, None], head, lanes[None, :]]
    triton.store(place, total, both(column(triton.within(positions, length)), inside))


def _backward_kernel(
    ids, values, filters, cotangent, d_values, d_filters, *, offsets, length, width, of_logits
):
    positions, row, head, lanes, inside = _place(width)
    in_row = triton.within(positions, length)

    def read(source, at, mask):
        place = source.at[row, at[:, None], head, lanes[None, :]]
        return triton.load_f32(place, both(column(mask), inside))

    # d values[t] = sum over i of filters[t - offsets[i], i] * cotangent[t - offsets[i]]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        readers, seen = triton.visible(ids, row, positions, -offset, length)
        factor = triton.load_f32(filters.at[row, readers, head, tap], seen)
        total += read(cotangent, readers, seen) * factor[:, None]
    place = d_values.at[row, positions[:, None], head, lanes[None, :]]
    triton.store(place, total, both(column(in_row), inside))
    # d filters[t, i] = values[t + offsets[i]] . cotangent[t], 0 for an invisible tap
    _, real = triton.visible(ids, row, positions, 0, length)
    own = read(cotangent, positions, real)
    taps = triton.padded_range(filters.shape[-1])
    gradient = jnp.zeros((len(positions), len(taps)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = triton.visible(ids, row, positions, offset, length)
        dots = jnp.sum(read(values, reads, seen) * own, axis=1)
        if seen is not None:  # the cotangent may be NaN
            dots = jnp.where(seen, dots, 0)
        gradient = jnp.where((taps == tap)[None, :], dots[:, None], gradient)
    place = (row, positions[:, None], head, taps[None, :])
    stored = both(column(in_row), triton.lanes_within(taps, filters.shape[-1]))
    if of_logits:
        used = triton.lanes_within(taps, len(offsets))
        weights = triton.load_f32(filters.at[place], both(column(in_row), used))
        along = jnp.sum(weights * gradient, axis=1, keepdims=True)
        gradient = weights * (gradient - along)
        if real is not None:
            gradient = jnp.where(real[:, None], gradient, 0)
    triton.store(d_filters.at[place], gradient, stored)


def _place(width):
    """Returns positions, row, head and lanes of a program, and the mask of used lanes."""
    positions = triton.block_range(triton.program_id(0), BLOCK)
    row, head = triton.program_id(1), triton.program_id(2)
    lanes = triton.padded_range(width)
    return positions, row, head, lanes, triton.lanes_within(lanes, width)
