"""Heads that map hidden states to logits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.layers import Dense, Initializers, dropout, make_norm
from convbert_jax.ops.nn import gelu
from convbert_jax.ops.products import dense, einsum


class MaskedLanguageHead(nnx.Module):
    """Dense to the embedding size, GELU, norm, tied output embedding and bias (BERT)."""

    def __init__(
        self,
        hidden_size: int,
        config: EmbeddingsConfig,
        initializers: Initializers,
        rngs: nnx.Rngs,
    ):
        self.dense = Dense(hidden_size, config.size, initializers.dense, rngs, config.biases)
        self.norm = make_norm(config, config.size)
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


SPAN_HIDDEN = 512  # width of the hidden layers, for every model size


class SpanBeamHead(nnx.Module):
    """Start, end given the start, and answerability (finetune/qa/qa_tasks.py, official ConvBERT).

    The plain head has independent start and end logits, as Hugging Face's
    ConvBertForQuestionAnswering; it is `TokenHead` with two labels.

    All layers use TensorFlow's default Glorot initializer. No dropout.
    """

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        glorot = initializers.glorot
        self.start = Dense(hidden_size, 1, glorot, rngs)
        self.end_hidden = Dense(2 * hidden_size, SPAN_HIDDEN, glorot, rngs)
        self.end = Dense(SPAN_HIDDEN, 1, glorot, rngs)
        self.impossible_hidden = Dense(2 * hidden_size, SPAN_HIDDEN, glorot, rngs)
        self.impossible = Dense(SPAN_HIDDEN, 1, glorot, rngs)

    def start_logits(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B L"]:
        """Return float32 start logits."""
        return self.start(hidden.astype(jnp.float32))[..., 0]

    def end_logits(
        self, hidden: Float[Array, "B L C"], start: Float[Array, "B C"]
    ) -> Float[Array, "B L"]:
        """Return float32 logits of every end, given the hidden state of one start."""
        # concat(start, token) W is split in two: the start's part is the same for all tokens.
        kernel, bias = self.end_hidden.kernel[...], self.end_hidden.bias[...]
        width = hidden.shape[-1]
        from_start = dense(start, kernel[:width], bias, jnp.float32)
        inner = dense(hidden, kernel[width:], from_start[:, None], hidden.dtype)
        return self.end(gelu(inner).astype(jnp.float32))[..., 0]

    def impossible_logit(
        self, hidden: Float[Array, "B L C"], start_probabilities: Float[Array, "B L"]
    ) -> Float[Array, " B"]:
        """Return a float32 logit, positive if the text has no answer, from [CLS] and the start.

        The start is the expected hidden state under `start_probabilities`.
        """
        probabilities = start_probabilities.astype(hidden.dtype)
        expected = einsum("bl,blc->bc", probabilities, hidden, hidden.dtype)
        both = jnp.concatenate([hidden[:, 0], expected], axis=-1)
        return self.impossible(gelu(self.impossible_hidden(both)).astype(jnp.float32))[..., 0]
