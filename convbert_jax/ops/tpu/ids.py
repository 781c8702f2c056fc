"""Which positions the taps of a row may read, from its segment ids, in the lanes of the taps."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.bands import LANES, SUBLANES, WINDOW, Bands

I32 = jnp.int32
# Positions kept before and after a row: further than any tap of a band.
EDGE = WINDOW


class Ids:
    """The segment ids of a grid step's rows; without ids every tap inside the row is read.

    Rows of `bands.period` that share one are told apart by what is added to their ids.
    """

    def __init__(self, bands: Bands, columns=None, block=None, first=0):
        """columns: its scratch; block: ids of rows, of which row `first` is the step's first."""
        self.bands, self.columns, self.block, self.first = bands, columns, block, first

    def load(self, r) -> None:
        """Turns the ids of row r of the step from lanes to rows, the same in every lane."""
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
        """[1, 128] ids of row r from position `first`, those of shorter rows apart."""
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
        """[size, 128] where positions of the row are no padding, or None: everywhere."""
        if self.columns is None:
            return None
        size = self.bands.length if size is None else size
        return self.columns[pl.ds(EDGE + start, size)] != 0

    def visible(self, bands: Bands, start, size, *, sign: int = 1):
        """[size, 128] whether a position may read what is sign * offset of the lane's tap away.

        Args:
          bands: whose lanes; sign: -1 if they are those of the opposite offsets.
        """
        if self.columns is None:
            return None
        here = self.columns[pl.ds(EDGE + start, size)]
        there = by_tap(bands, self.columns, start, size, sign=sign)
        # Padding reads nothing, itself included: -1 is nobody's id.
        return there == jnp.where(here == 0, -1, here)


def by_tap(bands: Bands, memory, start, size, *, sign: int = 1):
    """[size, 128] in the lanes of each tap, row t: memory[EDGE + start + t + sign * offset]."""
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
    """Rows start + shift to start + shift + size; `start` is a multiple of 8, `shift` any number.

    What is known when the kernel is compiled is loaded from any row; the rest has to be aligned.
    """
    if isinstance(start, int):
        return memory[start + shift : start + shift + size]
    return memory.at[pl.ds(start, EDGE + size + EDGE)][shift : shift + size]


def scratch(bands: Bands):
    """What `Ids` keeps a row in."""
    return pltpu.VMEM((bands.length + 2 * EDGE, LANES), I32)
