"""Dynamic convolution: filters computed from the token alone (Wu et al. 2019, §3.2)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces.placement import Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Initializers, dropout
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention, join, split
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.span_dynamic_conv import span_filters


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

        return convolution.GatedConv(
            self, "conv_kernel", start, convolve, step, hidden_size, initializers, rngs, causal
        )

    def products(self, hidden_size: int, length: int) -> float:
        filters = 2 * hidden_size * self.heads * self.kernel_size
        return convolution.gated_products(self, hidden_size) + filters

    def elementwise(self, hidden_size: int, length: int) -> float:
        filters = (costs.SOFTMAX + costs.DROPOUT) * self.kernel_size * self.heads
        return convolution.gated_elementwise(self, hidden_size) + filters

    def __str__(self) -> str:
        return f"{self.heads} of dynamic convolution, {self.kernel_size} taps"


def convolve(
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


def step(
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
