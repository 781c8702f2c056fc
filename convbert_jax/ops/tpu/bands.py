"""Where the TPU kernels put filters and rows so that a convolution over time is a matrix product.

A row is worked on in windows of 64 positions, of which the middle gets its results from the window
alone. There the filters of one head are a band matrix,

    band[r, c] = what the filter of middle position r has for window position c,

and two heads at a time fill the 128 lanes of the matrix unit: [band of head 2m | band of head 2m+1]
times their values stacked, [values with the channels of head 2m; values with those of head 2m+1].

Building the band costs one instruction per 8 positions: the taps of a head lie side by side in a
*slot* of a 128-lane vector, at lane halo + offset from where it begins, slots of even heads in
lanes 0-63 and of odd heads in 64-127, and a rotation of row r by r lanes brings each tap to its
column.

Gradients have the same form. Of the values: what the filters of positions t that read position s
have for it is a filter again, of the *opposite* offsets. Of the filters: the band of cotangent
times transpose(values), read back into slots of the opposite offsets by the same rotation if the
columns run backwards, since rows can only be rotated forward.
"""

import dataclasses
import functools

import numpy as np

WINDOW = 64
LANES = 128
SUBLANES = 8
# What windows are cut by: the sublanes of a 16-bit vector.
SMALLEST_MIDDLE = 16
# From the first to the last tap of a group: half of it on either side leaves a middle.
LARGEST_SPAN = 46


@dataclasses.dataclass(frozen=True)
class Bands:
    """Geometry of one convolution: a row of `length` positions, `heads` x `width` channels.

    `length` is a multiple of 16, and the offsets fit a band (`fits`). A row may be several shorter
    ones of `period` positions put one behind the other, which read nothing of each other.
    """

    length: int
    heads: int
    width: int
    offsets: tuple[int, ...]  # of the taps, ascending
    period: int

    @functools.cached_property
    def opposite(self) -> "Bands":
        """Of a convolution that reads -offset where this one reads offset."""
        return dataclasses.replace(self, offsets=tuple(-offset for offset in self.offsets[::-1]))

    @property
    def halo(self) -> int:
        """Positions of a window before its middle, as far as the taps reach back."""
        return halos(self.offsets)[0]

    @property
    def middle(self) -> int:
        """Positions from one window to the next, the same for the opposite offsets."""
        return (WINDOW - sum(halos(self.offsets))) // SMALLEST_MIDDLE * SMALLEST_MIDDLE

    @property
    def windows(self) -> int:
        return -(-self.length // self.middle)

    @property
    def padded_length(self) -> int:
        """Rows of a memory in which position t is row halo + t and windows are whole."""
        return self.middle * (self.windows - 1) + WINDOW

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @functools.cached_property
    def slot(self) -> int:
        """Lanes from one slot to the next; rotations start at multiples of 8 lanes."""
        return round_up(self.offsets[-1] - self.offsets[0] + 1, SUBLANES)

    @property
    def slots(self) -> int:
        """Slots in each half of a vector."""
        return (WINDOW - 1 - self.halo - max(0, self.offsets[-1])) // self.slot + 1

    @property
    def vectors(self) -> int:
        """Vectors of 128 lanes with the slots of all heads."""
        return -(-self.heads // (2 * self.slots))

    @property
    def slot_lanes(self) -> int:
        return self.vectors * LANES

    def slot_start(self, head: int) -> tuple[int, int]:
        """(vector, first lane in it) of the slot of a head."""
        vector, place = divmod(head // 2, self.slots)
        return vector, head % 2 * WINDOW + place * self.slot

    def lanes(self) -> np.ndarray:
        """[H * K] the lane of each tap of each head, heads outermost."""
        lanes = []
        for head in range(self.heads):
            vector, start = self.slot_start(head)
            lanes += [vector * LANES + start + self.halo + offset for offset in self.offsets]
        return np.asarray(lanes)

    def placing(self, *, mirrored: bool = False) -> np.ndarray:
        """[H * K, slot lanes] 0/1 matrix that puts filters into their slots.

        mirrored: the filters are of the opposite offsets, as far away on the other side.
        """
        lanes = self.lanes()
        if mirrored:
            lanes = lanes.reshape(self.heads, -1)[:, ::-1].ravel()
        matrix = np.zeros((len(lanes), self.slot_lanes), np.float32)
        matrix[np.arange(len(lanes)), lanes] = 1
        return matrix

    def same_slot(self) -> np.ndarray:
        """[128, 128] 0/1 matrix that sums the taps of a head into all its lanes, in any vector."""
        place = np.full(LANES, -1)
        for head in range(2 * self.slots):
            half, start = head % 2 * WINDOW, head // 2 * self.slot + self.halo
            place[[half + start + offset for offset in self.offsets]] = head
        return ((place[:, None] == place[None, :]) & (place[:, None] >= 0)).astype(np.float32)

    def blocks(self) -> list[tuple[int, int, list[int]]]:
        """(first channel, end, pairs of heads in them) of each vector of 128 channels."""
        blocks = []
        for start in range(0, self.channels, LANES):
            end = min(start + LANES, self.channels)
            pairs = {channel // self.width // 2 for channel in range(start, end)}
            blocks.append((start, end, sorted(pairs)))
        return blocks


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def halos(offsets: tuple[int, ...]) -> tuple[int, int]:
    """Positions of a window before and after its middle, multiples of 8.

    More than the taps reach, so that columns of a window may run backwards from 64 to 1; none on a
    side that no tap reaches.
    """
    before, after = -min(offsets), max(offsets)
    if not before and not after:
        return SUBLANES, 0
    return tuple(round_up(reach + 1, SUBLANES) if reach > 0 else 0 for reach in (before, after))


def fits(offsets: tuple[int, ...]) -> bool:
    """Whether a window leaves a middle, so that one band takes all taps."""
    return sum(halos(offsets)) <= WINDOW - SMALLEST_MIDDLE


def tap_groups(offsets: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Splits taps into (base, offsets from it), each small enough for one band.

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
