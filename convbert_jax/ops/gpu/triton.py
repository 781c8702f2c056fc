"""Helpers of the GPU kernels: launching, and masked loads and stores of blocks.

This is the only file that imports a GPU backend: Pallas for Triton, which requires Ampere or newer.
Its designated successor, Mosaic GPU, requires Hopper. jax 0.12 deprecates the Triton backend;
`requirements.txt` excludes the release that may drop it.

A program processes a block of positions of a row. Each tap loads its own shifted block; the K loads
overlap, so all but the first hit the cache. Invisible positions are masked in the load, so their
contents, even NaN, never enter a register. Triton's blocks are powers of two: head widths, taps and
channels are rounded up and masked.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BLOCK = 64  # default positions per program
WARPS = 4  # a [64, 64] float32 block takes 32 registers in each thread of 4 warps
TENSOR_CORE = 16  # minimum size of the axes of a product


def blocks(values, block: int = BLOCK) -> tuple[int, int]:
    """Returns the grid over positions and rows; only the first axis of a CUDA grid can be long."""
    return math.ceil(values.shape[1] / block), values.shape[0]


def block_range(program, block: int = BLOCK):
    """Returns the positions of a program."""
    return padded_range(block, program * block)


def call(kernel, grid, arrays, segment_ids, outputs, interpret, warps=WARPS):
    """Runs `kernel(segment ids or None, *arrays, *outputs)` with references to whole arrays."""
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


program_id = pl.program_id
power_of_two = pl.next_power_of_2


def padded_range(size: int, start=0):
    """Returns start, start + 1, ..., with `size` rounded up to a power of two."""
    return start + jnp.arange(power_of_two(size), dtype=jnp.int32)


def within(positions, length):
    """Returns the mask of positions that are in the row; None: all."""
    return None if length % len(positions) == 0 else positions < length


def visible(ids, row, positions, offset, length):
    """Returns the positions that a tap reads, and the mask of visible ones or None: all visible.

    Comparisons that cannot fail are omitted, since instructions limit the speed of these kernels.
    """
    reads, seen = positions + offset, within(positions, length)
    if offset < 0:
        seen = both(seen, reads >= 0)
    if offset > 0:
        seen = both(seen, reads < length)
    if ids is None:
        return reads, seen
    own = load(ids.at[row, positions], within(positions, length))
    other = load(ids.at[row, reads], seen)
    return reads, both(seen, (own == other) & (own != 0))


def both(*masks):
    """Returns the logical and of masks; None is True everywhere."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def lanes_within(lanes, count: int):
    """Returns the mask [1, lanes] of lanes below `count`; None: all."""
    return None if len(lanes) == count else (lanes < count)[None, :]


def column(mask):
    """Reshapes a mask [positions] to [positions, 1]."""
    return None if mask is None else mask[:, None]


def load(reference, mask):
    """Loads a block, 0 where masked."""
    return plgpu.load(reference, mask=mask, other=None if mask is None else 0)


def load_f32(reference, mask):
    """Loads a block as float32, 0 where masked."""
    return load(reference, mask).astype(jnp.float32)


def store(reference, value, mask) -> None:
    """Stores a block in the dtype of `reference`, except where masked."""
    plgpu.store(reference, value.astype(reference.dtype), mask=mask)


def dot(a, b):
    """Computes a product: tensor cores for 16-bit dtypes, full precision (not TF32) for float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
