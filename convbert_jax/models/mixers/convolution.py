"""What the mixers that convolve share."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.one_step import depthwise_conv_step, dynamic_conv_step
from convbert_jax.ops.products import dense
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv, span_filters


class SeparableConv(nnx.Module):
    """Depthwise convolution over time, then a pointwise dense; one bias, after both.

    The key of span-based dynamic convolution (ConvBERT §3.2), by which a position sees a span, and
    as wide as its input a mixer by itself.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        taps: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        self.depthwise = nnx.Param(initializers.depthwise(taps)(rngs.params(), (taps, inputs)))
        self.pointwise = nnx.Param(initializers.dense(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.causal = causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"] | None,
        implementation: str = "auto",
    ) -> Float[Array, "B L C_out"]:
        mixed = depthwise_conv(
            x, self.depthwise[...], segment_ids=segment_ids, causal=self.causal,
            implementation=implementation,
        )  # fmt: skip
        return self._over_channels(mixed)

    def start(self, rows: int, dtype: jnp.dtype) -> Float[Array, "B P C"]:
        """The inputs that the next one needs, before the first."""
        return start_past(rows, *self.depthwise[...].shape, dtype)

    def step(
        self, x: Float[Array, "B 1 C"], past: Float[Array, "B P C"]
    ) -> tuple[Float[Array, "B 1 C_out"], Float[Array, "B P C"]]:
        """The causal form at one position, and the inputs that the next one needs."""
        window, past = move(past, x)
        return self._over_channels(depthwise_conv_step(window, self.depthwise[...])[:, None]), past

    def _over_channels(self, mixed):
        return dense(mixed, self.pointwise[...], self.bias[...], mixed.dtype)


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
    causal: bool,
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
        causal=causal, implementation=implementation,
    )  # fmt: skip


def start_past(
    rows: int, taps: int, channels: int, dtype: jnp.dtype, dilation: int = 1
) -> Float[Array, "B P C"]:
    """What a causal convolution has read before the first position: zeros."""
    return jnp.zeros((rows, (taps - 1) * dilation, channels), dtype)


def move(
    past: Float[Array, "B P C"], new: Float[Array, "B 1 C"]
) -> tuple[Float[Array, "B P1 C"], Float[Array, "B P C"]]:
    """The window that ends with a new input, and what the next one needs of it."""
    window = jnp.concatenate([past, new], axis=1)
    return window, window[:, 1:]


def convolve_step(
    past: Float[Array, "B P C"], values: Float[Array, "B 1 C"], filters: Float[Array, "*B H K"]
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    """Causal dynamic convolution at one position, whose filters are [B, H, K] or [H, K]."""
    window, past = move(past, values)
    by_head = window.reshape(*window.shape[:2], filters.shape[-2], -1)
    return dynamic_conv_step(by_head, filters).reshape(values.shape), past


def of_nobody_else(what: str) -> str:
    """Why other software cannot compute a mixer: it has none like it."""
    return (
        f"neither Hugging Face's classes nor the official code have {what}; export it with "
        "--format=stablehlo."
    )
