"""How many rows a grid step of a TPU kernel takes: as many as its memory holds, in a few steps."""

import jax
import jax.numpy as jnp

from convbert_jax.ops.tpu.bands import LANES, WINDOW, Bands

MIB = 2**20
# On-chip vector memory of a core, by device kind (jax's own table of chips).
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
# A kernel may take so much of it, and no more than MOST_VMEM: what a kernel asks for is kept from
# XLA's other uses of this memory while it runs. The compiler's spills come on top.
SHARE = 0.5
MOST_VMEM = 24 * MIB
SPILLS = 8 * MIB
# Short rows are put one behind the other up to so many positions: a step over them costs the same
# few hundred cycles as one over a long row.
TOGETHER = 512
# A grid this long hides the first load and the last store behind the work of the other steps.
FEWEST_STEPS = 8
ROWS = (8, 4, 2, 1)  # divisors of 8: the ids of 8 rows come at once
# Their two cores are one device and share its grid.
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")

# (device kind, positions of a row, channels, kernel) -> rows a step, where
# benchmarks/layers/block_sizes.py found better than the rule below by the TPU compiler's model.
MEASURED: dict[tuple[str, int, int, str], int] = {}


def device_kind() -> str:
    """Of the mesh that is being compiled for, else of the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def cores() -> int:
    return 2 if device_kind() in TWO_CORES else 1


def budget() -> int:
    """Bytes that the blocks and scratch memory of a kernel may take."""
    return min(int(SHARE * VMEM.get(device_kind(), SMALLEST_VMEM)), MOST_VMEM)


def vmem_limit() -> int:
    """Bytes a kernel is compiled for."""
    capacity = VMEM.get(device_kind(), SMALLEST_VMEM)
    return min(2 * budget() + SPILLS, int(0.9 * capacity))


def together(batch: int, length: int) -> int:
    """How many rows of `length` positions to put one behind the other; divides `batch`."""
    most = max(1, TOGETHER // length)
    return max(number for number in range(1, most + 1) if batch % number == 0)


def rows(bands: Bands, batch: int, dtype, kernel: str, *, arrays: int, copies: int) -> int:
    """Rows a grid step takes; one of ROWS that divides `batch`.

    Args:
      arrays: inputs and outputs of [rows, L, C], each held twice: one in work, one on its way.
      copies: copies with halo in scratch memory.
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
    """Positions of the longest row that a kernel can be compiled for; arguments as of `rows`.

    Args:
      position: bytes that a kernel needs for each position besides.
      fixed: bytes that do not depend on the row, those of parameters; 0: the kernel has none, and
        needs less than what is summed up here (v5e: 4,096 x 384 compile).
    """
    of_channels = (2 * arrays + copies) * bands.channels * jnp.dtype(dtype).itemsize
    available = vmem_limit() - fixed if fixed else int(1.15 * vmem_limit())
    return available // (of_channels + _slot_bytes(bands) + position)


def _slot_bytes(bands: Bands) -> int:
    """Of filters and their gradients, in float32, for a position."""
    return 4 * (bands.slot_lanes + LANES) * 4
