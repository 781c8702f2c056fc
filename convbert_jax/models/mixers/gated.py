"""Convolutions after a gated linear unit: lightweight, dynamic (Wu et al. 2019) and dilated."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces import REPLICATED, Split
from convbert_jax.models.layers import Capture, Dense, Initializers, PaperFlops, State, dropout
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.models.mixers.convolution import keep_past, start_past
from convbert_jax.ops.convolution import (
    depthwise_conv,
    depthwise_conv_step,
    dynamic_conv,
    span_filters,
)
from convbert_jax.ops.nn import softmax


def gated_products(mixer, hidden_size: int) -> float:
    """`Mixer.products` of `GatedConv` without filters: its two or three dense layers."""
    return (2 + mixer.glu) * 2 * hidden_size**2


def gated_elementwise(mixer, hidden_size: int) -> float:
    """`Mixer.elementwise` of `GatedConv` without filters: biases, gate and convolution."""
    into = (1 + mixer.glu * (1 + PaperFlops.GLU)) * hidden_size
    return into + 2 * mixer.kernel_size * hidden_size


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


# --- Lightweight convolution: the same filters at all positions (Wu et al. 2019, §3.1) ---


@dataclasses.dataclass(frozen=True)
class Light:
    """output(LConv(v, softmax(w))), v = value(x) * sigmoid(gate(x)), with one filter w per head.

    With C channels, H heads and K taps: 3 C^2 + H K + 3 C parameters, without the gate
    2 C^2 + H K + 2 C. Heads are blocks of neighboring channels.
    """

    heads: int
    kernel_size: int
    attention_dropout: float  # on the filters, as by default in the published code
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"filters", REPLICATED), *Attention.RULES)

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        def start():
            return convolution.start_filters(self.heads, self.kernel_size, initializers, rngs)

        return GatedConv(
            self,
            "filters",
            start,
            _convolve_light,
            _step_light,
            hidden_size,
            initializers,
            rngs,
            causal,
        )

    def products(self, hidden_size: int, length: int) -> float:
        return gated_products(self, hidden_size)

    def elementwise(self, hidden_size: int, length: int) -> float:
        return gated_elementwise(self, hidden_size)

    def __str__(self) -> str:
        return f"{self.heads} of lightweight convolution, {self.kernel_size} taps"


def _convolve_light(
    config: Light,
    filters: Float[Array, "H K"],
    values: Float[Array, "B L C"],
    segment_ids: Int[Array, "B L"] | None,
    causal: bool,
    key: Array | None,
    capture: Capture | None,
) -> Float[Array, "B L C"]:
    """Compute LConv(v, softmax(w)), with dropout on the normalized filters.

    Dropout is drawn once per batch, as in the published GPU kernels.
    """
    normalized = softmax(filters, None, jnp.float32)
    if capture is not None:
        capture.offer("filters", lambda: convolution.at_all_positions(normalized, values))
    convolved = dynamic_conv(
        split(values, config.heads),
        dropout(normalized, config.attention_dropout, key),
        segment_ids=segment_ids,
        causal=causal,
        implementation=config.convolution,
    )
    return join(convolved)


def _step_light(
    config: Light,
    filters: Float[Array, "H K"],
    past: Float[Array, "B P C"],
    values: Float[Array, "B 1 C"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    return convolution.convolve_step(past, values, softmax(filters, None, jnp.float32))


# --- Dynamic convolution: filters computed from the token alone (Wu et al. 2019, §3.2) ---


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """output(LConv(v, softmax(W_f v))), v = value(x) * sigmoid(gate(x)); W_f has no bias.

    With C channels, H heads and K taps: 3 C^2 + C H K + 3 C parameters, without the gate
    2 C^2 + C H K + 2 C.
    """

    heads: int
    kernel_size: int
    attention_dropout: float  # on the filters, as by default in the published code
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"conv_kernel", Split(tensor=-1)), *Attention.RULES)

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        def start():
            shape = hidden_size, self.heads * self.kernel_size
            return initializers.glorot(rngs.params(), shape)

        return GatedConv(
            self,
            "conv_kernel",
            start,
            _convolve_dynamic,
            _step_dynamic,
            hidden_size,
            initializers,
            rngs,
            causal,
        )

    def products(self, hidden_size: int, length: int) -> float:
        filters = 2 * hidden_size * self.heads * self.kernel_size
        return gated_products(self, hidden_size) + filters

    def elementwise(self, hidden_size: int, length: int) -> float:
        filters = (PaperFlops.SOFTMAX + PaperFlops.DROPOUT) * self.kernel_size * self.heads
        return gated_elementwise(self, hidden_size) + filters

    def __str__(self) -> str:
        return f"{self.heads} of dynamic convolution, {self.kernel_size} taps"


def _convolve_dynamic(
    config: Dynamic,
    projection: Float[Array, "C HK"],
    values: Float[Array, "B L C"],
    segment_ids: Int[Array, "B L"] | None,
    causal: bool,
    key: Array | None,
    capture: Capture | None,
) -> Float[Array, "B L C"]:
    """Compute LConv(v, softmax(W_f v)), with dropout on the normalized filters.

    Dropout is drawn per position and head, and needs the filters in memory. Without dropout, one
    kernel computes and applies them.
    """
    heads, bias = config.heads, jnp.zeros(projection.shape[1])
    if key is None or config.attention_dropout == 0.0:
        return convolution.convolve(
            values, None, None, projection, bias,
            heads=heads, segment_ids=segment_ids, causal=causal,
            implementation=config.convolution, capture=capture,
        )  # fmt: skip
    filters = span_filters(values, None, projection, bias, heads=heads, dtype=values.dtype)
    if capture is not None:
        capture.offer("filters", lambda: filters.astype(jnp.float32))
    convolved = dynamic_conv(
        split(values, heads),
        dropout(filters, config.attention_dropout, key),
        segment_ids=segment_ids,
        causal=causal,
        implementation=config.convolution,
    )
    return join(convolved)


def _step_dynamic(
    config: Dynamic,
    projection: Float[Array, "C HK"],
    past: Float[Array, "B P C"],
    values: Float[Array, "B 1 C"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    filters = span_filters(
        values, None, projection, jnp.zeros(projection.shape[1]),
        heads=config.heads, dtype=values.dtype,
    )  # fmt: skip
    return convolution.convolve_step(past, values, filters[:, 0])


# --- Dilated convolution, with gaps between taps (Kalchbrenner et al. 2016, ByteNet) ---
#
# Tay et al. 2021 pre-train encoders with it.


@dataclasses.dataclass(frozen=True)
class Dilated:
    """output(depthwise convolution of v), v = value(x) * sigmoid(gate(x)).

    config.model.dilations sets a schedule over layers. With C channels and K taps:
    3 C^2 + K C + 3 C parameters, without the gate 2 C^2 + K C + 2 C.
    """

    kernel_size: int
    dilation: int
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"depthwise", REPLICATED), *Attention.RULES)

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        def start():
            shape = self.kernel_size, hidden_size
            return initializers.depthwise(self.kernel_size)(rngs.params(), shape)

        return GatedConv(
            self, "depthwise", start, _convolve_dilated, _step_dilated, hidden_size, initializers,
            rngs, causal, self.dilation,
        )  # fmt: skip

    def products(self, hidden_size: int, length: int) -> float:
        return gated_products(self, hidden_size)

    def elementwise(self, hidden_size: int, length: int) -> float:
        return gated_elementwise(self, hidden_size)

    def __str__(self) -> str:
        return f"convolution of {self.kernel_size} taps, {self.dilation} apart"


def _convolve_dilated(
    config: Dilated,
    filters: Float[Array, "K C"],
    values: Float[Array, "B L C"],
    segment_ids: Int[Array, "B L"] | None,
    causal: bool,
    key: Array | None,
    capture: Capture | None,
) -> Float[Array, "B L C"]:
    """Apply one unnormalized filter per channel, without dropout.

    Tap i of K reads the position at offset (i - K // 2) * dilation.
    """
    return depthwise_conv(
        values, filters, segment_ids=segment_ids, dilation=config.dilation, causal=causal,
        implementation=config.convolution,
    )  # fmt: skip


def _step_dilated(
    config: Dilated,
    filters: Float[Array, "K C"],
    past: Float[Array, "B P C"],
    values: Float[Array, "B 1 C"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    window, past = convolution.move(past, values)
    return depthwise_conv_step(window, filters, dilation=config.dilation)[:, None], past
