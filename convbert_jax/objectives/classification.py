"""Losses of labelled text: classes, a number, a class for each word, or what a teacher said.

Functions of (model, batch, key) to the loss and the weight of each row, both to be multiplied by
the batch's `weight` and summed: the caller makes a mean or a sum of them.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.interfaces.batch import LogitsBatch, TagBatch, TextBatch
from convbert_jax.objectives.cross_entropy import cross_entropy

_NEVER = -1e9  # logit of an output that the task does not have

RowLosses = tuple[Float[Array, " B"], Float[Array, " B"]]


def text_losses(
    model: nnx.Module, batch: TextBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Cross-entropy of the class in nats, or the squared error of the number.

    Args:
      model: `classify(tokens, segment_ids, type_ids, dtype, key) -> logits [B, W]`.
    """
    logits = text_logits(model, batch, key, dtype=dtype)
    losses = _hard_losses(logits, batch)
    return losses, jnp.ones_like(losses)


def distilled_losses(
    model: nnx.Module, batch: TextBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """`text_losses` mixed with the distance to a teacher (Hinton et al., 2015, §2).

    T^2 times the Kullback-Leibler divergence from the teacher's softmax(logits / T) to ours; for
    numbers the squared difference. The batch needs a teacher.
    """
    logits = text_logits(model, batch, key, dtype=dtype)
    temperature, share = batch["temperature"], batch["teacher_weight"]
    teacher = jnp.where(batch["outputs"], batch["teacher"], _NEVER)
    theirs = jax.nn.log_softmax(teacher / temperature)
    ours = jax.nn.log_softmax(logits / temperature)
    soft = temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
    squared = jnp.square(logits[:, 0] - batch["teacher"][:, 0])
    soft = jnp.where(batch["is_regression"], squared, soft)
    losses = share * soft + (1 - share) * _hard_losses(logits, batch)
    return losses, jnp.ones_like(losses)


def text_logits(
    model: nnx.Module, batch: LogitsBatch, key: Array | None = None, *, dtype: jnp.dtype
) -> Float[Array, "B ..."]:
    """Logits, of texts [B, W] or of tokens [B, L, W]; very small where the task has no such output.

    Arguments as `text_losses`.
    """
    logits = model.classify(
        batch["tokens"], batch["segment_ids"], batch["type_ids"], dtype=dtype, key=key
    )
    return jnp.where(batch["outputs"], logits, _NEVER)


def tag_losses(
    model: nnx.Module, batch: TagBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Cross-entropy of the tags of a row, summed; its weight is their number."""
    logits = text_logits(model, batch, key, dtype=dtype)
    tagged = batch["tags"] >= 0
    losses = cross_entropy(logits, jnp.maximum(batch["tags"], 0))
    return jnp.sum(losses * tagged, axis=1), jnp.sum(tagged, axis=1).astype(jnp.float32)


def _hard_losses(logits: Float[Array, "B W"], batch: TextBatch) -> Float[Array, " B"]:
    squared = jnp.square(logits[:, 0] - batch["value"])
    return jnp.where(batch["is_regression"], squared, cross_entropy(logits, batch["label"]))
