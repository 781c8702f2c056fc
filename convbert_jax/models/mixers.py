"""Token mixers: what can stand where a Transformer layer has its self-attention.

A mixer is called as mixer(x [B, L, C], segment_ids [B, L], key) -> [B, L, C]; MIXERS is the choice.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import LayerConfig
from convbert_jax.models.attention import attend
from convbert_jax.models.convolution import SeparableConv
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops import depthwise_conv
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv

_KEY_CONVOLUTIONS = ("auto", *depthwise_conv.IMPLEMENTATIONS)  # without the one named, XLA's


class SelfAttention(nnx.Module):
    """Multi-head self-attention (BERT, ELECTRA), or the bottleneck: fewer heads than fill the
    hidden size.
    """

    def __init__(self, config: LayerConfig, initializers: Initializers, rngs: nnx.Rngs):
        width = config.attention_heads * config.head_size
        self.query = Dense(config.hidden_size, width, initializers.dense, rngs)
        self.key = Dense(config.hidden_size, width, initializers.dense, rngs)
        self.value = Dense(config.hidden_size, width, initializers.dense, rngs)
        self.output = Dense(width, config.hidden_size, initializers.dense, rngs)
        self.config = config

    def __call__(
        self, x: Float[Array, "B L C"], segment_ids: Int[Array, "B L"], key: Array | None = None
    ) -> Float[Array, "B L C"]:
        c = self.config
        query, keys, value = _project(x, c.attention_heads, self.query, self.key, self.value)
        attended = attend(
            query, keys, value, segment_ids, dropout_rate=c.attention_dropout, dropout_key=key,
            implementation=c.attention,
        )  # fmt: skip
        return self.output(_join(attended))


class MixedAttention(nnx.Module):
    """Self-attention heads beside as many heads of span-based dynamic convolution (ConvBERT §3.2).

    Both share the query; the convolution has a value projection of its own. Their outputs are put
    side by side, [attention heads, convolution heads].
    """

    def __init__(self, config: LayerConfig, initializers: Initializers, rngs: nnx.Rngs):
        hidden, heads, taps = config.hidden_size, config.attention_heads, config.kernel_size
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
        self, x: Float[Array, "B L C"], segment_ids: Int[Array, "B L"], key: Array | None = None
    ) -> Float[Array, "B L C"]:
        c = self.config
        query, keys, value = _project(x, c.attention_heads, self.query, self.key, self.value)
        attended = attend(
            query, keys, value, segment_ids, dropout_rate=c.attention_dropout, dropout_key=key,
            implementation=c.attention,
        )  # fmt: skip
        conv_ids = segment_ids if c.mask_convolution else None
        convolved = span_dynamic_conv(
            _join(query),
            self.key_conv(
                x, conv_ids, c.convolution if c.convolution in _KEY_CONVOLUTIONS else "xla"
            ),
            self.conv_value(x),
            self.conv_kernel.kernel[...],
            self.conv_kernel.bias[...],
            heads=c.attention_heads,
            segment_ids=conv_ids,
            implementation=c.convolution,
        )
        return self.output(jnp.concatenate([_join(attended), convolved], axis=-1))


MIXERS = {"mixed": MixedAttention, "attention": SelfAttention}


def _project(
    x: Float[Array, "B L C"], heads: int, *layers: Dense
) -> list[Float[Array, "B L {heads} D"]]:
    """Each layer applied to `x`, split into heads."""
    return [layer(x).reshape(*x.shape[:2], heads, -1) for layer in layers]


def _join(x: Float[Array, "B L H D"]) -> Float[Array, "B L HD"]:
    return x.reshape(*x.shape[:2], -1)
