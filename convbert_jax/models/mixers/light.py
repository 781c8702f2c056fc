"""Lightweight convolution: the same filters at all positions (Wu et al. 2019, §3.1)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces.placement import REPLICATED
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Initializers, dropout
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.softmax import softmax


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

        return convolution.GatedConv(
            self, "filters", start, convolve, step, hidden_size, initializers, rngs, causal
        )

    def products(self, hidden_size: int, length: int) -> float:
        return convolution.gated_products(self, hidden_size)

    def elementwise(self, hidden_size: int, length: int) -> float:
        return convolution.gated_elementwise(self, hidden_size)

    def __str__(self) -> str:
        return f"{self.heads} of lightweight convolution, {self.kernel_size} taps"


def convolve(
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


def step(
    config: Light,
    filters: Float[Array, "H K"],
    past: Float[Array, "B P C"],
    values: Float[Array, "B 1 C"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    return convolution.convolve_step(past, values, softmax(filters, None, jnp.float32))
