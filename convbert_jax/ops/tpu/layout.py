"""Data layout of the TPU kernels: bands, rows and block sizes, and operations within kernels.

Convolutions over time are banded matrix products. A row is processed in windows of 64 positions.
The outputs of a window's *middle* depend only on positions in the window, so the filters of one
head form a band matrix:

  band[r, c] = weight that the filter of middle position r gives to window position c

Two heads at a time fill the 128 lanes of the matrix unit: [band of head 2m | band of head 2m+1]
times the stacked values [values of head 2m, other channels 0; values of head 2m+1, others 0].

Building the band costs one instruction per 8 positions. The taps of a head lie side by side in a
*slot* of a 128-lane vector, at lane halo + offset from the start of the slot. Even heads have slots
in lanes 0-63, odd heads in lanes 64-127. Rotating row r by r lanes moves each tap to its column.

Gradients have the same form:

- Values: the weights that positions t give to position s are a filter with the *opposite* offsets.
- Filters: the band of cotangent times transpose(values), moved into slots of the opposite offsets
  by the same rotation. Rows can only rotate forward, so the columns run backwards.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

F32, I32 = jnp.float32, jnp.int32


WINDOW = 64
LANES = 128
SUBLANES = 8
# Middles are multiples of the sublanes of a 16-bit vector.
SMALLEST_MIDDLE = 16
# Maximum distance from the first to the last tap of a group; centered, it leaves room for a middle.
LARGEST_SPAN = 46


@dataclasses.dataclass(frozen=True)
class Bands:
    """Geometry of one convolution: a row of `length` positions and `heads` x `width` channels.

    `length` is a multiple of 16, and the offsets fit into a band (`fits`). A row may be a
    concatenation of shorter rows of `period` positions, which do not read each other.
    """

    length: int
    heads: int
    width: int
    offsets: tuple[int, ...]  # ascending
    period: int

    @functools.cached_property
    def opposite(self) -> "Bands":
        """Geometry of the convolution with negated offsets."""
        return dataclasses.replace(self, offsets=tuple(-offset for offset in self.offsets[::-1]))

    @property
    def halo(self) -> int:
        """Positions of a window before its middle."""
        return halos(self.offsets)[0]

    @property
    def middle(self) -> int:
        """Positions of the middle, the stride of the windows; the same for opposite offsets."""
        return (WINDOW - sum(halos(self.offsets))) // SMALLEST_MIDDLE * SMALLEST_MIDDLE

    @property
    def windows(self) -> int:
        return -(-self.length // self.middle)

    @property
    def padded_length(self) -> int:
        """Rows of a buffer with position t at row halo + t and complete windows."""
        return self.middle * (self.windows - 1) + WINDOW

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @functools.cached_property
    def slot(self) -> int:
        """Lanes per slot, a multiple of 8, where rotations start."""
        return round_up(self.offsets[-1] - self.offsets[0] + 1, SUBLANES)

    @property
    def slots(self) -> int:
        """Number of slots in each half of a vector."""
        return (WINDOW - 1 - self.halo - max(0, self.offsets[-1])) // self.slot + 1

    @property
    def vectors(self) -> int:
        """Number of 128-lane vectors with the slots of all heads."""
        return -(-self.heads // (2 * self.slots))

    @property
    def slot_lanes(self) -> int:
        return self.vectors * LANES

    def slot_start(self, head: int) -> tuple[int, int]:
        """Returns the (vector, first lane) of the slot of a head."""
        vector, place = divmod(head // 2, self.slots)
        return vector, head % 2 * WINDOW + place * self.slot

    def lanes(self) -> np.ndarray:
        """Returns the lane of each tap of each head, [H * K], heads outermost."""
        lanes = []
        for head in range(self.heads):
            vector, start = self.slot_start(head)
            lanes += [vector * LANES + start + self.halo + offset for offset in self.offsets]
        return np.asarray(lanes)

    def placing(self, *, mirrored: bool = False) -> np.ndarray:
        """Returns the 0/1 matrix [H * K, slot lanes] that moves filters into their slots.

        Args:
          mirrored: the filters belong to the opposite offsets, so their taps are reversed.
        """
        lanes = self.lanes()
        if mirrored:
            lanes = lanes.reshape(self.heads, -1)[:, ::-1].ravel()
        matrix = np.zeros((len(lanes), self.slot_lanes), np.float32)
        matrix[np.arange(len(lanes)), lanes] = 1
        return matrix

    def same_slot(self) -> np.ndarray:
        """Returns the 0/1 matrix [128, 128] that sums the taps of a head into all its lanes."""
        place = np.full(LANES, -1)
        for head in range(2 * self.slots):
            half, start = head % 2 * WINDOW, head // 2 * self.slot + self.halo
            place[[half + start + offset for offset in self.offsets]] = head
        return ((place[:, None] == place[None, :]) & (place[:, None] >= 0)).astype(np.float32)

    def blocks(self) -> list[tuple[int, int, list[int]]]:
        """Returns (first channel, end, pairs of heads) of each block of 128 channels."""
        blocks = []
        for start in range(0, self.channels, LANES):
            end = min(start + LANES, self.channels)
            pairs = {channel // self.width // 2 for channel in range(start, end)}
            blocks.append((start, end, sorted(pairs)))
        return blocks


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def halos(offsets: tuple[int, ...]) -> tuple[int, int]:
    """Returns the positions of a window before and after its middle, multiples of 8.

    A halo exceeds the reach of the taps, so that columns of a window can run backwards from 64 to
    1. It is 0 on a side that no tap reaches.
    """
    before, after = -min(offsets), max(offsets)
    if not before and not after:
        return SUBLANES, 0
    return tuple(round_up(reach + 1, SUBLANES) if reach > 0 else 0 for reach in (before, after))


def fits(offsets: tuple[int, ...]) -> bool:
    """Returns whether a window has a middle, so that one band holds all taps."""
    return sum(halos(offsets)) <= WINDOW - SMALLEST_MIDDLE


def tap_groups(offsets: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Splits taps into groups (base, offsets relative to base) that each fit into one band.

    Nearly every filter is one group with base 0.
    """
    if fits(offsets):
        return [(0, offsets)]
    found = []
    rest = offsets
    while rest:
        members = [offset for offset in rest if offset - rest[0] <= LARGEST_SPAN]
        base = (members[0] + members[-1]) // 2
        found.append((base, tuple(offset - base for offset in members)))
        rest = rest[len(members) :]
    return found


# --- Rows per grid step: as many as fit into VMEM, but at least a few steps ---


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

# (device kind, positions of a row, channels, kernel) -> rows per step. Overrides the rule of
# `rows_per_step` where benchmarks/layers/block_sizes.py found better values with the TPU compiler's
# cost model.
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


def rows_together(batch: int, length: int) -> int:
    """Returns how many rows of `length` positions to concatenate; divides `batch`."""
    most = max(1, TOGETHER // length)
    return max(number for number in range(1, most + 1) if batch % number == 0)


def rows_per_step(bands: Bands, batch: int, dtype, kernel: str, *, arrays: int, copies: int) -> int:
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
      bands, dtype, arrays, copies: as in `rows_per_step`.
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


# --- Rows: padded, short ones concatenated, long ones split ---


MULTIPLE = 16  # positions: the sublanes of a 16-bit vector


class Rows:
    """Layout of `batch` rows of `length` positions, padded to `period` and concatenated.

    Attributes:
      together: number of rows concatenated to one.
      batch_together, length_together: number and positions of the concatenated rows.
    """

    def __init__(self, batch: int, length: int):
        self.batch, self.length = batch, length
        self.period = round_up(length, MULTIPLE)
        self.together = rows_together(batch, self.period)
        self.batch_together = batch // self.together
        self.length_together = self.period * self.together

    def out(self, array: Array) -> Array:
        """Reshapes [B, L, ...] to [B / together, period * together, channels], padded with 0."""
        array = array.reshape(self.batch, self.length, -1)
        array = jnp.pad(array, ((0, 0), (0, self.period - self.length), (0, 0)))
        return array.reshape(self.batch_together, self.length_together, -1)

    def back(self, array: Array) -> Array:
        """Reshapes the result of `out` to [B, L, channels], without padding."""
        return array.reshape(self.batch, self.period, -1)[:, : self.length]


class BandRows(Rows):
    """Rows with the band geometry of a convolution."""

    def __init__(self, shape: tuple[int, int, int, int], offsets: tuple[int, ...]):
        batch, length, heads, width = shape
        super().__init__(batch, length)
        self.bands = Bands(self.length_together, heads, width, offsets, self.period)

    def ids(self, segment_ids: Int[Array, "B L"] | None) -> Int[Array, "rows L"] | None:
        return None if segment_ids is None else self.out(segment_ids)[..., 0]


def reach(offsets: Sequence[int]) -> int:
    return max(abs(offset) for offset in offsets)


def in_pieces(
    kernel: Callable[..., Array],
    arrays: Sequence[Any],
    of_rows: Sequence[int],
    offsets: Sequence[int],
    longest: int,
) -> Array:
    """Runs kernel(*arrays) on rows of at most `longest` positions.

    Longer rows are split into pieces that overlap by the reach of the taps.

    Args:
      kernel: returns [B, L, ...].
      arrays: arguments of `kernel`; None is passed through.
      of_rows: indices of the arrays [B, L, ...]; the others are the same for each piece.
      offsets: offsets of the taps.
      longest: maximum number of positions, raised to four times the reach of the taps.

    Returns:
      The result for whole rows, [B, L, ...].
    """
    batch, length = arrays[0].shape[:2]
    overlap = reach(offsets)
    longest = max(longest, 4 * overlap)
    if length <= longest:
        return kernel(*arrays)
    count = -(-length // (longest - 2 * overlap))
    size = round_up(-(-length // count), MULTIPLE)
    after = count * size - length + overlap

    def cut(array):
        array = jnp.pad(array, ((0, 0), (overlap, after), *((0, 0),) * (array.ndim - 2)))
        parts = [array[:, i * size : (i + 1) * size + 2 * overlap] for i in range(count)]
        return jnp.stack(parts, axis=1).reshape(batch * count, -1, *array.shape[2:])

    cut_up = [
        cut(array) if place in of_rows and array is not None else array
        for place, array in enumerate(arrays)
    ]
    out = kernel(*cut_up)[:, overlap : overlap + size]
    return out.reshape(batch, count * size, *out.shape[2:])[:, :length]


# --- Operations within kernels ---


def masked(mask, x):
    """Returns x where the mask is True or None, else 0."""
    return x if mask is None else jnp.where(mask, x, 0.0)


def masked_bitwise(mask, x):
    """Computes `masked` bitwise, for float32 inputs of a product, even by way of memory.

    The compiler fuses a select into a masked product, on which its profiler aborts (libtpu 0.0.52).
    """
    if mask is None:
        return x
    return pltpu.bitcast(pltpu.bitcast(x, I32) & jnp.where(mask, -1, 0), F32)


def dot(a, b, *, contract=(1, 0)):
    """Computes a product with f32 accumulation; f32 factors are not rounded to bf16."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=F32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == F32 else None,
    )
