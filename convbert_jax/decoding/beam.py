"""Beam search with static shapes as in fairseq: scores are normalized by length^alpha."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.decoding import prompts
from convbert_jax.decoding import state as states
from convbert_jax.decoding.prompts import Step


class Hypotheses(NamedTuple):
    """Beam search results of each row, best first.

    Attributes:
      tokens: Texts with prompt and end token, then `pad`.
      lengths: Number of tokens with prompt and end token; 0 for missing texts.
      scores: Log probability of the generated tokens with the end token, divided by their number to
        the power of alpha; -inf for missing texts.
    """

    tokens: Int[Array, "B K L"]
    lengths: Int[Array, "B K"]
    scores: Float[Array, "B K"]


class _Beams(NamedTuple):
    place: Array
    state: Any
    tokens: Array  # [B, K, L] unfinished texts
    scores: Array  # [B, K] their log probabilities, descending; -inf for missing ones
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
    """Run beam search.

    Each step considers the 2 K most probable continuations of the beam. End tokens among the first
    K finish their texts; the first K other continuations form the new beam.

    If more texts finish than are missing to K, the K best are kept. fairseq keeps earlier texts and
    adds the most probable new ones. The best text is the same; lower ranks may differ.

    Args:
      step: Step function of B K rows; the beams of a row are adjacent.
      state: State of these rows after all prompt tokens but the last: a pytree of arrays with rows
        on axis 0, or objects with `take(rows, axis=0)`. Objects with `resize` are enlarged as
        needed, see `state.loop`.
      prompt, first, length, end, pad, limits, never: As in `one_by_one.greedy`.
      beam: K.
      alpha: Exponent of the length penalty, at least 0; 0 disables it.
      early: A row ends when K of its texts have finished, as in fairseq; with one beam this equals
        `greedy`. If False, a row ends when no unfinished text can still beat the K finished ones.

    Raises:
      ValueError: The prompt fills the length, `beam` is below 1, or `alpha` is below 0.
    """
    prompts.check(prompt, length)
    if beam < 1 or alpha < 0:
        raise ValueError(
            f"search: beam={beam}, alpha={alpha}; beam must be at least 1 and alpha at least 0."
        )
    rows, begun = prompt.shape
    first = jnp.zeros(rows, jnp.int32) if first is None else first
    last = prompts.last_places(limits, first, begun, length)
    last_of_beams = jnp.repeat(last, beam, axis=0)

    def is_done(beams):
        """Return [B]: K texts have finished, and no better one can follow."""
        full = beams.ended.scores[:, -1] > -jnp.inf
        hopeless = ~(beams.scores[:, 0] > -jnp.inf)
        if early:
            return full | hopeless
        # An upper bound: log probabilities only decrease, and no text is longer than this.
        longest = (last - begun + 1).astype(jnp.float32)
        hope = beams.scores[:, 0] / longest**alpha
        return (full & (hope <= beams.ended.scores[:, -1])) | hopeless

    def go_on(beams):
        place, done = beams.place, is_done(beams)
        logits, state = step(beams.tokens[:, :, place].reshape(-1), beams.state, place)
        # The overall 2 K best are among the 2 K best of each beam.
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
    """Merge old and new texts and keep the best; ties prefer the old ones."""
    both = [jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
    tokens, lengths, scores = both
    scores, order = jax.lax.top_k(scores, old.scores.shape[1])
    there = scores > -jnp.inf
    lengths = jnp.where(there, jnp.take_along_axis(lengths, order, axis=1), 0)
    tokens = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
    return Hypotheses(jnp.where(there[:, :, None], tokens, pad), lengths, scores)
