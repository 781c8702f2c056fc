"""Heads that map hidden states to logits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.functions import gelu
from convbert_jax.models.layers import Dense, Initializers, LayerNorm, dropout


class MaskedLanguageHead(nnx.Module):
    """Dense to the embedding size, GELU, layer norm, tied output embedding and bias (BERT)."""

    def __init__(
        self,
        hidden_size: int,
        config: EmbeddingsConfig,
        initializers: Initializers,
        rngs: nnx.Rngs,
    ):
        self.dense = Dense(hidden_size, config.size, initializers.dense, rngs)
        self.norm = LayerNorm(config.size, config.layer_norm_epsilon)
        self.output_bias = nnx.Param(jnp.zeros(config.vocab_size))

    @jax.named_scope("heads")
    def __call__(self, x: Float[Array, "*B C"], embeddings: Embeddings) -> Float[Array, "*B V"]:
        """Return float32 logits; the caller owns `embeddings`, the tied word embeddings."""
        return embeddings.attend(self.norm(gelu(self.dense(x))), self.output_bias[...])


class DiscriminatorHead(nnx.Module):
    """Dense, GELU, dense to one logit, positive where a token looks replaced (ELECTRA §2)."""

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        self.dense = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.output = Dense(hidden_size, 1, initializers.glorot, rngs)

    @jax.named_scope("heads")
    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B"]:
        """Return float32 logits."""
        return self.output(gelu(self.dense(x)).astype(jnp.float32))[..., 0]


class PairHead(nnx.Module):
    """Next-sentence head: dense and tanh (the pooler) on the first token, dense to two logits.

    Logit 0: the second text follows the first; logit 1: it does not (BERT §3.1, task 2).
    """

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        self.dense = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.output = Dense(hidden_size, 2, initializers.dense, rngs)

    @jax.named_scope("heads")
    def __call__(self, x: Float[Array, "B L C"]) -> Float[Array, "B 2"]:
        """Return float32 logits."""
        return self.output(jnp.tanh(self.dense(x[:, 0]).astype(jnp.float32)))


class SequenceHead(nnx.Module):
    """Text classification from the first token: dense, GELU, dense.

    As in Hugging Face's ConvBert and Electra classes. The official code uses a single dense
    layer, which is `TokenHead` on the first token.

    Args:
      inputs: Channels of the first token; default `hidden_size`.
    """

    def __init__(
        self,
        hidden_size: int,
        labels: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        inputs: int | None = None,
    ):
        self.dense = Dense(inputs or hidden_size, hidden_size, initializers.dense, rngs)
        self.output = Dense(hidden_size, labels, initializers.dense, rngs)

    def __call__(
        self, x: Float[Array, "B L C"], rate: float = 0.0, key: Array | None = None
    ) -> Float[Array, "B labels"]:
        """Return float32 logits; with a key, apply dropout with `rate` between the layers."""
        inner = dropout(gelu(self.dense(x[:, 0])), rate, key)
        return self.output(inner.astype(jnp.float32))


class TokenHead(nnx.Module):
    """One dense layer per token: tagging, or with two labels the start and end of an answer."""

    def __init__(self, hidden_size: int, labels: int, initializers: Initializers, rngs: nnx.Rngs):
        self.output = Dense(hidden_size, labels, initializers.dense, rngs)

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B labels"]:
        """Return float32 logits."""
        return self.output(x.astype(jnp.float32))
