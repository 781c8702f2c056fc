"""Where the TPU kernels put filters and rows so that a convolution over time is a matrix product.

A row is worked on in windows of 64 positions, of which the middle gets its results from the window
alone. There the filters of one head are a band matrix,

    band[r, c] = what the filter of middle position r has for window position c,

and two heads at a time fill the 128 lanes of the matrix unit: [band of head 2m | band of head 2m+1]
times their values stacked, [values with the channels of head 2m; values with those of head 2m+1].

Building the band costs one instruction per 8 positions: the taps of a head lie side by side in a
*slot* of a 128-lane vector, at lane halo + offset of the slot, slots of even heads in lanes 0-63
and of odd heads in 64-127, and a rotation of row r by r lanes brings each tap to its column.

Gradients have the same form. Of the values: what the filters of positions t that read position s
have for it is a filter again, whose slot is the *mirrored* one, lane halo - offset. Of the filters:
the band of cotangent times transpose(values), read back into mirrored slots by the same rotation if
the columns run backwards, since rows can only be rotated forward.
"""

import dataclasses
import functools

import numpy as np

WINDOW = 64
LANES = 128
SUBLANES = 8
# A halo of 24 leaves a middle of 16, the smallest aligned one.
LARGEST_REACH = 23


@dataclasses.dataclass(frozen=True)
class Bands:
    """Geometry of one convolution: a row of `length` positions, `heads` x `width` channels.

    `length` is a multiple of 16 and no offset further than LARGEST_REACH. A row may be several
    shorter ones of `period` positions put one behind the other, which read nothing of each other.
    """

    length: int
    heads: int
    width: int
    offsets: tuple[int, ...]  # of the taps, ascending
    period: int

    @functools.cached_property
    def halo(self) -> int:
        """Positions on either side of a middle, more than the furthest offset."""
        return round_up(max(abs(offset) for offset in self.offsets) + 1, SUBLANES)

    @property
    def middle(self) -> int:
        """Positions from one window to the next; a multiple of 16, aligned for 16-bit types."""
        return WINDOW - 2 * self.halo

    @property
    def windows(self) -> int:
        return -(-self.length // self.middle)

    @property
    def padded_length(self) -> int:
        """Rows of a memory in which position t is row halo + t and windows are whole."""
        return self.middle * (self.windows - 1) + WINDOW

    def boundaries(self, start: int) -> list[int]:
        """Where rows of `period` begin, counted from `start`, the first position of a middle.

        All of them where `start` is a number that only the running kernel knows.
        """
        if self.period == self.length:
            return []
        everywhere = range(0, self.length + 1, self.period)
        if isinstance(start, int):
            inside = range(start - self.halo + 1, start - self.halo + WINDOW)
            everywhere = [boundary for boundary in everywhere if boundary in inside]
        return [boundary - start for boundary in everywhere]

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @property
    def slot(self) -> int:
        return 2 * self.halo

    @property
    def slot_lanes(self) -> int:
        """Lanes of the slots of all heads, a multiple of 128."""
        pairs = -(-self.heads // 2)
        return -(-pairs // (WINDOW // self.slot)) * LANES

    def slot_start(self, head: int) -> tuple[int, int]:
        """(vector, first lane in it) of the slot of a head."""
        vector, place = divmod(head // 2, WINDOW // self.slot)
        return vector, head % 2 * WINDOW + place * self.slot

    def lanes(self, *, mirrored: bool = False) -> np.ndarray:
        """[H * K] the lane of each tap of each head, heads outermost."""
        lanes = []
        for head in range(self.heads):
            vector, start = self.slot_start(head)
            for offset in self.offsets:
                inside = self.halo + (-offset if mirrored else offset)
                lanes.append(vector * LANES + start + inside)
        return np.asarray(lanes)

    def placing(self, *, mirrored: bool = False) -> np.ndarray:
        """[H * K, slot lanes] 0/1 matrix that puts filters into their slots."""
        lanes = self.lanes(mirrored=mirrored)
        matrix = np.zeros((len(lanes), self.slot_lanes), np.float32)
        matrix[np.arange(len(lanes)), lanes] = 1
        return matrix

    def same_slot(self, *, mirrored: bool = False) -> np.ndarray:
        """[slot lanes, slot lanes] 0/1 matrix that sums the taps of a head into all its lanes."""
        used = self.placing(mirrored=mirrored).any(axis=0)
        lane = np.arange(self.slot_lanes)
        slot = lane // WINDOW * WINDOW + lane % WINDOW // self.slot
        return ((slot[:, None] == slot[None, :]) & used[:, None]).astype(np.float32)

    def blocks(self) -> list[tuple[int, int, list[int]]]:
        """(first channel, end, pairs of heads in them) of each vector of 128 channels."""
        blocks = []
        for start in range(0, self.channels, LANES):
            end = min(start + LANES, self.channels)
            pairs = {channel // self.width // 2 for channel in range(start, end)}
            blocks.append((start, end, sorted(pairs)))
        return blocks

    @functools.cached_property
    def classes(self) -> int:
        """So many copies of the values, each with every `classes`-th head, keep heads apart."""
        return 2 * max(len(pairs) for _, _, pairs in self.blocks())


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def tap_groups(offsets: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Splits taps into (base, offsets from it), each small enough for one band.

    Nearly every filter is one group with base 0.
    """
    if max(abs(offset) for offset in offsets) <= LARGEST_REACH:
        return [(0, offsets)]
    found = []
    rest = offsets
    while rest:
        members = [offset for offset in rest if offset - rest[0] <= 2 * LARGEST_REACH]
        base = (members[0] + members[-1]) // 2
        found.append((base, tuple(offset - base for offset in members)))
        rest = rest[len(members) :]
    return found
