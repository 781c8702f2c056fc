"""What the mixers that convolve share."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.products import dense
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv, span_filters


class SeparableConv(nnx.Module):
    """Depthwise convolution over time, then a pointwise dense; one bias, after both.

    The key of span-based dynamic convolution (ConvBERT §3.2), by which a position sees a span, and
    as wide as its input a mixer by itself.
    """

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


def gated(x: Float[Array, "B L C"], value: Dense, gate: Dense | None) -> Float[Array, "B L C_out"]:
    """What LightConv convolves: value(x) * sigmoid(gate(x)), a gated linear unit (Dauphin et al.
    2017); without a gate value(x).

    Two layers where the published code has one twice as wide, whose halves the tensor axis of a
    mesh would put on different devices.
    """
    values = value(x)
    if gate is None:
        return values
    return values * jax.nn.sigmoid(gate(x).astype(jnp.float32)).astype(x.dtype)


def start_filters(
    heads: int, taps: int, initializers: Initializers, rngs: nnx.Rngs
) -> Float[Array, "H K"]:
    """Filters before their softmax, Glorot as in the published code: of one channel to H."""
    return initializers.glorot(rngs.params(), (taps, 1, heads))[:, 0].T


def convolve(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"] | None,
    values: Float[Array, "B L C"] | None,
    projection: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    *,
    heads: int,
    segment_ids: Int[Array, "B L"] | None,
    implementation: str,
    capture: Capture | None,
) -> Float[Array, "B L C"]:
    """`ops.span_dynamic_conv`, whose filters, "filters" [B, L, H, K], `capture` is offered."""
    if capture is not None:
        capture.offer(
            "filters", lambda: span_filters(query, span_key, projection, bias, heads=heads)
        )
    return span_dynamic_conv(
        query, span_key, values, projection, bias, heads=heads, segment_ids=segment_ids,
        implementation=implementation,
    )  # fmt: skip


def of_nobody_else(what: str) -> str:
    """Why other software cannot compute a mixer: it has none like it."""
    return (
        f"neither Hugging Face's classes nor the official code have {what}; export it with "
        "--format=stablehlo."
    )
