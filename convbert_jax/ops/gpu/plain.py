"""The dynamic convolution for GPUs: a program is (block of positions, row, head)."""

import functools

import jax
import jax.numpy as jnp

from convbert_jax.ops.gpu import triton


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """`interpret`: run in Pallas' interpreter, on any device."""
    _, length, heads, width = values.shape
    return triton.call(
        functools.partial(_forward_kernel, offsets=offsets, length=length, width=width),
        (*triton.blocks(values), heads),
        [values, filters],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
    )


def _forward(values, filters, segment_ids, offsets, interpret):
    out = dynamic_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    _, length, heads, width = values.shape
    d_values, d_filters = triton.call(
        functools.partial(_backward_kernel, offsets=offsets, length=length, width=width),
        (*triton.blocks(values), heads),
        [values, filters, cotangent],
        segment_ids,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (values, filters)),
        interpret,
    )
    return d_values, d_filters, None


dynamic_conv.defvjp(_forward, _backward)


# --- Kernels ---


def _forward_kernel(ids, values, filters, out, *, offsets, length, width):
    positions, row, head, lanes, inside = _place(width)
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = triton.visible(ids, row, positions, offset, length)
        factor = triton.load_f32(filters.at[row, positions, head, tap], seen)
        mask = seen[:, None] & inside
        value = triton.load_f32(values.at[row, reads[:, None], head, lanes[None, :]], mask)
        total += value * factor[:, None]
    mask = (positions < length)[:, None] & inside
    place = out.at[row, positions[:, None], head, lanes[None, :]]
    triton.store(place, total, mask)


def _backward_kernel(
    ids, values, filters, cotangent, d_values, d_filters, *, offsets, length, width
):
    values_kernel(ids, filters, cotangent, d_values, offsets=offsets, length=length, width=width)
    positions, row, head, lanes, inside = _place(width)

    def read(source, at, mask):
        place = source.at[row, at[:, None], head, lanes[None, :]]
        return triton.load_f32(place, mask[:, None] & inside)

    own = read(cotangent, positions, positions < length)
    gradient = filters_gradient(
        ids, row, positions, own, functools.partial(read, values), offsets, length
    )
    taps = triton.taps_range(offsets)
    mask = (positions < length)[:, None] & (taps < len(offsets))[None, :]
    place = d_filters.at[row, positions[:, None], head, taps[None, :]]
    triton.store(place, gradient, mask)


def values_kernel(ids, filters, cotangent, d_values, *, offsets, length, width):
    """d values[t] = sum over i of filters[t - offsets[i], i] * cotangent[t - offsets[i]]."""
    positions, row, head, lanes, inside = _place(width)
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        readers, seen = triton.visible(ids, row, positions, -offset, length)
        factor = triton.load_f32(filters.at[row, readers, head, tap], seen)[:, None]
        mask = seen[:, None] & inside
        place = cotangent.at[row, readers[:, None], head, lanes[None, :]]
        total += triton.load_f32(place, mask) * factor
    place = d_values.at[row, positions[:, None], head, lanes[None, :]]
    mask = (positions < length)[:, None] & inside
    triton.store(place, total, mask)


def _place(width):
    """Positions, row, head and lanes of a program, and which lanes hold channels."""
    positions = triton.padded_range(triton.BLOCK, triton.program_id(0) * triton.BLOCK)
    row, head = triton.program_id(1), triton.program_id(2)
    lanes = triton.padded_range(width)
    return positions, row, head, lanes, (lanes < width)[None, :]


def filters_gradient(ids, row, positions, cotangent, read, offsets, length):
    """[positions, taps]: values[t + offsets[i]] . cotangent[t], 0 for a tap that sees nothing."""
    taps = triton.taps_range(offsets)
    gradient = jnp.zeros((len(positions), len(taps)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = triton.visible(ids, row, positions, offset, length)
        dots = jnp.where(seen, jnp.sum(read(reads, seen) * cotangent, axis=1), 0)
        gradient = jnp.where((taps == tap)[None, :], dots[:, None], gradient)
    return gradient
