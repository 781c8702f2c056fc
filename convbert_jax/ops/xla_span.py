"""Span-based dynamic convolution for XLA: projection, softmax, dynamic convolution, one by one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import xla
from convbert_jax.ops.products import dense
from convbert_jax.ops.softmax import softmax


def span_dynamic_conv(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"],
    values: Float[Array, "B L C"],
    kernel: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    segment_ids: Int[Array, "B L"] | None,
    heads: int,
    offsets: tuple[int, ...],
) -> Float[Array, "B L C"]:
    """LConv(values, softmax((query * span_key) kernel + bias)) (ConvBERT eq. 4)."""
    filters = weights(query, span_key, kernel, bias, heads)
    by_head = values.reshape(*values.shape[:2], heads, -1)
    return xla.dynamic_conv(by_head, filters, segment_ids, offsets).reshape(values.shape)


def weights(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"],
    kernel: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    heads: int,
) -> Float[Array, "B L H K"]:
    """Filters over all K taps of a head, visible or not; softmax in float32."""
    logits = dense(query * span_key, kernel, bias, jnp.float32)
    return softmax(logits.reshape(*query.shape[:2], heads, -1), None, query.dtype)
