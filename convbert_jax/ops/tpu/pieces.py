"""Rows too long for on-chip memory as several shorter ones that overlap by what the taps reach."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from convbert_jax.ops.tpu.bands import round_up

MULTIPLE = 16  # positions: the sublanes of a 16-bit vector


def halo(offsets: Sequence[int]) -> int:
    return max(abs(offset) for offset in offsets)


def in_pieces(
    kernel: Callable[..., jax.Array],
    arrays: Sequence[Any],
    of_rows: Sequence[int],
    offsets: Sequence[int],
    longest: int,
) -> jax.Array:
    """kernel(*arrays), [B, L, ...], of rows of at most `longest` positions.

    Args:
      arrays: of which None is passed on.
      of_rows: places of those that are [B, L, ...]; all others are the same for each piece.
      longest: more than four times what the taps reach, or that is taken.
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
