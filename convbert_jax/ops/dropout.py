"""Dropout masks and scale factors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from convbert_jax.ops import dispatch
from convbert_jax.ops.mesh import division


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout: zeroes entries with probability `rate` and scales the others to keep the mean.

    Attributes:
      rate: probability, rounded to a multiple of 1/256 from 1/256 to 255/256.
      key: random key of the mask.
    """

    rate: float
    key: Array

    @property
    def kept(self) -> int:
        """Expected number of kept entries out of 256."""
        return min(max(round((1.0 - self.rate) * 256), 1), 255)

    @property
    def factor(self) -> float:
        """Scale of kept entries."""
        return 256 / self.kept

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "..."]:
        """Draws a mask of `shape`, True for kept entries.

        With three or more axes, axis 0 is rows, which devices may split. Filters shared by all rows
        have two axes.
        """
        draw = functools.partial(_draw, self.kept)
        by_rows = len(shape) > 2
        keep = division.draw_by_rows(draw, self.key, shape) if by_rows else draw(self.key, shape)
        if dispatch.platform() == "cpu":
            # Otherwise XLA:CPU recomputes the random bits in every fusion that reads them.
            keep = jax.lax.optimization_barrier(keep)
        return keep


def dropout_of(rate: float, key: Array | None) -> Dropout | None:
    """Returns a `Dropout`, or None if nothing is dropped: without a key or at rate 0."""
    return None if key is None or rate == 0.0 else Dropout(rate, key)


def _draw(kept: int, key: Array, shape: tuple[int, ...]) -> Array:
    """Draws booleans that are True with probability `kept` / 256."""
    if dispatch.platform() == "tpu":  # the TPU generator makes bytes at no extra cost
        return jax.random.bits(key, shape, jnp.uint8) < kept
    # Random words are expensive, so each yields four entries, a quarter of the second last axis
    # apart, so that no data moves.
    *batch, rows, columns = shape
    words = jax.random.bits(key, (*batch, -(-rows // 4), columns))
    parts = [((words >> (8 * part)) & 0xFF) < kept for part in range(4)]
    return jnp.concatenate(parts, axis=-2)[..., :rows, :]
