"""Answers that are pieces of the text (SQuAD): loss, and the best spans of every window.

Two heads, by `config.outputs.head`:

span        Independent start and end (BERT §4.2). A window without the answer is trained to point
            at [CLS], which means "not here", and a span is scored by its log probability within
            its window, where [CLS] takes part: so a window that has no answer gives all of its
            spans little, and spans of different windows compare. That the text has no answer is
            the odds of [CLS] against the best span. Ends at the last context token.
span_beam   The release: the end is predicted from the start, the correct one in training and each
            of the `beam` best at prediction; an answerability classifier beside. The final [SEP] is
            a legal start and end in the softmax, though no answer; windows without the answer are
            trained on (0, 0), and on their question being answerable all the same.

Batches have, as [B, L]: tokens, segment_ids (0 is padding), type_ids (1 is the context and the
final [SEP]); as [B]: start and end (places, 0 where the window lacks the answer), impossible (1
where the question has none), weights (0 for rows that only fill a batch). Prediction needs best
[B, L] instead of targets: the tokens whose best window this is.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.config import Config
from convbert_jax.objectives import metrics

IMPOSSIBLE_WEIGHT = 0.5  # of the answerability loss
NOWHERE = -1e9  # logit of a place that no answer has


def loss(
    model: nnx.Module,
    batch: dict[str, Array],
    key: Array | None,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
) -> tuple[Array, metrics.Metrics]:
    """(start + end) / 2 cross-entropy, of span_beam + 0.5 * that of answerability, in nats.

    Args:
      model: `encode(tokens, segment_ids, type_ids, dtype, key) -> hidden states`, and `head`.
      key: draws dropout where `train`.

    Returns:
      the mean over the rows that count, or their sum if `config.finetune.sum_loss`; and metrics.
    """
    hidden = _encode(model, batch, dtype, key if train else None)
    start, end, impossible = _LOGITS[config.outputs.head](model.head, hidden, batch)
    losses = (_cross_entropy(start, batch["start"]) + _cross_entropy(end, batch["end"])) / 2
    if impossible is not None:
        losses += IMPOSSIBLE_WEIGHT * _binary_cross_entropy(impossible, batch["impossible"])
    weights = batch["weights"].astype(jnp.float32)
    total = (losses * weights).sum()
    value = total if config.finetune.sum_loss else total / (weights.sum() + 1e-6)
    found = (start.argmax(-1) == batch["start"]) & (end.argmax(-1) == batch["end"])
    return value, {
        "loss": metrics.mean(losses, weights),
        "span_accuracy": metrics.mean(found, weights),
    }


def predict(
    model: nnx.Module, batch: dict[str, Array], *, dtype: jnp.dtype, config: Config
) -> dict[str, Array]:
    """The best spans of every window, of tokens that have their best window there.

    Returns:
      starts, ends: int32 [B, N] places, best first, N = config.finetune.n_best.
      start_scores, end_scores: float32 [B, N] log probabilities, which sum to a span's score; of a
        slot without a span one of them is NOWHERE or less.
      null_odds: float32 [B], above 0 where the window looks as if the text has no answer.
    """
    hidden = _encode(model, batch, dtype, None)
    return _PREDICT[config.outputs.head](model.head, hidden, batch, config.finetune)


def _encode(model, batch, dtype, key) -> Float[Array, "B L C"]:
    return model.encode(
        batch["tokens"], batch["segment_ids"], batch["type_ids"], dtype=dtype, key=key
    )


# --- span ---


def _plain_logits(head, hidden, batch):
    logits = jnp.moveaxis(head(hidden), -1, 0)
    allowed = _context(batch) | _first(batch)
    start, end = jnp.where(allowed, logits, NOWHERE)
    return start, end, None


def _plain_spans(head, hidden, batch, settings):
    start, end, _ = _plain_logits(head, hidden, batch)
    start, end = jax.nn.log_softmax(start), jax.nn.log_softmax(end)
    most = settings.answer_length
    # Every pair that is short enough: ends[b, s, d] is the score of the end at s + d.
    padded = jnp.pad(end, ((0, 0), (0, most)), constant_values=NOWHERE)
    length = end.shape[1]
    ends = jnp.stack([padded[:, d : d + length] for d in range(most)], axis=-1)
    starting = jnp.where(_context(batch) & batch["best"], start, NOWHERE)
    scores = starting[..., None] + ends
    _, chosen = _top(scores.reshape(len(scores), -1), settings.n_best)
    starts, distance = chosen // most, chosen % most
    start_scores, end_scores = _take(starting, starts), _take(padded, starts + distance)
    null = start[:, 0] + end[:, 0]
    return {
        "starts": starts,
        "ends": jnp.minimum(starts + distance, length - 1),
        "start_scores": start_scores,
        "end_scores": end_scores,
        "null_odds": null - start_scores[:, 0] - end_scores[:, 0],
    }


# --- span_beam ---


def _beam_allowed(batch):
    return (batch["type_ids"] * (batch["segment_ids"] > 0) == 1) | _first(batch)


def _start_of_beam(head, hidden, batch):
    """The release subtracts 1000 where no answer may be."""
    penalty = 1000.0 * (_beam_allowed(batch).astype(jnp.float32) - 1)
    start = head.start_logits(hidden) + penalty
    return start, penalty, head.impossible_logit(hidden, jax.nn.softmax(start))


def _beam_logits(head, hidden, batch):
    start, penalty, impossible = _start_of_beam(head, hidden, batch)
    end = head.end_logits(hidden, _row(hidden, batch["start"])) + penalty
    return start, end, impossible


def _beam_spans(head, hidden, batch, settings):
    start, penalty, impossible = _start_of_beam(head, hidden, batch)
    start_scores, starts = _top(jax.nn.log_softmax(start), settings.beam)

    def follow(place):  # one start of every window; all at once would need beam times the memory
        end = head.end_logits(hidden, _row(hidden, place)) + penalty
        return _top(jax.nn.log_softmax(end), settings.beam)

    end_scores, ends = jax.lax.map(follow, starts.T)
    end_scores, ends = jnp.moveaxis(end_scores, 0, 1), jnp.moveaxis(ends, 0, 1)  # [B, start, end]
    context, best = _context(batch), batch["best"]
    flat = ends.reshape(len(ends), -1)
    legal = _take(context, flat).reshape(ends.shape) & _take(context & best, starts)[..., None]
    size = ends - starts[..., None] + 1
    legal &= (size >= 1) & (size <= settings.answer_length)
    scores = jnp.where(legal, start_scores[..., None] + end_scores, NOWHERE)
    _, chosen = _top(scores.reshape(flat.shape), settings.n_best)
    found = _take(legal.reshape(flat.shape), chosen)
    first = chosen // ends.shape[-1]
    return {
        "starts": _take(starts, first),
        "ends": _take(flat, chosen),
        "start_scores": jnp.where(found, _take(start_scores, first), NOWHERE),
        "end_scores": jnp.where(found, _take(end_scores.reshape(flat.shape), chosen), NOWHERE),
        "null_odds": impossible,
    }


_LOGITS = {"span": _plain_logits, "span_beam": _beam_logits}
_PREDICT = {"span": _plain_spans, "span_beam": _beam_spans}


# --- parts of both ---


def _first(batch) -> Bool[Array, "B L"]:
    return jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]) == 0, batch["tokens"].shape)


def _context(batch) -> Bool[Array, "B L"]:
    """The context without the final [SEP]."""
    real = batch["segment_ids"] > 0
    followed = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))
    return real & followed & (batch["type_ids"] == 1)


def _top(scores: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The `count` best; where there are fewer, filled up with NOWHERE at 0."""
    values, places = jax.lax.top_k(scores, min(count, scores.shape[1]))
    missing = ((0, 0), (0, count - values.shape[1]))
    return jnp.pad(values, missing, constant_values=NOWHERE), jnp.pad(places, missing)


def _take(values: Array, places: Int[Array, "B K"]) -> Array:
    return jnp.take_along_axis(values, places, axis=1)


def _row(hidden: Float[Array, "B L C"], places: Int[Array, " B"]) -> Float[Array, "B C"]:
    return jnp.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]


def _cross_entropy(logits: Float[Array, "B L"], places: Int[Array, " B"]) -> Float[Array, " B"]:
    return jax.nn.logsumexp(logits, axis=-1) - _take(logits, places[:, None])[:, 0]


def _binary_cross_entropy(logits: Float[Array, " B"], labels: Array) -> Float[Array, " B"]:
    return jnp.logaddexp(0.0, logits) - logits * labels.astype(jnp.float32)
