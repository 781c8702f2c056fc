"""Cross-entropy, of which every loss over classes, tokens or places is made; and what blocks of
neighboring classes weigh, which of a vocabulary a TPU adds up once for the loss and for the draw of
replacements.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops import dispatch

BLOCK = 256  # classes that are added up together


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: Float[Array, "*B W"],
    labels: Int[Array, "*B"],
    smoothing: float = 0.0,
    by_blocks: bool = False,
) -> Float[Array, "*B"]:
    """-sum over classes of target * log softmax(logits), in nats.

    The gradient, softmax(logits) - target, is made of the logits anew, in one pass. Autodiff keeps
    their exponentials, as large as they are, and adds -1 by a scatter.

    Args:
      smoothing: the target is 1 - smoothing at the label plus smoothing / W everywhere (label
        smoothing, Szegedy et al. 2016, §7); 0.0 is the label alone.
      by_blocks: the weights of blocks of these logits are added up beside, for a draw; a TPU then
        reads the logits once for both.
    """
    return _forward(logits, labels, smoothing, by_blocks)[0]


def _forward(logits, labels, smoothing, by_blocks):
    shared = by_blocks and dispatch.platform() == "tpu"
    total = (_log_of_blocks if shared else functools.partial(jax.nn.logsumexp, axis=-1))(logits)
    aimed = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    if smoothing:
        aimed = (1 - smoothing) * aimed + smoothing * logits.mean(axis=-1)
    return total - aimed, (logits, labels, total)


def _log_of_blocks(logits):
    return logits.max(axis=-1) + jnp.log(add_up_blocks(weigh(logits)).sum(axis=-1))


def _backward(smoothing, by_blocks, saved, cotangent):
    logits, labels, total = saved
    classes = logits.shape[-1]
    shares = jnp.exp(logits - total[..., None])
    is_label = jnp.arange(classes) == labels[..., None]
    target = (1 - smoothing) * is_label + smoothing / classes
    return ((shares - target) * cotangent[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def top1_accuracy(logits: Float[Array, "*B W"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """1 where the label alone has the largest logit, 1/n where n classes share it, 0 elsewhere.

    Constant logits therefore score 1/W, as guessing does. NaN scores 0. The loss needs the largest
    logit too, which makes this cheaper than an argmax.
    """
    correct = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    ties = jnp.maximum(1, (logits == largest).sum(axis=-1))
    return (correct >= largest)[..., 0] / ties


def weigh(logits: Float[Array, "*B W"]) -> Float[Array, "*B W"]:
    """exp(logits) without their scale: the likeliest class of a row weighs 1."""
    return jnp.exp(logits - logits.max(axis=-1, keepdims=True))


def add_up_blocks(weights: Float[Array, "*B W"]) -> Float[Array, "*B N"]:
    """The weight of each block, of which the last may be smaller: N is W / BLOCK, rounded up.

    By a product with a table of zeros and ones. A TPU keeps rows of W in tiles that no block is a
    part of, so cutting moves all of them, and a sum beside the loss would read all of them again.
    """
    classes = weights.shape[-1]
    block = jnp.arange(classes) // BLOCK
    return add_up_marked(weights, block[:, None] == jnp.arange(-(-classes // BLOCK)))


def add_up_marked(weights: Float[Array, "*B W"], table: Bool[Array, "W N"]) -> Float[Array, "*B N"]:
    """For each column of the table the sum of the weights that it marks, exact to 16 bits and more:
    the weights in three passes of bfloat16.
    """
    table = table.astype(weights.dtype)
    return jnp.einsum("...v,vn->...n", weights, table, precision=jax.lax.Precision.HIGH)
