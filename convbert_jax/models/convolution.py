"""Span-based dynamic convolution (ConvBERT §3.2): the filter of a position comes from a span."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.softmax import softmax


class SeparableConv(nnx.Module):
    """Depthwise convolution over time, then a pointwise dense; one bias, after both."""

    def __init__(
        self, inputs: int, outputs: int, taps: int, initializers: Initializers, rngs: nnx.Rngs
    ):
        self.depthwise = nnx.Param(initializers.depthwise(rngs.params(), (taps, inputs)))
        self.pointwise = nnx.Param(initializers.dense(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(
        self, x: Float[Array, "B L C"], segment_ids: Int[Array, "B L"] | None
    ) -> Float[Array, "B L C_out"]:
        mixed = depthwise_conv(x, self.depthwise[...].astype(x.dtype), segment_ids=segment_ids)
        return mixed @ self.pointwise[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


def span_dynamic_conv(
    query: Float[Array, "B L H D"],
    span_key: Float[Array, "B L H D"],
    value: Float[Array, "B L H D"],
    conv_kernel: Dense,
    segment_ids: Int[Array, "B L"] | None,
) -> Float[Array, "B L H D"]:
    """LConv(value, softmax(conv_kernel(query * span_key))) (ConvBERT eq. 4).

    The query is not scaled. The softmax runs over the K taps of each head, in float32, without
    dropout, as in the release.

    Args:
      span_key: of a `SeparableConv` over the layer's input.
      conv_kernel: dense H * D -> H * K, all heads together.
      segment_ids: what the taps may read; None reads everything (the release).
    """
    batch, length, heads, _ = query.shape
    logits = conv_kernel((query * span_key).reshape(batch, length, -1))
    weights = softmax(logits.reshape(batch, length, heads, -1), None, value.dtype)
    return dynamic_conv(value, weights, segment_ids=segment_ids)
