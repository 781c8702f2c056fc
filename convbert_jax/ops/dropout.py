"""Which entries of an array dropout keeps, and what it multiplies those by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from convbert_jax.ops import dispatch
from convbert_jax.ops.mesh import division


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Zeroes entries with probability `rate`, in steps of 1/256 from 1/256 to 255/256, and scales
    the others to keep the mean.

    Attributes:
      key: what is drawn is a function of it.
    """

    rate: float
    key: Array

    @property
    def kept(self) -> int:
        """How many of 256 entries are kept, on average."""
        return min(max(round((1.0 - self.rate) * 256), 1), 255)

    @property
    def factor(self) -> float:
        """What those are multiplied by."""
        return 256 / self.kept

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "..."]:
        """Which entries of an array of `shape` are kept.

        With three axes and more the first is of rows, which devices may divide; filters that all
        rows share have two.
        """
        draw = functools.partial(_draw, self.kept)
        by_rows = len(shape) > 2
        keep = division.draw_by_rows(draw, self.key, shape) if by_rows else draw(self.key, shape)
        if dispatch.platform() == "cpu":
            # Else XLA:CPU computes the random bits again in every fusion that reads them: 28% of a
            # layer's forward and backward, instead of 9%.
            keep = jax.lax.optimization_barrier(keep)
        return keep


def dropout_of(rate: float, key: Array | None) -> Dropout | None:
    """None where nothing is dropped: without a key, and at rate 0."""
    return None if key is None or rate == 0.0 else Dropout(rate, key)


def _draw(kept: int, key: Array, shape: tuple[int, ...]) -> Array:
    """True with probability `kept` / 256."""
    if dispatch.platform() == "tpu":  # whose generator makes bytes as well as words
        return jax.random.bits(key, shape, jnp.uint8) < kept
    # Four come from one random word, as those are what costs; they are a quarter of the last axis
    # but one apart, so nothing moves.
    *batch, rows, columns = shape
    words = jax.random.bits(key, (*batch, -(-rows // 4), columns))
    parts = [((words >> (8 * part)) & 0xFF) < kept for part in range(4)]
    return jnp.concatenate(parts, axis=-2)[..., :rows, :]
