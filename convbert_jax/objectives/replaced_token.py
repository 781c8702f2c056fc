"""Replaced-token detection (ELECTRA §2).

A small generator replaces masked tokens; the discriminator detects the replaced ones.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.config import Config
from convbert_jax.interfaces import Batch, SpecialIds
from convbert_jax.objectives import distillation, masked_lm, masking, metrics
from convbert_jax.objectives.cross_entropy import cross_entropy
from convbert_jax.ops.partitioning import several_cpus


def corrupt(
    model: nnx.Module,
    batch: Batch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[masking.Masked, Array, Array, Array]:
    """Mask the batch and replace masked tokens with samples of the generator.

    A sample that equals the original token is labeled original (ELECTRA §2).

    Returns:
      Masked batch, generator logits [B, M, V], sampled ids [B, M] and corrupted tokens [B, L].
    """
    mask_key, dropout_key, sample_key = jax.random.split(key, 3)
    settings = {"dtype": dtype, "config": config, "special": special}
    masked, logits = masked_lm.hide_and_predict(
        model, batch, mask_key, dropout_key if train else None, **settings
    )
    sampled = masking.sample_tokens(sample_key, logits, masked.labels, objective=config.objective)
    corrupted = masking.put(
        batch["tokens"],
        masked.positions,
        sampled,
        masked.weights > 0,
        average_duplicates=config.objective.average_duplicate_ids,
    )
    return masked, logits, sampled, corrupted


def terms(config: Config) -> dict[str, float]:
    """Return the weighted terms of the evaluation loss, which has no teacher."""
    o = config.objective
    return {"mlm_loss": o.generator_weight, "discriminator_loss": o.discriminator_weight}


def loss(
    model: nnx.Module,
    batch: Batch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
    masked_first: Bool[Array, ""] | None = None,
    teacher: distillation.Teacher | None = None,
) -> tuple[Array, metrics.Metrics]:
    """Compute generator_weight * MLM loss + discriminator_weight * detection loss.

    The detection loss covers all real tokens. In steps with `masked_first`, the discriminator
    encoder's own MLM loss replaces it, and the discriminator's metrics count nothing. Evaluation
    reports both. A teacher adds the terms of config.distillation; it reads the discriminator's
    input.

    Args:
      model: `generate(tokens, segment_ids, type_ids, positions, dtype, key) -> logits [B, M, V]`
        and `discriminate(tokens, segment_ids, type_ids, dtype, key) -> logits [B, L]`. With
        config.objective.masked_lm_steps also `encode`, with the arguments of `discriminate`, and
        on its hidden states `detect(hidden)` and `predict(hidden, positions) -> [B, M, V]`.
      key: Draws masks, replacements and, if `train`, dropout.
      teacher: Requires `encode`, `embed`, `detect` and `projections` of the model.
      masked_first: Whether this is one of the config.objective.masked_lm_steps.
    """
    o = config.objective
    corrupt_key, dropout_key = jax.random.split(key)
    masked, mlm_logits, sampled, corrupted = corrupt(
        model, batch, corrupt_key, train=train, dtype=dtype, config=config, special=special
    )
    by_blocks = masking.adds_up_blocks(o)
    z_loss = o.z_loss if train else 0.0
    mlm_losses = cross_entropy(mlm_logits, masked.labels, by_blocks=by_blocks, z_loss=z_loss)
    result = masked_lm.prediction_metrics(mlm_logits, mlm_losses, masked)
    others = batch["segment_ids"], batch["type_ids"]
    settings = {"dtype": dtype, "key": dropout_key if train else None}

    def detect(logits):
        return _detection_metrics(logits, batch, masked, sampled, corrupted, train, config)

    def predict(hidden):
        logits = model.predict(hidden, masked.positions)
        losses = cross_entropy(logits, masked.labels, z_loss=z_loss)
        found = masked_lm.prediction_metrics(logits, losses, masked)
        return {f"encoder_{name}": sums for name, sums in found.items()}

    taught = None
    if teacher is not None:
        inputs = corrupted, *others
        hidden, observed = distillation.observe_student(
            model, inputs, settings["key"], dtype, config
        )
        logits = model.detect(hidden)
        result |= detect(logits)
        taught, found = _taught(model, logits, observed, inputs, teacher, dtype, config)
        result |= found
    elif masked_first is None:
        result |= detect(model.discriminate(corrupted, *others, **settings))
        if o.masked_lm_steps:
            result |= predict(model.encode(masked.tokens, *others, **settings))
    else:
        # A single encoder pass over the input of the current phase; only the heads differ.
        tokens = jnp.where(masked_first, masked.tokens, corrupted)
        hidden = model.encode(tokens, *others, **settings)
        result |= _one_of(masked_first, predict, lambda h: detect(model.detect(h)), hidden)
    value = o.generator_weight * metrics.ratio(result["mlm_loss"])
    labels = 1.0 if taught is None else config.distillation.labels_weight
    value += labels * o.discriminator_weight * metrics.ratio(result["discriminator_loss"])
    if taught is not None:
        value += taught
    if masked_first is not None:
        value += metrics.ratio(result["encoder_mlm_loss"])  # one of the two sums is empty
    return value, result | {"loss": (value, jnp.ones(()))}


def _taught(model, logits, observed, inputs, teacher, dtype, config: Config):
    """Return the distillation loss and its parts."""
    d, segment_ids = config.distillation, inputs[1]
    theirs, head = teacher(*inputs, dtype=dtype)
    value, found = distillation.terms(d, observed, theirs, segment_ids, model.projections)
    if d.logits_weight:
        apart = distillation.token_divergence(logits, head(None), d.temperature)
        found["distill_logits"] = metrics.mean(apart, segment_ids != 0)
        weight = d.logits_weight * config.objective.discriminator_weight
        value += weight * metrics.ratio(found["distill_logits"])
    return value, found


def _detection_metrics(
    logits: Float[Array, "B L"],
    batch: Batch,
    masked: masking.Masked,
    sampled: Int[Array, "B M"],
    corrupted: Int[Array, "B L"],
    train: bool,
    config: Config,
) -> metrics.Metrics:
    """Return metrics of the sampled replacements and of their detection."""
    real = (batch["segment_ids"] != 0).astype(jnp.float32)
    fake = (corrupted != batch["tokens"]).astype(jnp.float32) * real
    # -log p(label), stable for large logits.
    losses = jax.nn.softplus(logits) - fake * logits
    flagged = (logits > 0).astype(jnp.float32)
    found = metrics.mean(flagged * fake, real)[0]
    # Evaluation ranks the scores of all rows at the end.
    rank = metrics.ranked_pairs if train else lambda scores: scores
    result = {
        "sampled_accuracy": metrics.mean(sampled == masked.labels, masked.weights),
        "replaced_rate": metrics.mean(fake, real),
        "discriminator_loss": metrics.mean(losses, real),
        "discriminator_accuracy": metrics.mean(flagged == fake, real),
        "discriminator_precision": (found, metrics.mean(flagged, real)[0]),
        "discriminator_recall": (found, fake.sum()),
        "discriminator_auc": rank(metrics.Scores(logits, fake > 0, real > 0)),
    }
    if config.objective.release_metrics:
        # The official AUC includes padding as label 0 with probability 0.
        scores = jnp.where(real > 0, logits, -jnp.inf)
        result["release_auc"] = rank(metrics.Scores(scores, fake > 0, jnp.ones_like(real, bool)))
        of_rows = (losses * real).sum(axis=1) / (real.sum(axis=1) + 1e-6)
        result["release_discriminator_loss"] = metrics.mean(of_rows, real.any(axis=1))
    return result


def _one_of(first: Bool[Array, ""], one, other, hidden) -> metrics.Metrics:
    """Return `one(hidden)` if `first`, else `other(hidden)`; metrics of the other one are 0."""

    def alone(run, idle):
        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(idle, hidden)
        )
        return lambda hidden: nothing | run(hidden)

    branches = alone(one, other), alone(other, one)
    if several_cpus():
        both = (branch(hidden) for branch in branches)
        return jax.tree.map(lambda a, b: jnp.where(first, a, b), *both)
    return jax.lax.cond(first, *branches, hidden)
