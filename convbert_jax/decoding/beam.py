"""Beam search with static shapes, as fairseq does it: score / length^alpha, n best with scores."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.decoding import prompts
from convbert_jax.decoding import state as states
from convbert_jax.decoding.prompts import Step


class Hypotheses(NamedTuple):
    """The texts that a beam found for each row, the best first.

    Attributes:
      tokens: with the prompt and the end, `pad` behind it.
      lengths: tokens of each, these two counted; 0 where there are fewer texts than beams.
      scores: log probability of what stands behind the prompt, divided by the number of these
        tokens, the end counted, to the power of alpha; -inf where there is no text.
    """

    tokens: Int[Array, "B K L"]
    lengths: Int[Array, "B K"]
    scores: Float[Array, "B K"]


class _Beams(NamedTuple):
    place: Array
    state: Any
    tokens: Array  # [B, K, L] of texts without an end
    scores: Array  # [B, K] their log probabilities, falling; -inf for none
    ended: Hypotheses


def search(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    first: Int[Array, " B"] | None = None,
    *,
    beam: int,
    length: int,
    end: int,
    pad: int = 0,
    limits: Int[Array, " B"] | None = None,
    never: Sequence[int] = (),
    alpha: float = 1.0,
    early: bool = True,
) -> Hypotheses:
    """The best texts of a beam.

    At each place, of all texts of the beam and the tokens behind them the 2 K most probable: an end
    among the first K finishes its text, and the first K of the others are the new beam.

    Where more texts end at a place than are missing to K, the K best of all stay here; fairseq
    keeps those that ended before and fills up with the most probable ones. The best text is the
    same, the last of the n best may be others.

    Args:
      step: of B K rows, the beams of a row side by side.
      state: of these, behind all of the prompt but its last token: a pytree of arrays with rows
        first, or of what has their `take(rows, axis=0)`; what has `resize(room)` gets room as it
        needs, as `state.loop` says.
      prompt, first, length, end, pad, limits, never: as in `one_by_one.greedy`.
      beam: K.
      alpha: of the length penalty, at least 0; 0 is none.
      early: a row ends when K texts of it have, as in fairseq; with 1 beam this is `greedy`. False:
        when no text of the beam can become better than the K that have ended.

    Raises:
      ValueError: a prompt without room behind it, no beam, or an alpha below 0.
    """
    prompts.check(prompt, length)
    if beam < 1 or alpha < 0:
        raise ValueError(
            f"search: beam={beam}, alpha={alpha}, but beam must be at least 1 and alpha at least 0."
        )
    rows, begun = prompt.shape
    first = jnp.zeros(rows, jnp.int32) if first is None else first
    last = prompts.last_places(limits, first, begun, length)
    last_of_beams = jnp.repeat(last, beam, axis=0)

    def is_done(beams):
        """[B]: K texts have ended, and none can come that is better."""
        full = beams.ended.scores[:, -1] > -jnp.inf
        hopeless = ~(beams.scores[:, 0] > -jnp.inf)
        if early:
            return full | hopeless
        # A log probability only falls, and no text has more tokens to divide it by than this.
        longest = (last - begun + 1).astype(jnp.float32)
        hope = beams.scores[:, 0] / longest**alpha
        return (full & (hope <= beams.ended.scores[:, -1])) | hopeless

    def go_on(beams):
        place, done = beams.place, is_done(beams)
        logits, state = step(beams.tokens[:, :, place].reshape(-1), beams.state, place)
        # The 2 K best of all are among the 2 K best of each beam.
        following, words = prompts.best(
            logits, min(2 * beam, logits.shape[1]), end, place + 1 >= last_of_beams, never
        )
        each = following.shape[1]
        sums = (beams.scores.reshape(-1, 1) + following).reshape(rows, -1)
        scores, found = jax.lax.top_k(sums, 2 * beam)
        parents = found // each
        chosen = jnp.take_along_axis(words.reshape(rows, -1), found, axis=1)
        chosen = chosen.astype(beams.tokens.dtype)
        tokens = jnp.take_along_axis(beams.tokens, parents[:, :, None], axis=1)
        tokens = tokens.at[:, :, place + 1].set(chosen)
        ends, written = chosen == end, (place + 2 - begun).astype(jnp.float32)
        found = jnp.where(ends & ~done[:, None], scores / written**alpha, -jnp.inf)
        lengths = jnp.broadcast_to(place + 2 - first[:, None], (rows, beam))
        new = Hypotheses(tokens[:, :beam], lengths, found[:, :beam])
        ended = _best(beams.ended, new, pad)

        alive, order = jax.lax.top_k(jnp.where(ends, -jnp.inf, scores), beam)
        parents = jnp.take_along_axis(parents, order, axis=1)
        rows_of = (jnp.arange(rows)[:, None] * beam + parents).reshape(-1)
        return _Beams(
            place + 1,
            states.move(state, rows_of),
            jnp.take_along_axis(tokens, order[:, :, None], axis=1),
            alive,
            ended,
        )

    tokens = prompts.start_tokens(prompt, length, pad)
    tokens = jnp.repeat(tokens[:, None], beam, axis=1)
    none = jnp.full((rows, beam), -jnp.inf)
    start = _Beams(
        jnp.int32(begun - 1), state, tokens, none.at[:, 0].set(0.0),
        Hypotheses(jnp.full_like(tokens, pad), jnp.zeros((rows, beam), jnp.int32), none),
    )  # fmt: skip

    def unfinished(beams):
        return (beams.place < length - 1) & ~is_done(beams).all()

    ended = states.loop(unfinished, go_on, start, begun - 1).ended
    return ended._replace(tokens=prompts.to_front(ended.tokens, first, pad))


def _best(old: Hypotheses, new: Hypotheses, pad: int) -> Hypotheses:
    """The best of both; of equal ones the older."""
    both = [jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
    tokens, lengths, scores = both
    scores, order = jax.lax.top_k(scores, old.scores.shape[1])
    there = scores > -jnp.inf
    lengths = jnp.where(there, jnp.take_along_axis(lengths, order, axis=1), 0)
    tokens = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
    return Hypotheses(jnp.where(there[:, :, None], tokens, pad), lengths, scores)
