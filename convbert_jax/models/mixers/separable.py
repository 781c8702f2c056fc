"""Depthwise separable convolution: over time, then over channels (Chollet 2017)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces.placement import REPLICATED, Split
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Initializers, State
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.convolution import SeparableConv


@dataclasses.dataclass(frozen=True)
class Separable:
    """Specification of `SeparableMixer`; C channels and K taps have C^2 + K C + C parameters."""

    kernel_size: int
    convolution: str
    mask_convolution: bool

    RULES = ((r"conv/depthwise", REPLICATED), (r"conv/pointwise", Split(tensor=-2)))

    make = classmethod(convolution.make)
    fields = convolution.fields
    reads_padding = property(convolution.unless_masked)

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
