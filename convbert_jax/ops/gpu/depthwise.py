"""Depthwise convolution for GPUs: a program is (block of positions, row, chunk of channels).

The backward kernel reads the cotangent of each tap once for both gradients. Each program writes
partial sums of the filter gradients, K / BLOCK of the size of the input, and XLA adds them.
"""

import functools
import math

import jax
import jax.numpy as jnp

from convbert_jax.ops.gpu import triton
from convbert_jax.ops.gpu.triton import both, column

CHUNK = 64  # channels of a program


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def depthwise_conv(x, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.depthwise_conv`. `interpret`: run in Pallas' interpreter."""
    _, length, channels = x.shape
    return triton.call(
        functools.partial(_forward_kernel, offsets=offsets, length=length, channels=channels),
        _grid(x),
        [x, filters],
        segment_ids,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret,
    )


def _forward(x, filters, segment_ids, offsets, interpret):
    return depthwise_conv(x, filters, segment_ids, offsets, interpret), (x, filters, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    x, filters, segment_ids = saved
    batch, length, channels = x.shape
    blocks, _ = triton.blocks(x)
    d_x, sums = triton.call(
        functools.partial(_backward_kernel, offsets=offsets, length=length, channels=channels),
        _grid(x),
        [x, filters, cotangent],
        segment_ids,
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, blocks, len(offsets), channels), jnp.float32),
        ),
        interpret,
    )
    return d_x, sums.sum(axis=(0, 1)).astype(filters.dtype), None


depthwise_conv.defvjp(_forward, _backward)


def _grid(x):
    return *triton.blocks(x), math.ceil(x.shape[2] / CHUNK)


# --- Kernels ---


def _forward_kernel(ids, x, filters, out, *, offsets, length, channels):
    positions, row, lanes, used = _place(channels)
    inside = None if used is None else used[None, :]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = triton.visible(ids, row, positions, offset, length)
        factor = triton.load_f32(filters.at[tap, lanes], used)
        place = x.at[row, reads[:, None], lanes[None, :]]
        total += triton.load_f32(place, both(column(seen), inside)) * factor[None, :]
    mask = both(column(triton.within(positions, length)), inside)
    triton.store(out.at[row, positions[:, None], lanes[None, :]], total, mask)


def _backward_kernel(ids, x, filters, cotangent, d_x, sums, *, offsets, length, channels):
    positions, row, lanes, used = _place(channels)
    inside = None if used is None else used[None, :]
    _, real = triton.visible(ids, row, positions, 0, length)
    place = x.at[row, positions[:, None], lanes[None, :]]
    own = triton.load_f32(place, both(column(real), inside))
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        # Cotangent of the positions that read this one through the tap.
        readers, seen = triton.visible(ids, row, positions, -offset, length)
        place = cotangent.at[row, readers[:, None], lanes[None, :]]
        given = triton.load_f32(place, both(column(seen), inside))
        total += given * triton.load_f32(filters.at[tap, lanes], used)[None, :]
        place = sums.at[row, triton.program_id(0), tap, lanes]
        triton.store(place, jnp.sum(own * given, axis=0), used)
    mask = both(column(triton.within(positions, length)), inside)
    triton.store(d_x.at[row, positions[:, None], lanes[None, :]], total, mask)


def _place(channels):
    """Returns positions, row and lanes of a program, and the mask of used lanes or None: all."""
    positions = triton.block_range(triton.program_id(0))
    lanes = triton.padded_range(CHUNK, triton.program_id(2) * CHUNK)
    used = None if channels % CHUNK == 0 else lanes < channels
    return positions, triton.program_id(1), lanes, used
