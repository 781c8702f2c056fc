"""The mixed block of ConvBERT: self-attention beside span-based dynamic convolution."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.config.mixers import nominal_heads
from convbert_jax.interfaces.placement import REPLICATED, Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.models.mixers.attention import Attention, attend, join, project
from convbert_jax.models.mixers.convolution import SeparableConv
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv, span_filters


@dataclasses.dataclass(frozen=True)
class Mixed:
    """`MixedAttention` as a specification: `attention_heads` heads of each kind."""

    attention_heads: int
    head_size: int
    kernel_size: int  # taps of the convolution and of its key
    attention_dropout: float
    attention: str
    convolution: str
    mask_convolution: bool

    RULES = (
        (r"key_conv/depthwise", REPLICATED),
        (r"key_conv/pointwise", Split(tensor=-1)),
        *Attention.RULES,
    )
    FAMILIES = ("convbert",)
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        **Attention.NAMES,
        "key_conv": (
            "separable",
            "attention.self.key_conv_attn_layer",
            "attention/self/conv_attn_key",
        ),
        "conv_kernel": (
            "dense",
            "attention.self.conv_kernel_layer",
            "attention/self/conv_attn_kernel",
        ),
        "conv_value": (
            "dense",
            "attention.self.conv_out_layer",
            "attention/self/conv_attn_point",
        ),
    }

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Mixed":
        """heads / head_ratio heads of attention and as many of convolution.

        Where fewer heads than head_ratio are left, as in small generators, the release has one of
        each kind, both as wide as the nominal head. Without `release_heads` they share its width.
        """
        halved = settings.heads < settings.head_ratio and not settings.release_heads
        return cls(
            attention_heads=settings.reduced_heads(),
            head_size=settings.head_size // 2 if halved else settings.head_size,
            kernel_size=settings.kernel_size,
            attention_dropout=settings.attention_dropout,
            attention=settings.attention,
            convolution=settings.convolution,
            mask_convolution=settings.mask_convolution,
            **own,
        )

    def fields(self, hidden_size: int) -> dict[str, Any]:
        heads = nominal_heads(hidden_size, self.head_size)
        return {
            "heads": heads,
            "head_ratio": heads // self.attention_heads,
            "kernel_size": self.kernel_size,
            "attention_dropout": self.attention_dropout,
            "mask_convolution": self.mask_convolution,
        }

    def module(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs) -> nnx.Module:
        return MixedAttention(self, hidden_size, initializers, rngs)

    def products(self, hidden_size: int, length: int) -> float:
        heads, width = self.attention_heads, self.attention_heads * self.head_size
        attention = 3 * 2 * hidden_size * width + 2 * 2 * length * width
        key_and_value = 2 * 2 * hidden_size * width
        filter_logits = 2 * width * heads * self.kernel_size
        return attention + key_and_value + filter_logits + 2 * 2 * width * hidden_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Attention's, and those of both convolutions."""
        heads, taps = self.attention_heads, self.kernel_size
        width = heads * self.head_size
        scores = (1 + costs.SOFTMAX + costs.DROPOUT) * length * heads + 3 * width
        depthwise = 2 * taps * hidden_size
        dynamic = 2 * taps * width + (1 + costs.SOFTMAX) * taps * heads + 3 * width
        return scores + depthwise + dynamic

    @property
    def reads_padding(self) -> bool:
        return not self.mask_convolution

    def inexpressible(self, form: str, hidden_size: int) -> str:
        if form != "huggingface":
            return ""
        heads, size = self.attention_heads, self.head_size
        if 2 * heads * size != hidden_size:
            return (
                f"{heads} attention and {heads} convolution heads of {size} channels do not add up "
                f"to {hidden_size}: Hugging Face's ConvBERT expresses only "
                "config.model.head_ratio=2, and of the release's small generator only the form of "
                "--config.generator.release_heads=false; train with these, or export with "
                "--format=tensorflow1 or stablehlo."
            )
        if self.kernel_size % 2 == 0:
            return (
                f"config.model.kernel_size={self.kernel_size} is even, which Hugging Face's "
                "ConvBERT cannot run; train with an odd one, or export with --format=stablehlo."
            )
        return ""

    def __str__(self) -> str:
        heads = self.attention_heads
        return (
            f"{heads} attention + {heads} convolution heads of {self.head_size}, "
            f"{self.kernel_size} taps"
        )


class MixedAttention(nnx.Module):
    """Self-attention heads beside as many heads of span-based dynamic convolution (ConvBERT §3.2).

    Both share the query; the convolution has a value projection of its own. Their outputs are put
    side by side, [attention heads, convolution heads].
    """

    def __init__(self, config: Mixed, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        hidden, heads, taps = hidden_size, config.attention_heads, config.kernel_size
        width = heads * config.head_size
        self.query = Dense(hidden, width, initializers.dense, rngs)
        self.key = Dense(hidden, width, initializers.dense, rngs)
        self.value = Dense(hidden, width, initializers.dense, rngs)
        self.key_conv = SeparableConv(hidden, width, taps, initializers, rngs)
        self.conv_kernel = Dense(width, heads * taps, initializers.dense, rngs)
        self.conv_value = Dense(hidden, width, initializers.dense, rngs)
        self.output = Dense(2 * width, hidden, initializers.dense, rngs)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        c = self.config
        query, keys, value = project(x, c.attention_heads, self.query, self.key, self.value)
        attended = attend(
            query, keys, value, segment_ids, dropout_rate=c.attention_dropout, dropout_key=key,
            implementation=c.attention, capture=capture,
        )  # fmt: skip
        conv_ids = segment_ids if c.mask_convolution else None
        query, span_key = join(query), self.key_conv(x, conv_ids, c.convolution)
        values = self.conv_value(x)
        projection = (self.conv_kernel.kernel[...], self.conv_kernel.bias[...])
        if capture is not None:
            capture.offer(
                "filters",
                lambda: span_filters(query, span_key, *projection, heads=c.attention_heads),
            )
        convolved = span_dynamic_conv(
            query, span_key, values, *projection, heads=c.attention_heads, segment_ids=conv_ids,
            implementation=c.convolution,
        )  # fmt: skip
        return self.output(jnp.concatenate([join(attended), convolved], axis=-1))
