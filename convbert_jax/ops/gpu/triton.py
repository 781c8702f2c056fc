"""What the GPU kernels share: calling one, and reading and writing blocks with masks.

This is the only file that imports a GPU backend, Pallas' for Triton, which needs Ampere or newer.
Triton rather than its designated successor, Mosaic GPU, because that one needs Hopper; jax 0.12
warns that Triton will go, and `requirements.txt` stops below the release that may drop it.

A program works on a block of positions of a row. Each tap reads its own shifted block: the K reads
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

BLOCK = 64  # positions of a program, where no other number is measured to be better
WARPS = 4  # the threads of 4 warps hold a [64, 64] float32 block in 32 registers each
TENSOR_CORE = 16  # least size of a side of a product


def blocks(values, block: int = BLOCK) -> tuple[int, int]:
    """Programs over positions and rows. CUDA lets the first axis of a grid be long."""
    return math.ceil(values.shape[1] / block), values.shape[0]


def block_range(program, block: int = BLOCK):
    """The positions of a program."""
    return padded_range(block, program * block)


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


program_id = pl.program_id
power_of_two = pl.next_power_of_2


def padded_range(size: int, start=0):
    """start, start + 1, ...: `size` of them, rounded up to a power of two."""
    return start + jnp.arange(power_of_two(size), dtype=jnp.int32)


def within(positions, length):
    """Which positions of a program are in the row; None: all."""
    return None if length % len(positions) == 0 else positions < length


def visible(ids, row, positions, offset, length):
    """What a position reads through a tap, and whether it may; None: all do.

    Only comparisons that can fail are made: these kernels are bound by their instructions.
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
    """Where all are true; None is true everywhere."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def lanes_within(lanes, count: int):
    """[1, lanes] which of them hold channels; None: all, where lanes are as many."""
    return None if len(lanes) == count else (lanes < count)[None, :]


def column(mask):
    """[positions, 1] of [positions]."""
    return None if mask is None else mask[:, None]


def load(reference, mask):
    """0 where masked."""
    return plgpu.load(reference, mask=mask, other=None if mask is None else 0)


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
