"""Dilated convolution over time: taps some positions apart (Kalchbrenner et al. 2016, ByteNet; as
an encoder to be pre-trained, Tay et al. 2021).
"""

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
from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.convolution import gated, move, of_nobody_else, start_past
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.one_step import depthwise_conv_step


@dataclasses.dataclass(frozen=True)
class Dilated:
    """`DilatedConv` as a specification; a schedule is config.model.dilations.

    With C channels and K taps: 3 C^2 + K C + 3 C parameters, without the gate 2 C^2 + K C + 2 C.
    """

    kernel_size: int
    dilation: int
    convolution: str
    mask_convolution: bool
    glu: bool = True

    RULES = ((r"depthwise", REPLICATED), *Attention.RULES)
    FAMILIES = ()
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]] = {}

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Dilated":
        return cls(
            kernel_size=settings.kernel_size,
            dilation=settings.dilation,
            convolution=settings.convolution,
            mask_convolution=settings.mask_convolution,
            **own,
        )

    def fields(self, hidden_size: int) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel_size,
            "dilation": self.dilation,
            "mask_convolution": self.mask_convolution,
        }

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return DilatedConv(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        return (2 + self.glu) * 2 * hidden_size**2

    def elementwise(self, hidden_size: int, length: int) -> float:
        into = (1 + self.glu * (1 + costs.GLU)) * hidden_size
        return into + 2 * self.kernel_size * hidden_size

    @property
    def reads_padding(self) -> bool:
        return not self.mask_convolution

    def inexpressible(self, form: str, hidden_size: int) -> str:
        return of_nobody_else("dilated convolution")

    def __str__(self) -> str:
        return f"convolution of {self.kernel_size} taps, {self.dilation} apart"


class DilatedConv(nnx.Module):
    """output(depthwise convolution of v), v = value(x) * sigmoid(gate(x)); tap i of K reads
    (i - K // 2) * dilation positions away. Filters are one for each channel, not normalized.
    """

    def __init__(
        self,
        config: Dilated,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        hidden, taps = hidden_size, config.kernel_size
        self.value = Dense(hidden, hidden, initializers.dense, rngs)
        if config.glu:
            self.gate = Dense(hidden, hidden, initializers.dense, rngs)
        self.depthwise = nnx.Param(initializers.depthwise(taps)(rngs.params(), (taps, hidden)))
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
        convolved = depthwise_conv(
            gated(x, self.value, self.gate if c.glu else None),
            self.depthwise[...],
            segment_ids=segment_ids if c.mask_convolution else None,
            dilation=c.dilation,
            causal=self.causal,
            implementation=c.convolution,
        )
        return self.output(convolved)

    def start(self, rows: int, length: int, dtype: jnp.dtype) -> State:
        return start_past(rows, *self.depthwise[...].shape, dtype, self.config.dilation)

    def step(
        self, x: Float[Array, "B 1 C"], state: State, place: Int[Array, ""]
    ) -> tuple[Float[Array, "B 1 C"], State]:
        c = self.config
        window, state = move(state, gated(x, self.value, self.gate if c.glu else None))
        convolved = depthwise_conv_step(window, self.depthwise[...], dilation=c.dilation)
        return self.output(convolved[:, None]), state
