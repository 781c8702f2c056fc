"""Visibility masks of the taps, in the lanes of the taps, from the segment ids of a row."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.bands import LANES, SUBLANES, WINDOW, Bands

I32 = jnp.int32
# Margin before and after a row, larger than any offset of a band.
EDGE = WINDOW


class Ids:
    """Segment ids of the rows of a grid step; without ids all taps inside the row are visible.

    Concatenated rows of `bands.period` positions are separated by distinct ids.

    Args:
      columns: scratch memory from `scratch`; None: all taps are visible.
      block: ids of several rows; None: one segment per row.
      first: index in `block` of the first row of the step.
    """

    def __init__(self, bands: Bands, columns=None, block=None, first=0):
        self.bands, self.columns, self.block, self.first = bands, columns, block, first

    def load(self, r) -> None:
        """Transposes the ids of row r of the step from lanes to rows, broadcast to all lanes."""
        if self.columns is None:
            return
        bands = self.bands
        edge = jnp.zeros((EDGE, LANES), I32)
        self.columns[:EDGE] = edge
        self.columns[EDGE + bands.length :] = edge
        for first in range(0, bands.length, LANES):
            size = min(LANES, bands.length - first)
            lanes = jnp.broadcast_to(self._lanes(r, first), (LANES, LANES))
            self.columns[EDGE + first : EDGE + first + size] = lanes.T[:size]

    def _lanes(self, r, first):
        """Returns the ids [1, 128] of row r from position `first`, distinct per shorter row."""
        bands = self.bands
        position = first + jax.lax.broadcasted_iota(I32, (1, LANES), 1)
        if self.block is None:
            ids = jnp.where(position < bands.length, 1, 0)
        else:
            block = self.block[:, first : first + LANES]
            own = jax.lax.broadcasted_iota(I32, block.shape, 0) == self.first + r
            ids = jnp.sum(jnp.where(own, block, 0), axis=0, keepdims=True)
        together = bands.length // bands.period
        if together == 1:
            return ids
        number = sum((position >= n * bands.period).astype(I32) for n in range(1, together))
        return jnp.where(ids == 0, 0, ids * together + number)

    def real(self, start=0, size=None):
        """Returns the mask [size, 128] of positions that are not padding, or None: all."""
        if self.columns is None:
            return None
        size = self.bands.length if size is None else size
        return self.columns[pl.ds(EDGE + start, size)] != 0

    def visible(self, bands: Bands, start, size, *, sign: int = 1):
        """Returns the mask [size, 128]: the lane's tap sees the position at sign * offset.

        Args:
          bands: geometry that defines the lanes.
          sign: -1 if `bands` has the opposite offsets.
        """
        if self.columns is None:
            return None
        here = self.columns[pl.ds(EDGE + start, size)]
        there = by_tap(bands, self.columns, start, size, sign=sign)
        # Padding reads nothing, not even itself: no position has the id -1.
        return there == jnp.where(here == 0, -1, here)


def by_tap(bands: Bands, memory, start, size, *, sign: int = 1):
    """Returns [size, 128]: row t is memory[EDGE + start + t + sign * offset] in a tap's lanes."""
    lane = jax.lax.broadcasted_iota(I32, (SUBLANES, LANES), 1) % WINDOW
    tap = (lane + bands.slot * WINDOW - bands.halo) % bands.slot
    tap = jnp.broadcast_to(tap[:1], (size, LANES))
    found = None
    for offset in bands.offsets:
        there = shifted_load(memory, start, EDGE + sign * offset, size)
        own = tap == offset % bands.slot
        found = there if found is None else jnp.where(own, there, found)
    return found


def shifted_load(memory, start, shift, size):
    """Loads rows start + shift to start + shift + size; `start` must be a multiple of 8.

    Static indices may have any value; dynamic ones must be aligned.
    """
    if isinstance(start, int):
        return memory[start + shift : start + shift + size]
    return memory.at[pl.ds(start, EDGE + size + EDGE)][shift : shift + size]


def scratch(bands: Bands):
    """Returns the scratch memory of `Ids`."""
    return pltpu.VMEM((bands.length + 2 * EDGE, LANES), I32)
