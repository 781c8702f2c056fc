"""The definition of the dynamic convolution, to be read and to test against; not fast."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def dynamic_conv(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "B L H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: Sequence[int],
) -> Float[Array, "B L H D"]:
    """out[b, t, h] = sum over i of weights[b, t, h, i] * values[b, t + offsets[i], h]."""
    reads, allowed = _reads(values.shape[:2], segment_ids, offsets)
    windows = jnp.where(allowed[..., None, None], values[:, reads], 0)  # [B, L, K, H, D]
    weights = jnp.where(allowed[:, :, None], weights, 0)
    out = jnp.einsum("blkhd,blhk->blhd", windows, weights, preferred_element_type=jnp.float32)
    return out.astype(values.dtype)


def gradient(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "B L H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: Sequence[int],
    cotangent: Float[Array, "B L H D"],
) -> tuple[Float[Array, "B L H D"], Float[Array, "B L H K"]]:
    """Cotangents of values and weights, by hand: what each tap read gets its share of the output's.

    d values[b, t + offsets[i]] += weights[b, t, :, i] * cotangent[b, t]
    d weights[b, t, :, i] = values[b, t + offsets[i]] . cotangent[b, t]
    """
    reads, allowed = _reads(values.shape[:2], segment_ids, offsets)
    shares = jnp.einsum("blhk,blhd->blkhd", weights, cotangent, preferred_element_type=jnp.float32)
    shares = jnp.where(allowed[..., None, None], shares, 0)
    d_values = jnp.zeros(values.shape, jnp.float32).at[:, reads].add(shares)
    windows = values[:, reads]
    d_weights = jnp.einsum(
        "blkhd,blhd->blhk", windows, cotangent, preferred_element_type=jnp.float32
    )
    d_weights = jnp.where(allowed[:, :, None], d_weights, 0)
    return d_values.astype(values.dtype), d_weights.astype(weights.dtype)


def _reads(
    shape: tuple[int, int], segment_ids: Int[Array, "B L"] | None, offsets: Sequence[int]
) -> tuple[Int[Array, "L K"], Bool[Array, "B L K"]]:
    """The position each tap reads (clipped into the row) and whether it may."""
    batch, length = shape
    reads = jnp.arange(length)[:, None] + jnp.asarray(offsets)
    allowed = jnp.broadcast_to((reads >= 0) & (reads < length), (batch, *reads.shape))
    reads = jnp.clip(reads, 0, length - 1)
    if segment_ids is not None:
        own = segment_ids[..., None]
        allowed &= (segment_ids[:, reads] == own) & (own != 0)
    return reads, allowed
