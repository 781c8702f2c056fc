"""Masked language modeling (BERT §3.1, task 1), as a recipe and for `replaced_token`'s generator.

With config.objective.sentence_pairs, the same pass also classifies pairs of texts (task 2; ALBERT
§3.1).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config
from convbert_jax.interfaces import Batch, PairBatch, SpecialIds
from convbert_jax.objectives import distillation, masking, metrics
from convbert_jax.objectives.cross_entropy import cross_entropy, top1_accuracy


def prediction_metrics(
    logits: Float[Array, "B M V"], losses: Float[Array, "B M"], masked: masking.Masked
) -> metrics.Metrics:
    """Return loss and top-1 accuracy of the masked tokens."""
    correct = top1_accuracy(logits, masked.labels)
    return {
        "mlm_loss": metrics.mean(losses, masked.weights),
        "mlm_accuracy": metrics.mean(correct, masked.weights),
    }


def hide(batch: Batch, key: Array, *, config: Config, special: SpecialIds) -> masking.Masked:
    """Mask the tokens of a batch."""
    return masking.mask(
        key,
        batch["tokens"],
        batch["segment_ids"],
        objective=config.objective,
        special=special,
        vocab_size=config.tokenizer.vocab_size,
        most=config.max_predictions,
        slots=config.prediction_slots,
    )


def hide_and_predict(
    model: nnx.Module,
    batch: Batch,
    mask_key: Array,
    dropout_key: Array | None,
    *,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[masking.Masked, Float[Array, "B M V"]]:
    """Mask a batch and compute logits of the masked tokens; arguments are as in `loss`."""
    masked = hide(batch, mask_key, config=config, special=special)
    inputs = masked.tokens, batch["segment_ids"], batch["type_ids"], masked.positions
    return masked, model.generate(*inputs, dtype=dtype, key=dropout_key)


def pair_metrics(logits: Float[Array, "B 2"], labels: Int[Array, " B"]) -> metrics.Metrics:
    """Return loss and accuracy of the rows that have a pair label."""
    judged = labels >= 0
    losses = cross_entropy(logits, jnp.maximum(labels, 0))
    return {
        "pair_loss": metrics.mean(losses, judged),
        "pair_accuracy": metrics.mean(top1_accuracy(logits, jnp.maximum(labels, 0)), judged),
    }


def terms(config: Config) -> dict[str, float]:
    """Return the weighted terms of the evaluation loss, which has no teacher."""
    return {"mlm_loss": 1.0} | (
        {} if config.objective.sentence_pairs == "none" else {"pair_loss": 1.0}
    )


def loss(
    model: nnx.Module,
    batch: Batch | PairBatch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
    teacher: distillation.Teacher | None = None,
) -> tuple[Array, metrics.Metrics]:
    """Compute the mean cross-entropy of the masked tokens, plus the pair loss if configured.

    The two are summed as in BERT's official code. A teacher adds the terms of config.distillation,
    with its logits at the masked tokens.

    Args:
      model: `encode`, `predict` and, with pairs, `judge`, as in `MaskedLanguageModel`.
      key: Draws masks and, if `train`, dropout.
    """
    d = config.distillation
    mask_key, dropout_key = jax.random.split(key)
    masked = hide(batch, mask_key, config=config, special=special)
    inputs = masked.tokens, batch["segment_ids"], batch["type_ids"]
    dropout_key = dropout_key if train else None
    if teacher is None:
        hidden = model.encode(*inputs, dtype=dtype, key=dropout_key)
    else:
        hidden, observed = distillation.observe_student(model, inputs, dropout_key, dtype, config)
    logits = model.predict(hidden, masked.positions)
    z_loss = config.objective.z_loss if train else 0.0
    losses = cross_entropy(logits, masked.labels, z_loss=z_loss)
    result = prediction_metrics(logits, losses, masked)
    value = metrics.ratio(result["mlm_loss"])
    if teacher is not None:
        theirs, head = teacher(*inputs, dtype=dtype)
        taught, found = distillation.terms(
            d, observed, theirs, batch["segment_ids"], model.projections
        )
        if d.logits_weight:
            apart = distillation.word_divergence(logits, head(masked.positions), d.temperature)
            found["distill_logits"] = metrics.mean(apart, masked.weights)
            taught += d.logits_weight * metrics.ratio(found["distill_logits"])
        value = d.labels_weight * value + taught
        result |= found
    if config.objective.sentence_pairs != "none":
        result |= pair_metrics(model.judge(hidden), batch["pair_label"])
        value += metrics.ratio(result["pair_loss"])
    return value, result | {"loss": (value, jnp.ones(()))}
