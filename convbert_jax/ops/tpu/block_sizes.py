"""Rows per grid step of the TPU kernels: as many as fit into VMEM, but at least a few steps."""

import jax
import jax.numpy as jnp

from convbert_jax.ops.tpu.bands import LANES, WINDOW, Bands

MIB = 2**20
# Vector memory (VMEM) per core in bytes, by device kind, from JAX's table of chips.
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
    "TPU7x": 64 * MIB,
}
SMALLEST_VMEM = min(VMEM.values())
# A kernel may use this share of VMEM, and at most MOST_VMEM bytes: XLA cannot use the memory of a
# kernel while it runs. Compiler spills need SPILLS bytes more.
SHARE = 0.5
MOST_VMEM = 24 * MIB
SPILLS = 8 * MIB
# Short rows are concatenated up to this many positions, because each step has a fixed overhead of a
# few hundred cycles.
TOGETHER = 512
# With at least this many steps the pipeline hides the first load and the last store.
FEWEST_STEPS = 8
ROWS = (8, 4, 2, 1)  # divisors of 8, because segment ids are loaded for 8 rows at once
# Chips whose two cores are one device and share its grid.
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")

# (device kind, positions of a row, channels, kernel) -> rows per step. Overrides the rule of `rows`
# where benchmarks/layers/block_sizes.py found better values with the TPU compiler's cost model.
MEASURED: dict[tuple[str, int, int, str], int] = {}


def device_kind() -> str:
    """Returns the device kind of the current mesh, else of the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def cores() -> int:
    return 2 if device_kind() in TWO_CORES else 1


def budget() -> int:
    """Returns the bytes available for blocks and scratch memory of a kernel."""
    return min(int(SHARE * VMEM.get(device_kind(), SMALLEST_VMEM)), MOST_VMEM)


def vmem_limit() -> int:
    """Returns the VMEM limit in bytes that kernels are compiled with."""
    capacity = VMEM.get(device_kind(), SMALLEST_VMEM)
    return min(2 * budget() + SPILLS, int(0.9 * capacity))


def together(batch: int, length: int) -> int:
    """Returns how many rows of `length` positions to concatenate; divides `batch`."""
    most = max(1, TOGETHER // length)
    return max(number for number in range(1, most + 1) if batch % number == 0)


def rows(bands: Bands, batch: int, dtype, kernel: str, *, arrays: int, copies: int) -> int:
    """Returns the rows per grid step: a number of ROWS that divides `batch`.

    Args:
      batch: number of rows.
      dtype: dtype of the arrays.
      kernel: name of the kernel in MEASURED.
      arrays: number of inputs and outputs [rows, L, C]; each is double-buffered.
      copies: number of copies with halo in scratch memory.
    """
    known = MEASURED.get((device_kind(), bands.length, bands.channels, kernel))
    if known and batch % known == 0:
        return known
    size = jnp.dtype(dtype).itemsize
    row = bands.length * bands.channels * size
    fixed = copies * bands.padded_length * bands.channels * size
    fixed += (bands.length + 2 * WINDOW) * _slot_bytes(bands)
    most = min((budget() - fixed) // (2 * arrays * row), batch // FEWEST_STEPS)
    return max(number for number in ROWS if batch % number == 0 and number <= max(most, 1))


def longest(
    bands: Bands, dtype, *, arrays: int, copies: int, position: int = 0, fixed: int = 0
) -> int:
    """Returns the number of positions of the longest row that a kernel can be compiled for.

    Args:
      bands, dtype, arrays, copies: as in `rows`.
      position: additional bytes per position.
      fixed: bytes of parameters; 0: the kernel has no parameters, and needs less memory than this
        estimate (4,096 x 384 compile on a v5e), so the limit is raised by 15%.
    """
    of_channels = (2 * arrays + copies) * bands.channels * jnp.dtype(dtype).itemsize
    available = vmem_limit() - fixed if fixed else int(1.15 * vmem_limit())
    return available // (of_channels + _slot_bytes(bands) + position)


def _slot_bytes(bands: Bands) -> int:
    """Returns the bytes per position of filters and their gradients in float32."""
    return 4 * (bands.slot_lanes + LANES) * 4
