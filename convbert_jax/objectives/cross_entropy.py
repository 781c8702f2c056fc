"""Cross-entropy over classes, tokens or positions, and sums of softmax weights over blocks.

On a TPU, the block sums of a vocabulary serve both the loss and the sampling of replacements.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops import dispatch

BLOCK = 256  # classes per block
# Scope of a conditional whose expensive branch runs in few steps or none; plans leave it out.
RARELY_TAKEN = "rarely_taken"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def cross_entropy(
    logits: Float[Array, "*B W"],
    labels: Int[Array, "*B"],
    smoothing: float = 0.0,
    by_blocks: bool = False,
    z_loss: float = 0.0,
) -> Float[Array, "*B"]:
    """Compute -sum over classes of target * log softmax(logits), in nats.

    The gradient, softmax(logits) - target, is recomputed from the logits in one pass. Autodiff
    would save their exponentials, an array of equal size, and subtract the label with a scatter.

    Args:
      smoothing: Label smoothing (Szegedy et al. 2016, §7): the target is 1 - smoothing at the label
        plus smoothing / W everywhere; 0.0 uses the label alone.
      by_blocks: Whether block sums of the same logits are also needed for sampling; a TPU then
        reads the logits once for both.
      z_loss: Weight of an added (log sum exp(logits))^2, which keeps logits near 0 (Chowdhery et
        al. 2022, §5).
    """
    return _forward(logits, labels, smoothing, by_blocks, z_loss)[0]


def _forward(logits, labels, smoothing, by_blocks, z_loss):
    shared = by_blocks and dispatch.platform() == "tpu"
    total = (_log_of_blocks if shared else functools.partial(jax.nn.logsumexp, axis=-1))(logits)
    aimed = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    if smoothing:
        aimed = (1 - smoothing) * aimed + smoothing * logits.mean(axis=-1)
    value = total - aimed
    if z_loss:
        value += z_loss * jnp.square(total)
    return value, (logits, labels, total)


def _log_of_blocks(logits):
    return logits.max(axis=-1) + jnp.log(add_up_blocks(weigh(logits)).sum(axis=-1))


def _backward(smoothing, by_blocks, z_loss, saved, cotangent):
    logits, labels, total = saved
    classes = logits.shape[-1]
    shares = jnp.exp(logits - total[..., None])
    if z_loss:
        shares *= 1 + 2 * z_loss * total[..., None]
    is_label = jnp.arange(classes) == labels[..., None]
    target = (1 - smoothing) * is_label + smoothing / classes
    return ((shares - target) * cotangent[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def top1_accuracy(logits: Float[Array, "*B W"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return 1 if only the label has the largest logit, 1/n if n classes share it, else 0.

    Constant logits score 1/W, like guessing. NaN scores 0.
    """
    correct = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    # This maximum is found in the same pass over the logits as the one of the loss.
    others = jnp.where(is_label, -jnp.inf, logits).max(axis=-1, keepdims=True)

    def count():
        return jnp.maximum(1, (logits == correct).sum(axis=-1))

    if dispatch.platform() == "tpu":
        # Counting is a second pass, done only if some label has an equal. A GPU would wait for the
        # host at a branch, and CPUs must not communicate inside of one.
        with jax.named_scope(RARELY_TAKEN):
            ties = jax.lax.cond(
                jnp.any(correct == others), count, lambda: jnp.ones(labels.shape, jnp.int32)
            )
    else:
        ties = count()
    return (correct >= others)[..., 0] / ties


def weigh(logits: Float[Array, "*B W"]) -> Float[Array, "*B W"]:
    """Compute exp(logits - max), so the most likely class of a row has weight 1."""
    return jnp.exp(logits - logits.max(axis=-1, keepdims=True))


def add_up_blocks(weights: Float[Array, "*B W"]) -> Float[Array, "*B N"]:
    """Sum the weights of each block; N is W / BLOCK rounded up, the last block may be smaller.

    A matrix product with a 0/1 table avoids reshaping: block boundaries do not match TPU tiles, so
    slicing would copy all weights, and a separate sum would read them again.
    """
    classes = weights.shape[-1]
    block = jnp.arange(classes) // BLOCK
    return add_up_marked(weights, block[:, None] == jnp.arange(-(-classes // BLOCK)))


def add_up_marked(weights: Float[Array, "*B W"], table: Bool[Array, "W N"]) -> Float[Array, "*B N"]:
    """Sum the weights that each table column marks.

    Three bfloat16 passes make the result exact to more than 16 bits.
    """
    table = table.astype(weights.dtype)
    return jnp.einsum("...v,vn->...n", weights, table, precision=jax.lax.Precision.HIGH)
