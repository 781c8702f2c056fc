"""Extractive question answering (SQuAD): losses, and the best answer spans of every window.

Two heads, by `config.outputs.head`:

span        Independent start and end (BERT §4.2). Windows without the answer are trained to point
            at [CLS], which means "not here". A span's score is its log probability within the
            window, including [CLS]. A window without an answer therefore scores all its spans
            low, and scores of different windows are comparable. The no-answer score is the log
            odds of [CLS] against the best span. The last context token is the last possible end.
span_beam   The official head. The end is predicted given the start: the correct one in training,
            each of the `beam` best at prediction; a classifier predicts answerability. The final
            [SEP] takes part in the softmax but is not an answer. Windows without the answer are
            trained on (0, 0), with their question still labeled answerable.

Losses map (model, batch, key) to the loss and the weight of each row, as in `classification.py`.
The model has `encode(tokens, segment_ids, type_ids, dtype, key)`, which returns hidden states
[B, L, C], and `head`. Losses read start, end and impossible from the batch, predictions read best.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.interfaces import AnswerBatch
from convbert_jax.objectives.classification import RowLosses
from convbert_jax.objectives.cross_entropy import cross_entropy

IMPOSSIBLE_WEIGHT = 0.5  # of the answerability loss
NOWHERE = -1e9  # logit of positions that cannot be an answer

# starts, ends: int32 [B, N] positions, best first. start_scores, end_scores: float32 [B, N] log
# probabilities, whose sum is the span's score; in empty slots one of them is at most NOWHERE.
# null_odds: float32 [B], larger if the window seems to have no answer.
Spans = dict[str, Array]


# --- span ---


def plain_losses(
    model: nnx.Module, batch: AnswerBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Compute (start + end) / 2 cross-entropy in nats; the key draws dropout."""
    start, end = _plain_logits(model, batch, dtype, key)
    losses = (cross_entropy(start, batch["start"]) + cross_entropy(end, batch["end"])) / 2
    return losses, jnp.ones_like(losses)


def plain_spans(
    model: nnx.Module, batch: AnswerBatch, *, dtype: jnp.dtype, answer_length: int, n_best: int
) -> Spans:
    """Return the `n_best` best spans of at most `answer_length` tokens, searched exhaustively."""
    start, end = _plain_logits(model, batch, dtype, None)
    start, end = jax.nn.log_softmax(start), jax.nn.log_softmax(end)
    most = answer_length
    # All spans that are short enough: ends[b, s, d] is the score of the end s + d.
    padded = jnp.pad(end, ((0, 0), (0, most)), constant_values=NOWHERE)
    length = end.shape[1]
    ends = jnp.stack([padded[:, d : d + length] for d in range(most)], axis=-1)
    starting = jnp.where(_context(batch) & batch["best"], start, NOWHERE)
    scores = starting[..., None] + ends
    _, chosen = _top(scores.reshape(len(scores), -1), n_best)
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


def _plain_logits(model, batch, dtype, key):
    logits = jnp.moveaxis(model.head(_encode(model, batch, dtype, key)), -1, 0)
    return jnp.where(_context(batch) | _first(batch), logits, NOWHERE)


# --- span_beam ---


def beam_losses(
    model: nnx.Module, batch: AnswerBatch, key: Array | None, *, dtype: jnp.dtype
) -> RowLosses:
    """Compute (start + end) / 2 cross-entropy + 0.5 * answerability loss; see `plain_losses`."""
    hidden = _encode(model, batch, dtype, key)
    start, penalty, impossible = _start_of_beam(model.head, hidden, batch)
    end = model.head.end_logits(hidden, _row(hidden, batch["start"])) + penalty
    losses = (cross_entropy(start, batch["start"]) + cross_entropy(end, batch["end"])) / 2
    losses += IMPOSSIBLE_WEIGHT * _binary_cross_entropy(impossible, batch["impossible"])
    return losses, jnp.ones_like(losses)


def beam_spans(
    model: nnx.Module,
    batch: AnswerBatch,
    *,
    dtype: jnp.dtype,
    answer_length: int,
    n_best: int,
    beam: int,
) -> Spans:
    """Return the `n_best` spans among the `beam` best starts and the `beam` best ends of each."""
    head, hidden = model.head, _encode(model, batch, dtype, None)
    start, penalty, impossible = _start_of_beam(head, hidden, batch)
    start_scores, starts = _top(jax.nn.log_softmax(start), beam)

    def follow(place):  # one start of every window at a time, to save memory
        end = head.end_logits(hidden, _row(hidden, place)) + penalty
        return _top(jax.nn.log_softmax(end), beam)

    end_scores, ends = jax.lax.map(follow, starts.T)
    end_scores, ends = jnp.moveaxis(end_scores, 0, 1), jnp.moveaxis(ends, 0, 1)  # [B, start, end]
    context, best = _context(batch), batch["best"]
    flat = ends.reshape(len(ends), -1)
    legal = _take(context, flat).reshape(ends.shape) & _take(context & best, starts)[..., None]
    size = ends - starts[..., None] + 1
    legal &= (size >= 1) & (size <= answer_length)
    scores = jnp.where(legal, start_scores[..., None] + end_scores, NOWHERE)
    _, chosen = _top(scores.reshape(flat.shape), n_best)
    found = _take(legal.reshape(flat.shape), chosen)
    first = chosen // ends.shape[-1]
    return {
        "starts": _take(starts, first),
        "ends": _take(flat, chosen),
        "start_scores": jnp.where(found, _take(start_scores, first), NOWHERE),
        "end_scores": jnp.where(found, _take(end_scores.reshape(flat.shape), chosen), NOWHERE),
        "null_odds": impossible,
    }


def _start_of_beam(head, hidden, batch):
    """Return start logits, the penalty of illegal positions (-1000), and answerability logits."""
    allowed = ((batch["segment_ids"] > 0) & (batch["type_ids"] == 1)) | _first(batch)
    penalty = 1000.0 * (allowed.astype(jnp.float32) - 1)
    start = head.start_logits(hidden) + penalty
    return start, penalty, head.impossible_logit(hidden, jax.nn.softmax(start))


# --- shared ---


def _encode(model, batch, dtype, key) -> Float[Array, "B L C"]:
    return model.encode(
        batch["tokens"], batch["segment_ids"], batch["type_ids"], dtype=dtype, key=key
    )


def _first(batch) -> Bool[Array, "B L"]:
    return jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]) == 0, batch["tokens"].shape)


def _context(batch) -> Bool[Array, "B L"]:
    """Return a mask of the context without the final [SEP]."""
    real = batch["segment_ids"] > 0
    followed = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))
    return real & followed & (batch["type_ids"] == 1)


def _top(scores: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the `count` best; missing entries have score NOWHERE and index 0."""
    values, places = jax.lax.top_k(scores, min(count, scores.shape[1]))
    missing = ((0, 0), (0, count - values.shape[1]))
    return jnp.pad(values, missing, constant_values=NOWHERE), jnp.pad(places, missing)


def _take(values: Array, places: Int[Array, "B K"]) -> Array:
    return jnp.take_along_axis(values, places, axis=1)


def _row(hidden: Float[Array, "B L C"], places: Int[Array, " B"]) -> Float[Array, "B C"]:
    return jnp.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]


def _binary_cross_entropy(logits: Float[Array, " B"], labels: Array) -> Float[Array, " B"]:
    return jnp.logaddexp(0.0, logits) - logits * labels.astype(jnp.float32)
