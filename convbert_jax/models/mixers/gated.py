"""Gated convolutions: lightweight, dynamic (Wu et al. 2019), dilated and short (LFM2)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces import REPLICATED, Split
from convbert_jax.models.layers import (
    Capture,
    Dense,
    Initializers,
    PaperFlops,
    State,
    dropout,
    keep_past,
    move,
    start_past,
)
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.ops.convolution import (
    depthwise_conv,
    depthwise_conv_step,
    dynamic_conv,
    span_filters,
)
from convbert_jax.ops.nn import softmax


class _Gated:
    """Shared part of the specifications of gated convolutions; each names its `Module`."""

    Module: ClassVar[type["GatedConv"]]

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return self.Module(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        """`Mixer.products` without filters: the two or three dense layers."""
        return (2 + self.glu) * 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        """`Mixer.elementwise` without filters: biases, gate and convolution."""
        into = (1 + self.glu * (1 + PaperFlops.GLU)) * hidden_size
        return into + 2 * self.kernel_size * hidden_size


class GatedConv(nnx.Module):
    """output(convolution of v), v = value(x) * sigmoid(gate(x)).

    The block of LightConv and DynamicConv (Wu et al. 2019, §4): a gated linear unit (Dauphin et al.
    2017) before a convolution. If `config.glu` is false, v = value(x).

    `value` and `gate` are two layers; the published code has a single layer of twice the width,
    whose halves a mesh's tensor axis would place on different devices.

    A subclass creates its parameter in `add_filters` and computes `convolve` and, for one position
    of the causal form, `convolve_step`.
    """

    dilation = 1

    def __init__(
        self,
        config: _Gated,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool,
    ):
        self.config, self.causal = config, causal
        self.value = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.add_filters(hidden_size, initializers, rngs)
        self.output = Dense(hidden_size, hidden_size, initializers.dense, rngs)

    def add_filters(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        raise NotImplementedError

    def convolve(
        self,
        values: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"] | None,
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        raise NotImplementedError

    def convolve_step(
        self, past: Float[Array, "B P C"], values: Float[Array, "B 1 C"]
    ) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        ids = segment_ids if self.config.mask_convolution else None
        values, gate = self.project(x)
        return self.finish(self.convolve(values, ids, key, capture), gate)

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        c, channels = self.config, self.output.kernel[...].shape[0]
        return start_past(rows, c.kernel_size, channels, dtype, self.dilation)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        values, gate = self.project(x)
        state = keep_past(values, segment_ids, self.config.kernel_size, copies, self.dilation)
        return self.finish(self.convolve(values, segment_ids), gate), state

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        values, gate = self.project(x)
        convolved, state = self.convolve_step(state, values)
        return self.finish(convolved, gate), state

    def project(
        self, x: Float[Array, "B L C"]
    ) -> tuple[Float[Array, "B L C"], Float[Array, "B L C"] | None]:
        """Return the input of the convolution and the gate of its output, if there is one."""
        values = self.value(x)
        if self.config.glu:
            gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))
            values = values * gate.astype(x.dtype)
        return values, None

    def finish(
        self, convolved: Float[Array, "B L C"], gate: Float[Array, "B L C"] | None
    ) -> Float[Array, "B L C"]:
        """Apply the gate of the output and the output layer."""
        return self.output(convolved if gate is None else gate * convolved)


# --- Lightweight convolution: the same filters at all positions (Wu et al. 2019, §3.1) ---


class LightConv(GatedConv):
    """LConv(v, softmax(w)), with dropout on the normalized filters.

    Dropout is drawn once per batch, as in the published GPU kernels.
    """

    def add_filters(self, hidden_size, initializers, rngs):
        c = self.config
        start = convolution.start_filters(c.heads, c.kernel_size, initializers, rngs)
        self.filters = nnx.Param(start)

    def convolve(self, values, segment_ids, key=None, capture=None):
        c = self.config
        normalized = softmax(self.filters[...], None, jnp.float32)
        if capture is not None:
            capture.offer("filters", lambda: convolution.at_all_positions(normalized, values))
        convolved = dynamic_conv(
            split(values, c.heads),
            dropout(normalized, c.attention_dropout, key),
            segment_ids=segment_ids,
            causal=self.causal,
            implementation=c.convolution,
        )
        return join(convolved)

    def convolve_step(self, past, values):
        filters = softmax(self.filters[...], None, jnp.float32)
        return convolution.convolve_step(past, values, filters)


@dataclasses.dataclass(frozen=True)
class Light(_Gated):
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
    Module = LightConv

    def __str__(self) -> str:
        return f"{self.heads} of lightweight convolution, {self.kernel_size} taps"


# --- Dynamic convolution: filters computed from the token alone (Wu et al. 2019, §3.2) ---


class DynamicConv(GatedConv):
    """LConv(v, softmax(W_f v)), with dropout on the normalized filters; W_f has no bias.

    Dropout is drawn per position and head, and needs the filters in memory. Without dropout, one
    kernel computes and applies them.
    """

    def add_filters(self, hidden_size, initializers, rngs):
        shape = hidden_size, self.config.heads * self.config.kernel_size
        self.conv_kernel = nnx.Param(initializers.glorot(rngs.params(), shape))

    def convolve(self, values, segment_ids, key=None, capture=None):
        c, projection = self.config, self.conv_kernel[...]
        bias = jnp.zeros(projection.shape[1])
        if key is None or c.attention_dropout == 0.0:
            return convolution.convolve(
                values, None, None, projection, bias,
                heads=c.heads, segment_ids=segment_ids, causal=self.causal,
                implementation=c.convolution, capture=capture,
            )  # fmt: skip
        filters = span_filters(values, None, projection, bias, heads=c.heads, dtype=values.dtype)
        if capture is not None:
            capture.offer("filters", lambda: filters.astype(jnp.float32))
        convolved = dynamic_conv(
            split(values, c.heads),
            dropout(filters, c.attention_dropout, key),
            segment_ids=segment_ids,
            causal=self.causal,
            implementation=c.convolution,
        )
        return join(convolved)

    def convolve_step(self, past, values):
        projection = self.conv_kernel[...]
        filters = span_filters(
            values, None, projection, jnp.zeros(projection.shape[1]),
            heads=self.config.heads, dtype=values.dtype,
        )  # fmt: skip
        return convolution.convolve_step(past, values, filters[:, 0])


@dataclasses.dataclass(frozen=True)
class Dynamic(_Gated):
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
    Module = DynamicConv

    def products(self, hidden_size: int, length: int) -> float:
        filters = 2 * hidden_size * self.heads * self.kernel_size
        return super().products(hidden_size, length) + filters

    def elementwise(self, hidden_size: int, length: int) -> float:
        filters = (PaperFlops.SOFTMAX + PaperFlops.DROPOUT) * self.kernel_size * self.heads
        return super().elementwise(hidden_size, length) + filters

    def __str__(self) -> str:
        return f"{self.heads} of dynamic convolution, {self.kernel_size} taps"


# --- Dilated convolution, with gaps between taps (Kalchbrenner et al. 2016, ByteNet) ---
#
# Tay et al. 2021 pre-train encoders with it.


class DilatedConv(GatedConv):
    """One unnormalized filter per channel, without dropout.

    Tap i of K reads the position at offset (i - K // 2) * dilation.
    """

    dilation = property(lambda self: self.config.dilation)

    def add_filters(self, hidden_size, initializers, rngs):
        taps = self.config.kernel_size
        self.depthwise = nnx.Param(initializers.depthwise(taps)(rngs.params(), (taps, hidden_size)))

    def convolve(self, values, segment_ids, key=None, capture=None):
        return depthwise_conv(
            values, self.depthwise[...], segment_ids=segment_ids, dilation=self.dilation,
            causal=self.causal, implementation=self.config.convolution,
        )  # fmt: skip

    def convolve_step(self, past, values):
        window, past = move(past, values)
        convolved = depthwise_conv_step(window, self.depthwise[...], dilation=self.dilation)
        return convolved[:, None], past


@dataclasses.dataclass(frozen=True)
class Dilated(_Gated):
    """output(depthwise convolution of v), v = value(x) * sigmoid(gate(x)).

    config.model.dilations sets a schedule over layers. With C channels and K taps:
    3 C^2 + K C + 3 C parameters, without the gate 2 C^2 + K C + 2 C.
    """

    kernel_size: int
    dilation: int
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = Attention.RULES
    Module = DilatedConv

    def __str__(self) -> str:
        return f"convolution of {self.kernel_size} taps, {self.dilation} apart"


# --- Gated short convolution of LFM2 (Amini et al. 2025, arXiv 2511.23404) ---


class ShortConv(DilatedConv):
    """output(c * conv(b * v)), [b, c, v] = input(x): one filter per channel, no biases.

    The gates b and c are linear, without a sigmoid. `input` is one layer, as in LFM2, so a mesh's
    tensor axis moves parts of its output between devices.
    """

    dilation = 1

    def __init__(
        self,
        config: "Short",
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool,
    ):
        self.config, self.causal = config, causal
        self.input = Dense(hidden_size, 3 * hidden_size, initializers.dense, rngs, bias=False)
        self.add_filters(hidden_size, initializers, rngs)
        self.output = Dense(hidden_size, hidden_size, initializers.dense, rngs, bias=False)

    def project(self, x):
        before, after, values = jnp.split(self.input(x), 3, axis=-1)
        return before * values, after


@dataclasses.dataclass(frozen=True)
class Short(_Gated):
    """W_o (c * conv(b * v)), [b, c, v] = W_in x in the order of transformers' Lfm2ShortConv.

    With C channels and K taps (LFM2: 3): 4 C^2 + K C parameters.
    """

    kernel_size: int
    convolution: str
    mask_convolution: bool

    RULES = Dilated.RULES
    Module = ShortConv

    def products(self, hidden_size: int, length: int) -> float:
        return 4 * 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Count the convolution and two gates."""
        return (2 * self.kernel_size + 2) * hidden_size

    def __str__(self) -> str:
        return f"gated convolution of {self.kernel_size} taps"
