"""Masked language modeling (BERT §3.1, task 1): predict the hidden tokens. Alone it is a recipe, in
`replaced_token` it is the generator's part."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config
from convbert_jax.objectives import masking, metrics


def token_losses(logits: Float[Array, "B M V"], labels: Int[Array, "B M"]) -> Float[Array, "B M"]:
    """Cross-entropy per slot in nats."""
    correct = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - correct


def prediction_metrics(
    logits: Float[Array, "B M V"], losses: Float[Array, "B M"], masked: masking.Masked
) -> metrics.Metrics:
    """Loss and arg-max accuracy of the hidden tokens."""
    correct = jnp.argmax(logits, axis=-1) == masked.labels
    return {
        "mlm_loss": metrics.mean(losses, masked.weights),
        "mlm_accuracy": metrics.mean(correct, masked.weights),
    }


def mask_batch(
    key: Array, batch: dict[str, Array], *, config: Config, special: masking.SpecialIds
) -> masking.Masked:
    """`masking.mask` with the sizes of the config."""
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


def loss(
    model: nnx.Module,
    batch: dict[str, Array],
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: masking.SpecialIds,
) -> tuple[Array, metrics.Metrics]:
    """Mean cross-entropy of the hidden tokens.

    Args:
      model: `generate(tokens, segment_ids, type_ids, positions, dtype, key) -> logits [B, M, V]`.
      batch: tokens, segment_ids and type_ids, each [B, L].
      key: draws the masks, and dropout where `train`.
    """
    mask_key, dropout_key = jax.random.split(key)
    masked = mask_batch(mask_key, batch, config=config, special=special)
    logits = model.generate(
        masked.tokens,
        batch["segment_ids"],
        batch["type_ids"],
        masked.positions,
        dtype=dtype,
        key=dropout_key if train else None,
    )
    losses = token_losses(logits, masked.labels)
    result = prediction_metrics(logits, losses, masked)
    total, weight = result["mlm_loss"]
    value = total / (weight + 1e-6)
    return value, result | {"loss": (value, jnp.ones(()))}
