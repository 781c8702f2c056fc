"""Lightweight convolution: the same filters at all positions (Wu et al. 2019, §3.1, LightConv)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.interfaces.placement import REPLICATED
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, State, dropout
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.models.mixers.convolution import (
    convolve_step,
    gated,
    of_nobody_else,
    start_filters,
    start_past,
)
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.softmax import softmax


@dataclasses.dataclass(frozen=True)
class Light:
    """`LightConv` as a specification.

    With C channels, H heads and K taps: 3 C^2 + H K + 3 C parameters, without the gate
    2 C^2 + H K + 2 C.
    """

    heads: int
    kernel_size: int
    attention_dropout: float  # on the filters, the published code's default too
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"filters", REPLICATED), *Attention.RULES)
    FAMILIES = ()
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]] = {}

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Light":
        return cls(
            heads=settings.all_heads(),
            kernel_size=settings.kernel_size,
            attention_dropout=settings.attention_dropout,
            convolution=settings.convolution,
            mask_convolution=settings.mask_convolution,
            **own,
        )

    def fields(self, hidden_size: int) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "kernel_size": self.kernel_size,
            "attention_dropout": self.attention_dropout,
            "mask_convolution": self.mask_convolution,
        }

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return LightConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        return (2 + self.glu) * 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        into = (1 + self.glu * (1 + costs.GLU)) * hidden_size
        return into + 2 * self.kernel_size * hidden_size

    @property
    def reads_padding(self) -> bool:
        return not self.mask_convolution

    def inexpressible(self, form: str, hidden_size: int) -> str:
        return of_nobody_else("lightweight convolution")

    def __str__(self) -> str:
        return f"{self.heads} of lightweight convolution, {self.kernel_size} taps"


class LightConv(nnx.Module):
    """output(LConv(v, softmax(w))), v = value(x) * sigmoid(gate(x)), w one filter for each head.

    Dropout is on the normalized filters, once for the whole batch, as the published kernels for
    GPUs draw it. Heads are blocks of neighboring channels.
    """

    def __init__(
        self,
        config: Light,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        hidden = hidden_size
        self.value = Dense(hidden, hidden, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden, hidden, initializers.dense, rngs)
        self.filters = nnx.Param(
            start_filters(config.heads, config.kernel_size, initializers, rngs)
        )
        self.output = Dense(hidden, hidden, initializers.dense, rngs)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        c = self.config
        values = gated(x, self.value, self.gate if c.glu else None)
        filters = softmax(self.filters[...], None, jnp.float32)
        convolved = dynamic_conv(
            split(values, c.heads),
            dropout(filters, c.attention_dropout, key),
            segment_ids=segment_ids if c.mask_convolution else None,
            causal=self.causal,
            implementation=c.convolution,
        )
        return self.output(join(convolved))

    def start(self, rows: int, length: int, dtype: jnp.dtype) -> State:
        return start_past(rows, self.config.kernel_size, self.output.kernel[...].shape[0], dtype)

    def step(
        self, x: Float[Array, "B 1 C"], state: State, place: Int[Array, ""]
    ) -> tuple[Float[Array, "B 1 C"], State]:
        values = gated(x, self.value, self.gate if self.config.glu else None)
        filters = softmax(self.filters[...], None, jnp.float32)
        convolved, state = convolve_step(state, values, filters)
        return self.output(convolved), state
