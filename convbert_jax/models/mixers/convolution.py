"""What the mixers that convolve share: parts of their specifications, and of their modules.

A specification takes a part as it is, `make = classmethod(make)`, or says its own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.products import dense
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv, span_filters

NO_NAMES: Mapping[str, tuple[str, str, str]] = {}  # elsewhere, of what nobody else has


def make(cls, settings: MixerSettings, **own: Any):
    """`Mixer.make` of fields that are called as the config's; heads fill the hidden size."""
    named = {name: getattr(settings, name) for name in _of_config(cls) if name != "heads"}
    if "heads" in _of_config(cls):
        named["heads"] = settings.all_heads()
    return cls(**named, **own)


def fields(mixer, hidden_size: int) -> dict[str, Any]:
    """`Mixer.fields` of what `make` made: all but the implementation."""
    return {name: getattr(mixer, name) for name in _of_config(mixer) if name != "convolution"}


def _of_config(mixer) -> list[str]:
    missing = dataclasses.MISSING
    return [field.name for field in dataclasses.fields(mixer) if field.default is missing]


def unless_masked(mixer) -> bool:
    """`Mixer.reads_padding`, a property."""
    return not mixer.mask_convolution


def gated_products(mixer, hidden_size: int) -> float:
    """`Mixer.products` of `GatedConv` without its filters: its two or three dense layers."""
    return (2 + mixer.glu) * 2 * hidden_size**2


def gated_elementwise(mixer, hidden_size: int) -> float:
    """`Mixer.elementwise` of `GatedConv` without its filters: biases, gate and convolution."""
    into = (1 + mixer.glu * (1 + costs.GLU)) * hidden_size
    return into + 2 * mixer.kernel_size * hidden_size


def of_nobody_else(what: str) -> str:
    """`Mixer.inexpressible`: why other software cannot compute a mixer, it has none like it."""
    return (
        f"neither Hugging Face's classes nor the official code have {what}; export it with "
        "--format=stablehlo."
    )


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


class GatedConv(nnx.Module):
    """output(convolution of v), v = value(x) * sigmoid(gate(x)): the block of LightConv and
    DynamicConv (Wu et al. 2019, §4), a gated linear unit (Dauphin et al. 2017) before a
    convolution; v = value(x) where `config.glu` is false.

    Two layers where the published code has one twice as wide, whose halves the tensor axis of a
    mesh would put on different devices.

    Args:
      config: the specification.
      name: of the convolution's parameter, which `start()` makes.
      convolve: (config, parameter, v [B, L, C], segment_ids [B, L] or None, key, capture)
        -> [B, L, C].
    """

    def __init__(
        self,
        config,
        name: str,
        start: Callable[[], Array],
        convolve: Callable[..., Array],
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
    ):
        self.value = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        setattr(self, name, nnx.Param(start()))
        self.output = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.config, self.name, self.convolve = config, name, convolve

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        c = self.config
        values = self.value(x)
        if c.glu:
            gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))
            values = values * gate.astype(x.dtype)
        ids = segment_ids if c.mask_convolution else None
        parameter = getattr(self, self.name)[...]
        return self.output(self.convolve(c, parameter, values, ids, key, capture))


def start_filters(
    heads: int, taps: int, initializers: Initializers, rngs: nnx.Rngs
) -> Float[Array, "H K"]:
    """Filters before their softmax, Glorot as in the published code: of one channel to H."""
    return initializers.glorot(rngs.params(), (taps, 1, heads))[:, 0].T


def at_all_positions(
    filters: Float[Array, "H K"], x: Float[Array, "B L C"]
) -> Float[Array, "B L H K"]:
    """Filters that are the same for each token of `x`, as a capture shows them."""
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
