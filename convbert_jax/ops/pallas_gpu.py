"""Dynamic convolution kernels for GPUs, Ampere and newer, by Pallas' Triton backend.

This is the only file that imports a GPU backend. Triton rather than its designated successor,
Mosaic GPU, because that one needs Hopper; jax 0.12 warns that Triton will go, and
`requirements.txt` stops below the release that may drop it.

A program works on BLOCK positions of a row. Each tap reads its own shifted block: the K reads
overlap, so all but the first come from the cache, and what may not be read is masked in the load,
so that nothing it holds, NaN included, enters a register. Triton's blocks are powers of two: head
widths, taps and channels that are none are rounded up and masked.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

BLOCK = 64  # positions of a program
WARPS = 4  # the threads of 4 warps hold a [64, 64] float32 block in 32 registers each
TENSOR_CORE = 16  # least size of a side of a product


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "*BL H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: tuple[int, ...],
    interpret: bool = False,
) -> Float[Array, "B L H D"]:
    """out[b, t, h] = sum over i of weights[b, t, h, i] * values[b, t + offsets[i], h].

    Args:
      weights: [B, L, H, K], or [H, K] for all positions; a gradient comes in the same shape.
      segment_ids: taps never cross a segment boundary; None: one segment without padding.
      interpret: run in Pallas' interpreter, on any device.
    """
    _, _, heads, width = values.shape
    kernel = functools.partial(
        _forward_kernel, offsets=offsets, length=values.shape[1], width=width,
        shared=weights.ndim == 2,
    )  # fmt: skip
    return call(
        kernel,
        (*blocks(values), heads),
        [values, weights],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
    )


def _forward(values, weights, segment_ids, offsets, interpret):
    out = dynamic_conv(values, weights, segment_ids, offsets, interpret)
    return out, (values, weights, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, weights, segment_ids = saved
    batch, length, heads, width = values.shape
    shared = weights.ndim == 2
    d_weights_dtype = jnp.float32 if shared else weights.dtype
    kernel = functools.partial(
        _backward_kernel, offsets=offsets, length=length, width=width, shared=shared
    )
    d_values, d_weights = call(
        kernel,
        (*blocks(values), heads),
        [values, weights, cotangent],
        segment_ids,
        (
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            jax.ShapeDtypeStruct((batch, length, heads, len(offsets)), d_weights_dtype),
        ),
        interpret,
    )
    if shared:
        d_weights = d_weights.sum(axis=(0, 1)).astype(weights.dtype)
    return d_values, d_weights, None


dynamic_conv.defvjp(_forward, _backward)


# --- Calling a kernel ---


def blocks(values) -> tuple[int, int]:
    """Programs over positions and rows. CUDA lets the first axis of a grid be long."""
    return math.ceil(values.shape[1] / BLOCK), values.shape[0]


def call(kernel, grid, arrays, segment_ids, outputs, interpret, warps=WARPS):
    """Runs `kernel(segment ids or None, *arrays, *outputs)`, all references whole."""
    if segment_ids is None:
        body = functools.partial(kernel, None)
    else:
        body, arrays = kernel, [segment_ids, *arrays]
    return pl.pallas_call(
        body,
        out_shape=outputs,
        grid=grid,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    )(*arrays)


# --- What the kernels share ---

program_id = pl.program_id
power_of_two = pl.next_power_of_2


def padded_range(size: int, start=0):
    """start, start + 1, ...: `size` of them, rounded up to a power of two."""
    return start + jnp.arange(power_of_two(size), dtype=jnp.int32)


def taps_range(offsets):
    """The taps and as many more as a side of a product on tensor cores needs."""
    return padded_range(max(len(offsets), TENSOR_CORE))


def visible(ids, row, positions, offset, length):
    """Where a position is in the row and may read the one at `offset`."""
    reads = positions + offset
    seen = (positions < length) & (reads >= 0) & (reads < length)
    if ids is None:
        return reads, seen
    own = load(ids.at[row, positions], positions < length)
    other = load(ids.at[row, reads], seen)
    return reads, seen & (own == other) & (own != 0)


def load(reference, mask):
    """0 where masked."""
    return plgpu.load(reference, mask=mask, other=0)


def load_f32(reference, mask):
    """In float32, 0 where masked."""
    return load(reference, mask).astype(jnp.float32)


def store(reference, value, mask) -> None:
    """In the dtype of `reference`; nothing where masked."""
    plgpu.store(reference, value.astype(reference.dtype), mask=mask)


def dot(a, b):
    """Tensor cores for bfloat16 and float16, full precision for float32 (not TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


# --- The plain operation: a program is (block of positions, row, head) ---


def _forward_kernel(ids, values, weights, out, *, offsets, length, width, shared):
    positions = padded_range(BLOCK, program_id(0) * BLOCK)
    row, head = program_id(1), program_id(2)
    lanes = padded_range(width)
    inside = (lanes < width)[None, :]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = visible(ids, row, positions, offset, length)
        source = weights.at[head, tap] if shared else weights.at[row, positions, head, tap]
        weight = source[...].astype(jnp.float32) if shared else load_f32(source, seen)
        mask = seen[:, None] & inside
        value = load_f32(values.at[row, reads[:, None], head, lanes[None, :]], mask)
        total += value * (weight if shared else weight[:, None])
    mask = (positions < length)[:, None] & inside
    place = out.at[row, positions[:, None], head, lanes[None, :]]
    store(place, total, mask)


def _backward_kernel(
    ids, values, weights, cotangent, d_values, d_weights, *, offsets, length, width, shared
):
    values_kernel(
        ids, weights, cotangent, d_values, offsets=offsets, length=length, width=width,
        shared=shared,
    )  # fmt: skip
    positions = padded_range(BLOCK, program_id(0) * BLOCK)
    row, head = program_id(1), program_id(2)
    lanes = padded_range(width)
    inside = (lanes < width)[None, :]

    def read(source, at, mask):
        return load_f32(source.at[row, at[:, None], head, lanes[None, :]], mask[:, None] & inside)

    own = read(cotangent, positions, positions < length)
    gradient = weights_gradient(
        ids, row, positions, own, functools.partial(read, values), offsets, length
    )
    taps = taps_range(offsets)
    mask = (positions < length)[:, None] & (taps < len(offsets))[None, :]
    place = d_weights.at[row, positions[:, None], head, taps[None, :]]
    store(place, gradient, mask)


def values_kernel(ids, weights, cotangent, d_values, *, offsets, length, width, shared=False):
    """d values[t] = sum over i of weights[t - offsets[i], i] * cotangent[t - offsets[i]]."""
    positions = padded_range(BLOCK, program_id(0) * BLOCK)
    row, head = program_id(1), program_id(2)
    lanes = padded_range(width)
    inside = (lanes < width)[None, :]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        readers, seen = visible(ids, row, positions, -offset, length)
        if shared:
            weight = weights[head, tap].astype(jnp.float32)
        else:
            weight = load_f32(weights.at[row, readers, head, tap], seen)[:, None]
        mask = seen[:, None] & inside
        total += load_f32(cotangent.at[row, readers[:, None], head, lanes[None, :]], mask) * weight
    place = d_values.at[row, positions[:, None], head, lanes[None, :]]
    mask = (positions < length)[:, None] & inside
    store(place, total, mask)


def weights_gradient(ids, row, positions, cotangent, read, offsets, length):
    """[positions, taps]: values[t + offsets[i]] . cotangent[t], 0 for a tap that sees nothing."""
    taps = taps_range(offsets)
    gradient = jnp.zeros((len(positions), len(taps)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = visible(ids, row, positions, offset, length)
        dots = jnp.where(seen, jnp.sum(read(reads, seen) * cotangent, axis=1), 0)
        gradient = jnp.where((taps == tap)[None, :], dots[:, None], gradient)
    return gradient
