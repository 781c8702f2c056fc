"""Prepares rows for the TPU kernels: pads, concatenates short rows, splits long rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import Bands, round_up

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
        self.together = block_sizes.together(batch, self.period)
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


def halo(offsets: Sequence[int]) -> int:
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
    overlap = halo(offsets)
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
