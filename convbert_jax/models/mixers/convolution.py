"""Shared parts of the convolutional mixers, for their specifications and modules.

A specification assigns a shared function (`make = classmethod(make)`) or defines its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.one_step import depthwise_conv_step, dynamic_conv_step
from convbert_jax.ops.products import dense
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv, span_filters


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


def gated_products(mixer, hidden_size: int) -> float:
    """`Mixer.products` of `GatedConv` without filters: its two or three dense layers."""
    return (2 + mixer.glu) * 2 * hidden_size**2


def gated_elementwise(mixer, hidden_size: int) -> float:
    """`Mixer.elementwise` of `GatedConv` without filters: biases, gate and convolution."""
    into = (1 + mixer.glu * (1 + costs.GLU)) * hidden_size
    return into + 2 * mixer.kernel_size * hidden_size


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


class GatedConv(nnx.Module):
    """output(convolution of v), v = value(x) * sigmoid(gate(x)).

    The block of LightConv and DynamicConv (Wu et al. 2019, §4): a gated linear unit (Dauphin et al.
    2017) before a convolution. If `config.glu` is false, v = value(x).

    `value` and `gate` are two layers; the published code has a single layer of twice the width,
    whose halves a mesh's tensor axis would place on different devices.

    Args:
      config: The mixer specification.
      name: Name of the convolution's parameter, initialized by `start()`.
      convolve: (config, parameter, v [B, L, C], segment_ids [B, L] or None, causal, key, capture)
        -> [B, L, C].
      step: (config, parameter, past [B, P, C], v [B, 1, C]) -> ([B, 1, C], past), the causal form
        at one position.
    """

    def __init__(
        self,
        config,
        name: str,
        start: Callable[[], Array],
        convolve: Callable[..., Array],
        step: Callable[..., tuple[Array, Array]],
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool,
        dilation: int = 1,
    ):
        self.value = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        setattr(self, name, nnx.Param(start()))
        self.output = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.config, self.name, self.causal = config, name, causal
        self.convolve, self.convolve_step, self.dilation = convolve, step, dilation

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        ids = segment_ids if self.config.mask_convolution else None
        return self._convolve(self._gated(x), ids, key, capture)

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        c, channels = self.config, self.output.kernel[...].shape[0]
        return start_past(rows, c.kernel_size, channels, dtype, self.dilation)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        gated = self._gated(x)
        state = keep_past(gated, segment_ids, self.config.kernel_size, copies, self.dilation)
        return self._convolve(gated, segment_ids), state

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        parameter = getattr(self, self.name)[...]
        convolved, state = self.convolve_step(self.config, parameter, state, self._gated(x))
        return self.output(convolved), state

    def _convolve(self, gated, ids, key=None, capture=None):
        parameter = getattr(self, self.name)[...]
        convolved = self.convolve(self.config, parameter, gated, ids, self.causal, key, capture)
        return self.output(convolved)

    def _gated(self, x):
        values = self.value(x)
        if self.config.glu:
            gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))
            values = values * gate.astype(x.dtype)
        return values


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


def start_past(
    rows: int, taps: int, channels: int, dtype: jnp.dtype, dilation: int = 1
) -> Float[Array, "B P C"]:
    """Return the past inputs of a causal convolution at the first position: zeros."""
    return jnp.zeros((rows, (taps - 1) * dilation, channels), dtype)


def keep_past(
    inputs: Float[Array, "B P C"],
    segment_ids: Int[Array, "B P"],
    taps: int,
    copies: int,
    dilation: int = 1,
) -> Float[Array, "R T C"]:
    """Return the past inputs of a causal convolution after prompts, for B x `copies` rows.

    Padding and positions before the prompt are zeros.
    """
    span = (taps - 1) * dilation
    inputs = jnp.where((segment_ids != 0)[..., None], inputs, 0)
    begun = inputs.shape[1]
    past = jnp.pad(inputs, ((0, 0), (max(0, span - begun), 0), (0, 0)))[:, max(0, begun - span) :]
    return jnp.repeat(past, copies, axis=0)


def move(
    past: Float[Array, "B P C"], new: Float[Array, "B 1 C"]
) -> tuple[Float[Array, "B P1 C"], Float[Array, "B P C"]]:
    """Append a new input; return the window that ends with it, and the next position's past."""
    window = jnp.concatenate([past, new], axis=1)
    return window, window[:, 1:]


def convolve_step(
    past: Float[Array, "B P C"], values: Float[Array, "B 1 C"], filters: Float[Array, "*B H K"]
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    """Apply causal dynamic convolution at one position, with filters [B, H, K] or [H, K]."""
    window, past = move(past, values)
    by_head = window.reshape(*window.shape[:2], filters.shape[-2], -1)
    return dynamic_conv_step(by_head, filters).reshape(values.shape), past
