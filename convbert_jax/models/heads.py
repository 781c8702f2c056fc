"""Heads that turn hidden states into logits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.functions import gelu
from convbert_jax.models.layers import Dense, Initializers, LayerNorm, dropout


class MaskedLanguageHead(nnx.Module):
    """Dense to the embedding size, GELU, layer norm, product with the word table, bias (BERT)."""

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
        """Float32 logits. The table belongs to `embeddings`, which the caller owns."""
        return embeddings.attend(self.norm(gelu(self.dense(x))), self.output_bias[...])


class DiscriminatorHead(nnx.Module):
    """Dense, GELU, dense to one logit: above 0 where a token looks replaced (ELECTRA §2)."""

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        self.dense = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.output = Dense(hidden_size, 1, initializers.glorot, rngs)

    @jax.named_scope("heads")
    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B"]:
        """Float32 logits."""
        return self.output(gelu(self.dense(x)).astype(jnp.float32))[..., 0]


class PairHead(nnx.Module):
    """Two logits from the first token: the second text follows the first, or not. Dense, tanh (the
    pooler), dense (BERT §3.1, task 2).
    """

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        self.dense = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.output = Dense(hidden_size, 2, initializers.dense, rngs)

    @jax.named_scope("heads")
    def __call__(self, x: Float[Array, "B L C"]) -> Float[Array, "B 2"]:
        """Float32 logits."""
        return self.output(jnp.tanh(self.dense(x[:, 0]).astype(jnp.float32)))


class SequenceHead(nnx.Module):
    """Logits of a whole text from its first token: dense, GELU, dense (Hugging Face's ConvBert and
    Electra classes; the release has one dense, `TokenHead` on the first token).

    Args:
      inputs: channels of the token, if not `hidden_size`.
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
        """Float32 logits; with a key, dropout by `rate` between the two layers."""
        inner = dropout(gelu(self.dense(x[:, 0])), rate, key)
        return self.output(inner.astype(jnp.float32))


class TokenHead(nnx.Module):
    """One dense for every token: tagging, or with two labels start and end of an answer."""

    def __init__(self, hidden_size: int, labels: int, initializers: Initializers, rngs: nnx.Rngs):
        self.output = Dense(hidden_size, labels, initializers.dense, rngs)

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B labels"]:
        """Float32 logits."""
        return self.output(x.astype(jnp.float32))
