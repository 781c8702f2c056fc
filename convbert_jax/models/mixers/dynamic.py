"""Dynamic convolution: filters from the token alone (Wu et al. 2019, §3.2, DynamicConv)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.interfaces.placement import Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, State, dropout
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.models.mixers.convolution import (
    convolve,
    convolve_step,
    gated,
    of_nobody_else,
    start_past,
)
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.span_dynamic_conv import span_filters


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """`DynamicConv` as a specification.

    With C channels, H heads and K taps: 3 C^2 + C H K + 3 C parameters, without the gate
    2 C^2 + C H K + 2 C.
    """

    heads: int
    kernel_size: int
    attention_dropout: float  # on the filters, the published code's default too
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"conv_kernel", Split(tensor=-1)), *Attention.RULES)
    FAMILIES = ()
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]] = {}

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Dynamic":
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
        return DynamicConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        projections = (2 + self.glu) * 2 * hidden_size**2
        return projections + 2 * hidden_size * self.heads * self.kernel_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        taps = self.kernel_size
        into = (1 + self.glu * (1 + costs.GLU)) * hidden_size
        filters = (costs.SOFTMAX + costs.DROPOUT) * taps * self.heads
        return into + filters + 2 * taps * hidden_size

    @property
    def reads_padding(self) -> bool:
        return not self.mask_convolution

    def inexpressible(self, form: str, hidden_size: int) -> str:
        return of_nobody_else("dynamic convolution")

    def __str__(self) -> str:
        return f"{self.heads} of dynamic convolution, {self.kernel_size} taps"


class DynamicConv(nnx.Module):
    """output(LConv(v, softmax(W_f v))), v = value(x) * sigmoid(gate(x)); W_f has no bias.

    Dropout is on the normalized filters, of each position and head alone. It needs them in memory;
    without it they are made and used by one kernel.
    """

    def __init__(
        self,
        config: Dynamic,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        hidden, outputs = hidden_size, config.heads * config.kernel_size
        self.value = Dense(hidden, hidden, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden, hidden, initializers.dense, rngs)
        self.conv_kernel = nnx.Param(initializers.glorot(rngs.params(), (hidden, outputs)))
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
        ids = segment_ids if c.mask_convolution else None
        values = gated(x, self.value, self.gate if c.glu else None)
        projection = self.conv_kernel[...]
        bias = jnp.zeros(projection.shape[1])
        if key is None or c.attention_dropout == 0.0:
            convolved = convolve(
                values, None, None, projection, bias,
                heads=c.heads, segment_ids=ids, causal=self.causal, implementation=c.convolution,
                capture=capture,
            )  # fmt: skip
            return self.output(convolved)
        filters = span_filters(values, None, projection, bias, heads=c.heads, dtype=x.dtype)
        if capture is not None:
            capture.offer("filters", lambda: filters.astype(jnp.float32))
        convolved = dynamic_conv(
            split(values, c.heads),
            dropout(filters, c.attention_dropout, key),
            segment_ids=ids,
            causal=self.causal,
            implementation=c.convolution,
        )
        return self.output(join(convolved))

    def start(self, rows: int, length: int, dtype: jnp.dtype) -> State:
        return start_past(rows, self.config.kernel_size, self.output.kernel[...].shape[0], dtype)

    def step(
        self, x: Float[Array, "B 1 C"], state: State, place: Int[Array, ""]
    ) -> tuple[Float[Array, "B 1 C"], State]:
        c, projection = self.config, self.conv_kernel[...]
        values = gated(x, self.value, self.gate if c.glu else None)
        filters = span_filters(
            values, None, projection, jnp.zeros(projection.shape[1]), heads=c.heads, dtype=x.dtype
        )
        convolved, state = convolve_step(state, values, filters[:, 0])
        return self.output(convolved), state
