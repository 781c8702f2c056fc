"""Cross-entropy, of which every loss over classes, tokens or places is made."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(
    logits: Float[Array, "*B W"], labels: Int[Array, "*B"], smoothing: float = 0.0
) -> Float[Array, "*B"]:
    """-sum over classes of target * log softmax(logits), in nats.

    The gradient, softmax(logits) - target, is made of the logits anew, in one pass. Autodiff keeps
    their exponentials, as large as they are, and adds -1 by a scatter.

    Args:
      smoothing: the target is 1 - smoothing at the label plus smoothing / W everywhere (label
        smoothing, Szegedy et al. 2016, §7); 0.0 is the label alone.
    """
    return _forward(logits, labels, smoothing)[0]


def _forward(logits, labels, smoothing):
    total = jax.nn.logsumexp(logits, axis=-1)
    aimed = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    if smoothing:
        aimed = (1 - smoothing) * aimed + smoothing * logits.mean(axis=-1)
    return total - aimed, (logits, labels, total)


def _backward(smoothing, saved, cotangent):
    logits, labels, total = saved
    classes = logits.shape[-1]
    shares = jnp.exp(logits - total[..., None])
    is_label = jnp.arange(classes) == labels[..., None]
    target = (1 - smoothing) * is_label + smoothing / classes
    return ((shares - target) * cotangent[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def is_likeliest(logits: Float[Array, "*B W"], labels: Int[Array, "*B"]) -> Bool[Array, "*B"]:
    """Whether no class has a larger logit than the label, as two with the same largest one both
    are. The loss has the largest one too, so this is free; an arg max is one more pass over all
    logits (RESULTS, sections 14 and 15).
    """
    correct = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return correct >= jnp.max(logits, axis=-1)
