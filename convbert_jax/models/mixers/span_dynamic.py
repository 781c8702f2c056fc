"""Span-based dynamic convolution without attention (ConvBERT §3.2)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces.placement import REPLICATED, Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.convolution import (
    SeparableConv,
    convolve_step,
    keep_past,
    start_past,
)
from convbert_jax.ops.span_dynamic_conv import span_filters


@dataclasses.dataclass(frozen=True)
class SpanDynamic:
    """Specification of `SpanDynamicConv`; its heads fill the hidden size.

    With C channels, H heads and K taps: 4 C^2 + K C + C H K + 4 C + H K parameters.
    """

    heads: int
    kernel_size: int  # taps of the convolution and of its key
    convolution: str
    mask_convolution: bool

    RULES = (
        (r"key_conv/depthwise", REPLICATED),
        (r"key_conv/pointwise", Split(tensor=-1)),
        *Attention.RULES,
    )

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return SpanDynamicConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        return 4 * 2 * hidden_size**2 + 2 * hidden_size * self.heads * self.kernel_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Count the convolution of the key and the dynamic convolution."""
        taps = self.kernel_size
        dynamic = 2 * taps * hidden_size + (1 + costs.SOFTMAX) * taps * self.heads
        return 2 * taps * hidden_size + dynamic + 4 * hidden_size

    def __str__(self) -> str:
        return f"{self.heads} of span-based dynamic convolution, {self.kernel_size} taps"


class SpanDynamicConv(nnx.Module):
    """output(LConv(V, softmax(W_f (Q * K_s)))), K_s a separable convolution (ConvBERT eq. 4).

    Parameters are named as in `MixedAttention`, without those of attention.
    """

    def __init__(
        self,
        config: SpanDynamic,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        hidden, heads, taps = hidden_size, config.heads, config.kernel_size
        self.query = Dense(hidden, hidden, initializers.dense, rngs)
        self.key_conv = SeparableConv(hidden, hidden, taps, initializers, rngs, causal)
        self.conv_kernel = Dense(hidden, heads * taps, initializers.dense, rngs)
        self.conv_value = Dense(hidden, hidden, initializers.dense, rngs)
        self.output = Dense(hidden, hidden, initializers.dense, rngs)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        ids = segment_ids if self.config.mask_convolution else None
        return self._convolve(x, self.conv_value(x), ids, capture)

    def _convolve(self, x, values, ids, capture=None):
        c = self.config
        convolved = convolution.convolve(
            self.query(x), self.key_conv(x, ids, c.convolution), values,
            self.conv_kernel.kernel[...], self.conv_kernel.bias[...],
            heads=c.heads, segment_ids=ids, causal=self.causal, implementation=c.convolution,
            capture=capture,
        )  # fmt: skip
        return self.output(convolved)

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        return {
            "key": self.key_conv.start(rows, dtype),
            "value": start_past(
                rows, self.config.kernel_size, self.output.kernel[...].shape[0], dtype
            ),
        }

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        values = self.conv_value(x)
        state = {
            "key": self.key_conv.keep(x, segment_ids, copies),
            "value": keep_past(values, segment_ids, self.config.kernel_size, copies),
        }
        return self._convolve(x, values, segment_ids), state

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        key, of_key = self.key_conv.step(x, state["key"])
        kernel = self.conv_kernel
        filters = span_filters(
            self.query(x), key, kernel.kernel[...], kernel.bias[...],
            heads=self.config.heads, dtype=x.dtype,
        )  # fmt: skip
        convolved, of_value = convolve_step(state["value"], self.conv_value(x), filters[:, 0])
        return self.output(convolved), {"key": of_key, "value": of_value}
