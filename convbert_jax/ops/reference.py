"""Reference implementations of the convolutions, for reading and testing; not fast.

Sums are float32, or float64 for float64 inputs under `jax.enable_x64`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def dynamic_conv(
    values: Float[Array, "B L H D"],
    filters: Float[Array, "B L H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: Sequence[int],
) -> Float[Array, "B L H D"]:
    """Computes out[b, t, h] = sum over i of filters[b, t, h, i] * values[b, t + offsets[i], h]."""
    reads, allowed = _reads(values.shape[:2], segment_ids, offsets)
    windows = jnp.where(allowed[..., None, None], values[:, reads], 0)  # [B, L, K, H, D]
    filters = jnp.where(allowed[:, :, None], filters, 0)
    sums = _sums(values)
    out = jnp.einsum("blkhd,blhk->blhd", windows, filters, preferred_element_type=sums)
    return out.astype(values.dtype)


def span_dynamic_conv(query, span_key, values, projection, bias, segment_ids, heads, offsets):
    """Computes LConv(values, softmax((query * span_key) projection + bias)) (ConvBERT eq. 4)."""
    sums = _sums(values)
    products = (query if span_key is None else query * span_key).astype(sums)
    logits = jnp.matmul(products, projection.astype(sums), precision="highest")
    by_head = (*values.shape[:2], heads, -1)
    filters = jax.nn.softmax((logits + bias.astype(sums)).reshape(by_head))
    filters = filters.astype(values.dtype)
    return dynamic_conv(values.reshape(by_head), filters, segment_ids, offsets).reshape(
        values.shape
    )


def depthwise_conv(
    x: Float[Array, "B L C"],
    filters: Float[Array, "K C"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: Sequence[int],
) -> Float[Array, "B L C"]:
    """Computes out[b, t, c] = sum over i of filters[i, c] * x[b, t + offsets[i], c]."""
    reads, allowed = _reads(x.shape[:2], segment_ids, offsets)
    windows = jnp.where(allowed[..., None], x[:, reads], 0)  # [B, L, K, C]
    sums = _sums(x)
    products = windows.astype(sums) * filters.astype(sums)
    return jnp.where(allowed[..., None], products, 0).sum(axis=2).astype(x.dtype)


def gradient(
    values: Float[Array, "B L H D"],
    filters: Float[Array, "B L H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: Sequence[int],
    cotangent: Float[Array, "B L H D"],
) -> tuple[Float[Array, "B L H D"], Float[Array, "B L H K"]]:
    """Returns the cotangents of values and filters of `dynamic_conv`, written by hand.

    d values[b, t + offsets[i]] += filters[b, t, :, i] * cotangent[b, t]
    d filters[b, t, :, i] = values[b, t + offsets[i]] . cotangent[b, t]
    """
    reads, allowed = _reads(values.shape[:2], segment_ids, offsets)
    shares = jnp.einsum("blhk,blhd->blkhd", filters, cotangent, preferred_element_type=jnp.float32)
    shares = jnp.where(allowed[..., None, None], shares, 0)
    d_values = jnp.zeros(values.shape, jnp.float32).at[:, reads].add(shares)
    windows = values[:, reads]
    d_filters = jnp.einsum(
        "blkhd,blhd->blhk", windows, cotangent, preferred_element_type=jnp.float32
    )
    d_filters = jnp.where(allowed[:, :, None], d_filters, 0)
    return d_values.astype(values.dtype), d_filters.astype(filters.dtype)


def _sums(array: Array) -> jnp.dtype:
    return jnp.promote_types(array.dtype, jnp.float32)


def _reads(
    shape: tuple[int, int], segment_ids: Int[Array, "B L"] | None, offsets: Sequence[int]
) -> tuple[Int[Array, "L K"], Bool[Array, "B L K"]]:
    """Returns the position that each tap reads (clipped to the row) and whether it is visible."""
    batch, length = shape
    reads = jnp.arange(length)[:, None] + jnp.asarray(offsets)
    allowed = jnp.broadcast_to((reads >= 0) & (reads < length), (batch, *reads.shape))
    reads = jnp.clip(reads, 0, length - 1)
    if segment_ids is not None:
        own = segment_ids[..., None]
        allowed &= (segment_ids[:, reads] == own) & (own != 0)
    return reads, allowed
