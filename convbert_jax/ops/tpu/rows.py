"""Rows as the TPU kernels take them: aligned and, if short, put one behind the other."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import Bands, round_up

MULTIPLE = 16  # positions: the sublanes of a 16-bit vector


class Rows:
    """`batch` rows of `length` positions, padded to `period`, `together` of them one row.

    Attributes:
      batch_together, length_together: how many rows that makes, and of how many positions.
    """

    def __init__(self, batch: int, length: int):
        self.batch, self.length = batch, length
        self.period = round_up(length, MULTIPLE)
        self.together = block_sizes.together(batch, self.period)
        self.batch_together = batch // self.together
        self.length_together = self.period * self.together

    def out(self, array: Array) -> Array:
        """[B, L, ...] as [B / together, L' * together, channels]; padding is 0."""
        array = array.reshape(self.batch, self.length, -1)
        array = jnp.pad(array, ((0, 0), (0, self.period - self.length), (0, 0)))
        return array.reshape(self.batch_together, self.length_together, -1)

    def back(self, array: Array) -> Array:
        """What `out` made, as [B, L, channels]."""
        return array.reshape(self.batch, self.period, -1)[:, : self.length]


class BandRows(Rows):
    """With the geometry of a convolution over them."""

    def __init__(self, shape: tuple[int, int, int, int], offsets: tuple[int, ...]):
        batch, length, heads, width = shape
        super().__init__(batch, length)
        self.bands = Bands(self.length_together, heads, width, offsets, self.period)

    def ids(self, segment_ids: Int[Array, "B L"] | None) -> Int[Array, "rows L"] | None:
        return None if segment_ids is None else self.out(segment_ids)[..., 0]
