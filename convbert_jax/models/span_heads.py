"""The release's head for answers that are pieces of the text: the end is predicted from the start.

The plain head, independent start and end logits as in Hugging Face's ConvBertForQuestionAnswering,
is `heads.TokenHead` with two labels.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.models.functions import gelu
from convbert_jax.models.layers import Dense, Initializers
from convbert_jax.ops.products import dense, einsum

HIDDEN = 512  # width of the hidden layers, at every model size


class SpanBeamHead(nnx.Module):
    """Start, end given a start, and answerability (finetune/qa/qa_tasks.py of ConvBERT's release).

    All layers start as TensorFlow's default, Glorot. No dropout.
    """

    def __init__(self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs):
        glorot = initializers.glorot
        self.start = Dense(hidden_size, 1, glorot, rngs)
        self.end_hidden = Dense(2 * hidden_size, HIDDEN, glorot, rngs)
        self.end = Dense(HIDDEN, 1, glorot, rngs)
        self.impossible_hidden = Dense(2 * hidden_size, HIDDEN, glorot, rngs)
        self.impossible = Dense(HIDDEN, 1, glorot, rngs)

    def start_logits(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B L"]:
        """Float32."""
        return self.start(hidden.astype(jnp.float32))[..., 0]

    def end_logits(
        self, hidden: Float[Array, "B L C"], start: Float[Array, "B C"]
    ) -> Float[Array, "B L"]:
        """Float32 logits of every end for one start, given by its hidden state."""
        # concat(start, token) W in two parts: the start's is the same for all tokens.
        kernel, bias = self.end_hidden.kernel[...], self.end_hidden.bias[...]
        width = hidden.shape[-1]
        from_start = dense(start, kernel[:width], bias, jnp.float32)
        inner = dense(hidden, kernel[width:], from_start[:, None], hidden.dtype)
        return self.end(gelu(inner).astype(jnp.float32))[..., 0]

    def impossible_logit(
        self, hidden: Float[Array, "B L C"], start_probabilities: Float[Array, "B L"]
    ) -> Float[Array, " B"]:
        """Float32, above 0 where the text has no answer; from [CLS] and the expected start."""
        probabilities = start_probabilities.astype(hidden.dtype)
        expected = einsum("bl,blc->bc", probabilities, hidden, hidden.dtype)
        both = jnp.concatenate([hidden[:, 0], expected], axis=-1)
        return self.impossible(gelu(self.impossible_hidden(both)).astype(jnp.float32))[..., 0]
