"""SQuAD head of the official code: the end of an answer is predicted given its start.

The plain head has independent start and end logits, as Hugging Face's
ConvBertForQuestionAnswering; it is `heads.TokenHead` with two labels.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.models.functions import gelu
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.products import dense, einsum

HIDDEN = 512  # width of the hidden layers, for every model size


class SpanBeamHead(nnx.Module):
    """Start, end given the start, and answerability (finetune/qa/qa_tasks.py, official ConvBERT).

    All layers use TensorFlow's default Glorot initializer. No dropout.
    """

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        glorot = initializers.glorot
        self.start = Dense(hidden_size, 1, glorot, rngs)
        self.end_hidden = Dense(2 * hidden_size, HIDDEN, glorot, rngs)
        self.end = Dense(HIDDEN, 1, glorot, rngs)
        self.impossible_hidden = Dense(2 * hidden_size, HIDDEN, glorot, rngs)
        self.impossible = Dense(HIDDEN, 1, glorot, rngs)

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
