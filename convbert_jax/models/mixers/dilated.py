"""Dilated convolution over time, with gaps between taps (Kalchbrenner et al. 2016, ByteNet).

Tay et al. 2021 pre-train encoders with it.
"""

import dataclasses

from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.interfaces.placement import REPLICATED
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Initializers
from convbert_jax.models.mixers import convolution
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.one_step import depthwise_conv_step


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

        return convolution.GatedConv(
            self, "depthwise", start, convolve, step, hidden_size, initializers, rngs, causal,
            self.dilation,
        )  # fmt: skip

    def products(self, hidden_size: int, length: int) -> float:
        return convolution.gated_products(self, hidden_size)

    def elementwise(self, hidden_size: int, length: int) -> float:
        return convolution.gated_elementwise(self, hidden_size)

    def __str__(self) -> str:
        return f"convolution of {self.kernel_size} taps, {self.dilation} apart"


def convolve(
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


def step(
    config: Dilated,
    filters: Float[Array, "K C"],
    past: Float[Array, "B P C"],
    values: Float[Array, "B 1 C"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B P C"]]:
    window, past = convolution.move(past, values)
    return depthwise_conv_step(window, filters, dilation=config.dilation)[:, None], past
