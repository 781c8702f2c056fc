"""Convolutional mixers without a gate: separable and span-based dynamic convolution; shared parts.

A specification assigns a shared function (`make = classmethod(make)`) or defines its own.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.interfaces import Split
from convbert_jax.models.layers import (
    Capture,
    Dense,
    Initializers,
    PaperFlops,
    State,
    keep_past,
    move,
    start_past,
)
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.ops.convolution import (
    depthwise_conv,
    depthwise_conv_step,
    dynamic_conv_step,
    span_dynamic_conv,
    span_filters,
)
from convbert_jax.ops.products import dense


def make(cls, settings: MixerSettings, **own: Any):
    """`Mixer.make` for fields named as in the config; the heads fill the hidden size."""
    named = {name: getattr(settings, name) for name in _of_config(cls) if name != "heads"}
    if "heads" in _of_config(cls):
        named["heads"] = settings.all_heads()
    return cls(**named, **own)


def fields(mixer, hidden_size: int) -> dict[str, Any]:
    """`Mixer.fields` for mixers made by `make`: all fields except the implementation."""
    return {name: getattr(mixer, name) for name in _of_config(mixer) if name != "convolution"}


def _of_config(mixer) -> list[str]:
    missing = dataclasses.MISSING
    return [field.name for field in dataclasses.fields(mixer) if field.default is missing]


def unless_masked(mixer) -> bool:
    """`Mixer.reads_padding`; assign it as a property."""
    return not mixer.mask_convolution


class SeparableConv(nnx.Module):
    """Depthwise convolution over time, then a pointwise dense layer; one bias, after both.

    It computes the key of span-based dynamic convolution (ConvBERT §3.2), which covers a span.
    With equal input and output width it is a mixer too.
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

    def keep(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], copies: int
    ) -> Float[Array, "R T C"]:
        """Return the past inputs needed after the prompts; see `keep_past`."""
        return keep_past(x, segment_ids, self.depthwise[...].shape[0], copies)

    def start(self, rows: int, dtype: jnp.dtype) -> Float[Array, "B P C"]:
        """Return the past inputs needed by the first position."""
        return start_past(rows, *self.depthwise[...].shape, dtype)

    def step(
        self, x: Float[Array, "B 1 C"], past: Float[Array, "B P C"]
    ) -> tuple[Float[Array, "B 1 C_out"], Float[Array, "B P C"]]:
        """Apply the causal form at one position; also return the past of the next position."""
        window, past = move(past, x)
        return self._over_channels(depthwise_conv_step(window, self.depthwise[...])[:, None]), past

    def _over_channels(self, mixed):
        return dense(mixed, self.pointwise[...], self.bias[...], mixed.dtype)


def start_filters(
    heads: int, taps: int, initializers: Initializers, rngs: nnx.Rngs
) -> Float[Array, "H K"]:
    """Initialize filters before the softmax: Glorot from 1 to H channels, as published."""
    return initializers.glorot(rngs.params(), (taps, 1, heads))[:, 0].T


def at_all_positions(
    filters: Float[Array, "H K"], x: Float[Array, "B L C"]
) -> Float[Array, "B L H K"]:
    """Repeat position-independent filters for each token of `x`, for a capture."""
    return jnp.broadcast_to(filters, (*x.shape[:2], *filters.shape))


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
    """Apply `ops.span_dynamic_conv`; offer "filters" [B, L, H, K] to `capture`."""
    if capture is not None:
        capture.offer(
            "filters", lambda: span_filters(query, span_key, projection, bias, heads=heads)
        )
    return span_dynamic_conv(
        query, span_key, values, projection, bias, heads=heads, segment_ids=segment_ids,
        causal=causal, implementation=implementation,
    )  # fmt: skip


def convolve_step(
    past: Float[Array, "B P C"], values: Float[Array, "B 1 C"], filters: Float[Array, "*B H K"]
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    """Apply causal dynamic convolution at one position, with filters [B, H, K] or [H, K]."""
    window, past = move(past, values)
    by_head = window.reshape(*window.shape[:2], filters.shape[-2], -1)
    return dynamic_conv_step(by_head, filters).reshape(values.shape), past


# --- Depthwise separable convolution: over time, then over channels (Chollet 2017) ---


@dataclasses.dataclass(frozen=True)
class Separable:
    """Specification of `SeparableMixer`; C channels and K taps have C^2 + K C + C parameters."""

    kernel_size: int
    convolution: str
    mask_convolution: bool

    RULES = ((r"conv/pointwise", Split(tensor=-2)),)

    make = classmethod(make)
    fields = fields
    reads_padding = property(unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return SeparableMixer(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        return 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        return 2 * self.kernel_size * hidden_size

    def __str__(self) -> str:
        return f"separable convolution of {self.kernel_size} taps"


class SeparableMixer(nnx.Module):
    """pointwise(depthwise(x)) + bias, like the span key, with equal input and output width."""

    def __init__(
        self,
        config: Separable,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        self.conv = SeparableConv(
            hidden_size, hidden_size, config.kernel_size, initializers, rngs, causal
        )
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        ids = segment_ids if self.config.mask_convolution else None
        return self.conv(x, ids, self.config.convolution)

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        return self.conv.start(rows, dtype)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        out = self.conv(x, segment_ids, self.config.convolution)
        return out, self.conv.keep(x, segment_ids, copies)

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        return self.conv.step(x, state)


# --- Span-based dynamic convolution without attention (ConvBERT §3.2) ---


@dataclasses.dataclass(frozen=True)
class SpanDynamic:
    """Specification of `SpanDynamicConv`; its heads fill the hidden size.

    With C channels, H heads and K taps: 4 C^2 + K C + C H K + 4 C + H K parameters.
    """

    heads: int
    kernel_size: int  # taps of the convolution and of its key
    convolution: str
    mask_convolution: bool

    RULES = ((r"key_conv/pointwise", Split(tensor=-1)), *Attention.RULES)

    make = classmethod(make)
    fields = fields
    reads_padding = property(unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return SpanDynamicConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        return 4 * 2 * hidden_size**2 + 2 * hidden_size * self.heads * self.kernel_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Count the convolution of the key and the dynamic convolution."""
        taps = self.kernel_size
        dynamic = 2 * taps * hidden_size + (1 + PaperFlops.SOFTMAX) * taps * self.heads
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
        convolved = convolve(
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
