"""Sequence-to-sequence loss: cross-entropy of a target text given a source text.

Used for translation, summarization, text-to-text, and corpus objectives that make such pairs.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config, ObjectiveSection
from convbert_jax.interfaces import Evaluator, LanguageBatch, SequenceBatch, SpecialIds
from convbert_jax.objectives import metrics
from convbert_jax.objectives.cross_entropy import cross_entropy, top1_accuracy

# perplexity -> the metric in nats whose exponential it is
PERPLEXITIES = {"perplexity": "token_loss", "word_perplexity": "word_loss"}


def loss(
    model: nnx.Module,
    batch: SequenceBatch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[Array, metrics.Metrics]:
    """Compute the mean cross-entropy of the target tokens, including [SEP].

    Args:
      model: `(source, source_ids, tokens, segment_ids, dtype, key) -> logits [B, T, V]`.
      key: Draws dropout if `train`.
    """
    del special
    logits = model(
        batch["source"],
        batch["source_ids"],
        batch["tokens"],
        batch["segment_ids"],
        dtype=dtype,
        key=key if train else None,
    )
    return judge(logits, batch, config.objective)


def judge(
    logits: Float[Array, "B T V"], batch: LanguageBatch, objective: ObjectiveSection
) -> tuple[Array, metrics.Metrics]:
    """Compute loss and metrics from logits and the labels of a batch.

    The loss is the mean over the batch's tokens, as in fairseq. `token_loss` is the cross-entropy
    without label smoothing and z-loss, in nats.
    """
    weights = (batch["segment_ids"] != 0).astype(jnp.float32)
    labels = batch["labels"]
    losses = cross_entropy(logits, labels)
    smoothed = cross_entropy(logits, labels, objective.label_smoothing, z_loss=objective.z_loss)
    sums = metrics.mean(smoothed, weights)
    return metrics.ratio(sums), {
        "loss": sums,
        "token_loss": metrics.mean(losses, weights),
        "token_accuracy": metrics.mean(top1_accuracy(logits, labels), weights),
    }


def count_words(
    token_loss: tuple[Array, Array],
    batch: LanguageBatch,
    begins_word: Int[Array, " V"],
    end: int,
) -> tuple[Array, Array]:
    """Return the nats with a weight of one per word and one per end of document.

    This is the usual word count of language models. A word counts where a token begins it.
    """
    told = batch["segment_ids"] != 0
    words = (begins_word[batch["labels"]] != 0) | (batch["labels"] == end)
    return token_loss[0], (words & told).sum().astype(jnp.float32)


def heldout(names: tuple[str, ...]) -> Evaluator:
    """Return an evaluator of means over all tokens, and of the resulting perplexities."""
    summed = {PERPLEXITIES.get(name, name) for name in names}
    means = metrics.heldout(summed)

    def finish(state):
        values = means.finish(state)
        values |= {
            name: _exponential(values[nats]) for name, nats in PERPLEXITIES.items() if name in names
        }
        return {name: values[name] for name in sorted(names)}

    return Evaluator(tuple(sorted(names)), means.init, means.update, finish)


def _exponential(nats: float) -> float:
    return math.inf if nats > 700 else math.exp(nats)
