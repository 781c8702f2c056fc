"""Span-based dynamic convolution in XLA: projection, softmax and dynamic convolution in turn."""

import jax.numpy as jnp

from convbert_jax.ops.mesh import division
from convbert_jax.ops.products import dense
from convbert_jax.ops.softmax import softmax
from convbert_jax.ops.xla import plain


def span_dynamic_conv(query, span_key, values, projection, bias, segment_ids, heads, offsets):
    filters = span_filters(query, span_key, projection, bias, heads, query.dtype)
    by_head = values.reshape(*values.shape[:2], heads, -1)
    return plain.dynamic_conv(by_head, filters, segment_ids, offsets).reshape(values.shape)


def span_filters(query, span_key, projection, bias, heads, dtype):
    """Returns filters [B, L, H, K] in `dtype`: float32 softmax over all taps, visible or not."""
    products = query if span_key is None else query * span_key
    logits = dense(division.whole_channels(products), projection, bias, jnp.float32)
    return softmax(logits.reshape(*query.shape[:2], heads, -1), None, dtype)
