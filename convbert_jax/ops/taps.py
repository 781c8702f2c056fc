"""Offsets of the taps of a filter over time, and the mask of the positions they may read."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def offsets(taps: int, *, dilation: int = 1, causal: bool = False) -> tuple[int, ...]:
    """Returns the offset that each tap reads at, relative to its position (correlation order).

    Centered: tap i reads at (i - taps // 2) * dilation, so an even filter has one more tap on the
    left. Causal: the last tap reads the position itself, the others earlier positions.
    """
    center = taps - 1 if causal else taps // 2
    return tuple((i - center) * dilation for i in range(taps))


def shifted(x: Array, steps: Sequence[int]) -> list[Array]:
    """Returns `x` shifted along axis 1 by each step: position t holds x[:, t + step], 0 outside."""
    length = x.shape[1]
    left, right = max(0, -min(steps)), max(0, *steps)
    padded = jnp.pad(x, ((0, 0), (left, right)) + ((0, 0),) * (x.ndim - 2))
    return [padded[:, left + step : left + step + length] for step in steps]


def visible(segment_ids: Int[Array, "B L"], steps: Sequence[int]) -> list[Bool[Array, "B L"]]:
    """Returns for each step whether position t + step is in the row and in the segment of t.

    Padding (segment 0) neither sees nor is seen.
    """
    real = segment_ids != 0
    return [(other == segment_ids) & real for other in shifted(segment_ids, steps)]
