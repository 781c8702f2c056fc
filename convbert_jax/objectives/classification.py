"""Fine-tuning losses: classification, regression, tagging, and distillation from a teacher.

Losses map (model, batch, key) to the loss and the weight of each row. The caller multiplies both
by the batch's `weight` and reduces them to a mean or a sum.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.interfaces import LogitsBatch, TagBatch, TextBatch
from convbert_jax.objectives.cross_entropy import cross_entropy

_NEVER = -1e9  # logit of outputs that the task does not have

RowLosses = tuple[Float[Array, " B"], Float[Array, " B"]]


def text_losses(
    model: nnx.Module, batch: TextBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Compute the cross-entropy of the class in nats, or the squared error of the number.

    Args:
      model: `classify(tokens, segment_ids, type_ids, dtype, key) -> logits [B, W]`.
    """
    logits = text_logits(model, batch, key, dtype=dtype)
    losses = _hard_losses(logits, batch)
    return losses, jnp.ones_like(losses)


def label_losses(
    model: nnx.Module, batch: TextBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Compute the mean over labels of the binary cross-entropy in nats.

    The batch must contain `labels` [B, W], 1 for each label of a text. Arguments are as in
    `text_losses`.
    """
    logits = text_logits(model, batch, key, dtype=dtype)
    each = jax.nn.softplus(logits) - logits * batch["labels"]
    losses = jnp.where(batch["outputs"], each, 0.0).sum(axis=-1) / batch["outputs"].sum()
    return losses, jnp.ones_like(losses)


def distilled_losses(
    model: nnx.Module, batch: TextBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Mix `text_losses` with the distance to a teacher (Hinton et al., 2015, §2).

    The distance is T^2 times the Kullback-Leibler divergence from the teacher's softmax(logits / T)
    to the student's, or for regression the squared difference. The batch must contain `teacher`.
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
    """Compute logits per text [B, W] or token [B, L, W]; -1e9 for outputs the task does not have.

    Arguments are as in `text_losses`.
    """
    logits = model.classify(
        batch["tokens"], batch["segment_ids"], batch["type_ids"], dtype=dtype, key=key
    )
    return jnp.where(batch["outputs"], logits, _NEVER)


def tag_losses(
    model: nnx.Module, batch: TagBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Sum the cross-entropy over the tags of each row; the row's weight is the number of tags."""
    logits = text_logits(model, batch, key, dtype=dtype)
    tagged = batch["tags"] >= 0
    losses = cross_entropy(logits, jnp.maximum(batch["tags"], 0))
    return jnp.sum(losses * tagged, axis=1), jnp.sum(tagged, axis=1).astype(jnp.float32)


def _hard_losses(logits: Float[Array, "B W"], batch: TextBatch) -> Float[Array, " B"]:
    squared = jnp.square(logits[:, 0] - batch["value"])
    return jnp.where(batch["is_regression"], squared, cross_entropy(logits, batch["label"]))
