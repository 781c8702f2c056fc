"""The key of span-based dynamic convolution (ConvBERT §3.2): a position sees a span."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.layers import Initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.products import dense


class SeparableConv(nnx.Module):
    """Depthwise convolution over time, then a pointwise dense; one bias, after both."""

    def __init__(
        self, inputs: int, outputs: int, taps: int, initializers: Initializers, rngs: nnx.Rngs
    ):
        self.depthwise = nnx.Param(initializers.depthwise(taps)(rngs.params(), (taps, inputs)))
        self.pointwise = nnx.Param(initializers.dense(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"] | None,
        implementation: str = "auto",
    ) -> Float[Array, "B L C_out"]:
        mixed = depthwise_conv(
            x, self.depthwise[...], segment_ids=segment_ids, implementation=implementation
        )
        return dense(mixed, self.pointwise[...], self.bias[...], x.dtype)
