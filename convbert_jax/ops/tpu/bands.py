"""Data layout of the TPU kernels, which express convolutions over time as banded matrix products.

A row is processed in windows of 64 positions. The outputs of a window's *middle* depend only on
positions in the window, so the filters of one head form a band matrix:

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

import numpy as np

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
