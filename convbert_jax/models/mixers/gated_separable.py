"""The convolution that Tay et al. 2021 pre-trained, as their code has it (Mesh TensorFlow's
`LocalConvAttnBlock`): a gate, a depthwise convolution of normalized filters, a pointwise dense, a
projection.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.config.checks.rules import check_choice
from convbert_jax.interfaces.placement import REPLICATED, Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.mesh.division import whole_channels
from convbert_jax.ops.one_step import depthwise_conv_step
from convbert_jax.ops.softmax import softmax
from convbert_jax.ops.span_dynamic_conv import span_filters

FILTERS = ("light", "dynamic")


@dataclasses.dataclass(frozen=True)
class GatedSeparable:
    """output(pointwise(depthwise(v, softmax(w)) + b)), v = value(x) * sigmoid(gate(x)), a filter
    for each channel: w of its own (light) or W_f v + b_f (dynamic).

    With C channels and K taps 4 C^2 + K C + 5 C parameters; dynamic 4 C^2 + K C (C + 1) + 5 C.
    """

    kernel_size: int
    convolution: str
    mask_convolution: bool
    filters: str = "light"  # or dynamic
    # Of a decoder: whether the convolution reads what each text begins with. Mesh TensorFlow begins
    # with the id of padding, and its convolutions are trained with 0 in its place.
    reads_begin: bool = True

    RULES = (
        (r"filters|depthwise_bias", REPLICATED),
        (r"pointwise/kernel", Split(tensor=-2)),
        *Attention.RULES,
    )
    FAMILIES = ()
    NAMES = convolution.NO_NAMES

    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "GatedSeparable":
        """Raises ConfigError for filters that there are not."""
        field = settings.names["mixer_fields"].removeprefix("config.")
        check_choice(f"{field}: filters", own.get("filters", cls.filters), FILTERS)
        return convolution.make.__get__(cls)(settings, **own)

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return GatedSeparableConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        filters = self.kernel_size * (self.filters == "dynamic")
        return (4 + filters) * 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        filters = (1 + costs.SOFTMAX) * self.kernel_size * (self.filters == "dynamic")
        return (4 + costs.GLU + 2 * self.kernel_size + filters) * hidden_size

    def inexpressible(self, form: str, hidden_size: int) -> str:
        return convolution.of_nobody_else("gated separable convolution")

    def __str__(self) -> str:
        return f"gated separable convolution, {self.filters}, {self.kernel_size} taps"


class GatedSeparableConv(nnx.Module):
    def __init__(
        self,
        config: GatedSeparable,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        size, taps = hidden_size, config.kernel_size
        self.value = Dense(size, size, initializers.dense, rngs)
        self.gate = Dense(size, size, initializers.dense, rngs)
        if config.filters == "dynamic":
            self.conv_kernel = Dense(size, size * taps, initializers.dense, rngs)
        else:
            start = initializers.depthwise(taps)
            self.filters = nnx.Param(start(rngs.params(), (taps, size)).T)
        self.depthwise_bias = nnx.Param(jnp.zeros(size))
        self.pointwise = Dense(size, size, initializers.dense, rngs)
        self.output = Dense(size, size, initializers.dense, rngs)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        """Nothing is dropped out."""
        gated, ids = self._gated(x), segment_ids if self.config.mask_convolution else None
        return self._convolve(gated, self._read(gated, begins(segment_ids)), ids, capture)

    def _convolve(self, gated, read, ids, capture=None):
        c = self.config
        if c.filters == "light":
            filters = softmax(self.filters[...], None, jnp.float32)
            if capture is not None:
                capture.offer("filters", lambda: convolution.at_all_positions(filters, gated))
            convolved = depthwise_conv(
                read, filters.T, segment_ids=ids, causal=self.causal, implementation=c.convolution
            )
        else:
            filters = self._filters_of(gated)
            if capture is not None:
                capture.offer("filters", lambda: filters.astype(jnp.float32))
            # The kernels make matrix products over the channels of a head, which here is one.
            implementation = "xla" if c.convolution == "auto" else c.convolution
            convolved = dynamic_conv(
                read[..., None], filters, segment_ids=ids, causal=self.causal,
                implementation=implementation,
            )[..., 0]  # fmt: skip
        return self._out(convolved)

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        channels = self.output.kernel[...].shape[0]
        return convolution.start_past(rows, self.config.kernel_size, channels, dtype)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        gated = self._gated(x)
        read = self._read(gated, begins(segment_ids))
        state = convolution.keep_past(read, segment_ids, self.config.kernel_size, copies)
        return self._convolve(gated, read, segment_ids), state

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        gated = self._gated(x)
        read = self._read(gated, (places == 0)[:, None, None])
        if self.config.filters == "dynamic":
            filters = self._filters_of(gated)[:, 0]
            convolved, state = convolution.convolve_step(state, read, filters)
        else:
            window, state = convolution.move(state, read)
            filters = softmax(self.filters[...], None, jnp.float32)
            convolved = depthwise_conv_step(window, filters.T)[:, None]
        return self._out(convolved), state

    def _read(self, gated, first):
        """What the convolution reads, given where a row begins."""
        if self.config.reads_begin or not self.causal:
            return gated
        return jnp.where(first, 0, gated)

    def _gated(self, x):
        gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))
        return self.value(x) * gate.astype(x.dtype)

    def _filters_of(self, gated):
        layer, heads = self.conv_kernel, gated.shape[-1]
        kernel, bias = layer.kernel[...], layer.bias[...]
        return span_filters(gated, None, kernel, bias, heads=heads, dtype=gated.dtype)

    def _out(self, convolved):
        bias = self.depthwise_bias[...].astype(convolved.dtype)
        return self.output(whole_channels(self.pointwise(convolved + bias)))


def begins(segment_ids: Int[Array, "B L"]):
    """[B, L, 1]: where each segment of a row begins."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids != before)[..., None]
