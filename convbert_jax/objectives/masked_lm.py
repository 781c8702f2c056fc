"""Masked language modeling (BERT §3.1, task 1): predict the hidden tokens. Alone it is a recipe, in
`replaced_token` it is the generator's part."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.config import Config
from convbert_jax.interfaces.batch import Batch
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.objectives import masking, metrics
from convbert_jax.objectives.cross_entropy import cross_entropy


def prediction_metrics(
    logits: Float[Array, "B M V"], losses: Float[Array, "B M"], masked: masking.Masked
) -> metrics.Metrics:
    """Loss and arg-max accuracy of the hidden tokens."""
    correct = jnp.argmax(logits, axis=-1) == masked.labels
    return {
        "mlm_loss": metrics.mean(losses, masked.weights),
        "mlm_accuracy": metrics.mean(correct, masked.weights),
    }


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
    """A batch with hidden tokens, and the logits for them; arguments as `loss`."""
    masked = masking.mask(
        mask_key,
        batch["tokens"],
        batch["segment_ids"],
        objective=config.objective,
        special=special,
        vocab_size=config.tokenizer.vocab_size,
        most=config.max_predictions,
        slots=config.prediction_slots,
    )
    logits = model.generate(
        masked.tokens,
        batch["segment_ids"],
        batch["type_ids"],
        masked.positions,
        dtype=dtype,
        key=dropout_key,
    )
    return masked, logits


def loss(
    model: nnx.Module,
    batch: Batch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[Array, metrics.Metrics]:
    """Mean cross-entropy of the hidden tokens.

    Args:
      model: `generate(tokens, segment_ids, type_ids, positions, dtype, key) -> logits [B, M, V]`.
      key: draws the masks, and dropout where `train`.
    """
    mask_key, dropout_key = jax.random.split(key)
    settings = {"dtype": dtype, "config": config, "special": special}
    masked, logits = hide_and_predict(
        model, batch, mask_key, dropout_key if train else None, **settings
    )
    losses = cross_entropy(logits, masked.labels)
    result = prediction_metrics(logits, losses, masked)
    total, weight = result["mlm_loss"]
    value = total / (weight + 1e-6)
    return value, result | {"loss": (value, jnp.ones(()))}
