"""Cross-entropy, of which every loss over classes, tokens or places is made."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(logits: Float[Array, "*B W"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """-log softmax(logits)[label] in nats."""
    correct = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - correct
