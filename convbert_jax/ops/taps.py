"""Which positions the taps of a filter over time read, and which of them they may read."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def offsets(taps: int, *, dilation: int = 1, causal: bool = False) -> tuple[int, ...]:
    """Distance from a position to what each tap of its filter reads, in tap order (correlation).

    Centered: tap i reads i - taps // 2 steps of `dilation` away, so an even filter has one tap more
    on its left. Causal: the last tap reads the position itself, the others what precedes it.
    """
    center = taps - 1 if causal else taps // 2
    return tuple((i - center) * dilation for i in range(taps))


def shifted(x: Array, steps: Sequence[int]) -> list[Array]:
    """For each step, `x` moved along axis 1 so that position t holds x[:, t + step], 0 outside."""
    length = x.shape[1]
    left, right = max(0, -min(steps)), max(0, *steps)
    padded = jnp.pad(x, ((0, 0), (left, right)) + ((0, 0),) * (x.ndim - 2))
    return [padded[:, left + step : left + step + length] for step in steps]


def visible(segment_ids: Int[Array, "B L"], steps: Sequence[int]) -> list[Bool[Array, "B L"]]:
    """For each step, where position t + step is inside the row and in the segment of position t.

    Padding (segment 0) sees nothing and is seen by nothing.
    """
    real = segment_ids != 0
    return [(other == segment_ids) & real for other in shifted(segment_ids, steps)]
