"""Greedy decoding, sampling and beam search with static shapes.

Prompts are padded on the left, so that all rows write the same place in a step. Beam search follows
fairseq: scores are normalized by length^alpha.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.decoding import state as states

Step = Callable[[Array, Any, Array], tuple[Array, Any]]


class Texts(NamedTuple):
    """Generated texts.

    Attributes:
      tokens: Texts with prompt and end token, then `pad`.
      lengths: Number of tokens per row, with prompt and end token.
      scores: Log probability of the generated tokens with the end token. Sampled texts are scored
        by the model's distribution before temperature, top-k and top-p.
    """

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    scores: Float[Array, " B"]


class _Rows(NamedTuple):
    place: Array
    state: Any
    tokens: Array
    texts: tuple[Array, Array]  # lengths and scores so far
    done: Array


def greedy(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    first: Int[Array, " B"] | None = None,
    *,
    length: int,
    end: int,
    pad: int = 0,
    limits: Int[Array, " B"] | None = None,
    never: Sequence[int] = (),
) -> Texts:
    """Generate the most probable token at each place, until the end token.

    Args:
      state: State of `step` after all prompt tokens but the last, as in `search`. The first
        step processes that last token, at place P - 1.
      prompt: Prompts of at least one token, padded on the left so that all end at place P - 1.
        Entries before `first` are ignored.
      first: Index of each row's first token, from 0 to P - 1; None means 0.
      length: L, the maximum number of places with prompt and end token; the last place can only
        hold the end token.
      end, pad: Token ids.
      limits: Maximum number of tokens per row, with prompt and end token, so that a row in a batch
        ends where it would alone. None means `length`.
      never: Ids that are never generated, such as padding, which a model may not have learned to
        avoid.

    Raises:
      ValueError: The prompt fills the length.
    """

    def choose(scores, places):
        return scores.argmax(axis=-1)

    return _generate(step, state, prompt, first, choose, length, end, pad, limits, never)


def sample(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    first: Int[Array, " B"] | None = None,
    *,
    keys: Array,
    length: int,
    end: int,
    pad: int = 0,
    limits: Int[Array, " B"] | None = None,
    never: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Texts:
    """Sample tokens from softmax(logits / temperature).

    Sampling is restricted to the `top_k` most probable tokens, then to the smallest set of tokens
    with a total probability of `top_p` (Holtzman et al. 2020).

    Args:
      keys: [B], one key per row, so that samples do not depend on the position in the batch.
      top_k: 0 allows all tokens.
      top_p: Above 0; the most probable token is always allowed.
      Other arguments: As in `greedy`.

    Raises:
      ValueError: The prompt fills the length, or a number is out of range.
    """
    if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"sample: temperature={temperature}, top_k={top_k}, top_p={top_p}; temperature must "
            "be above 0, top_k at least 0, and top_p above 0 and at most 1."
        )

    def choose(scores, places):
        logits = restrict(scores / temperature, top_k, top_p)
        drawn = jax.vmap(jax.random.fold_in)(keys, places)
        return jax.vmap(jax.random.categorical)(drawn, logits)

    return _generate(step, state, prompt, first, choose, length, end, pad, limits, never)


def restrict(logits: Float[Array, "B V"], top_k: int, top_p: float) -> Float[Array, "B V"]:
    """Set excluded tokens to -inf; tokens tied with the least allowed one are allowed too."""
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        shares = jax.nn.softmax(ordered)
        before = jnp.cumsum(shares, axis=-1) - shares
        kept = (before < top_p).at[:, 0].set(True)
        least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def _generate(
    step: Step,
    state: Any,
    prompt: Array,
    first: Array | None,
    choose: Callable[[Array, Array], Array],
    length: int,
    end: int,
    pad: int,
    limits: Array | None,
    never: Sequence[int],
) -> Texts:
    check_prompt(prompt, length)
    rows, begun = prompt.shape
    first = jnp.zeros(rows, jnp.int32) if first is None else first
    last = last_places(limits, first, begun, length)

    def unfinished(carry):
        return (carry.place < length - 1) & ~carry.done.all()

    def go_on(carry):
        place, state, tokens, texts, done = carry
        logits, state = step(tokens[:, place], state, place)
        scores = log_probabilities(logits, never)
        scores = only_end(scores, end, place + 1 >= last)
        chosen = jnp.where(done, pad, choose(scores, place - first)).astype(tokens.dtype)
        score = jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, place + 1].set(chosen)
        lengths = jnp.where(done, texts[0], place + 2 - first)
        texts = lengths, jnp.where(done, texts[1], texts[1] + score)
        return _Rows(place + 1, state, tokens, texts, done | (chosen == end))

    texts = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    tokens = start_tokens(prompt, length, pad)
    start = _Rows(jnp.int32(begun - 1), state, tokens, texts, jnp.zeros(rows, bool))
    written = states.loop(unfinished, go_on, start, begun - 1)
    return Texts(to_front(written.tokens, first, pad), *written.texts)


# --- Beam search ---


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
      prompt, first, length, end, pad, limits, never: As in `greedy`.
      beam: K.
      alpha: Exponent of the length penalty, at least 0; 0 disables it.
      early: A row ends when K of its texts have finished, as in fairseq; with one beam this equals
        `greedy`. If False, a row ends when no unfinished text can still beat the K finished ones.

    Raises:
      ValueError: The prompt fills the length, `beam` is below 1, or `alpha` is below 0.
    """
    check_prompt(prompt, length)
    if beam < 1 or alpha < 0:
        raise ValueError(
            f"search: beam={beam}, alpha={alpha}; beam must be at least 1 and alpha at least 0."
        )
    rows, begun = prompt.shape
    first = jnp.zeros(rows, jnp.int32) if first is None else first
    last = last_places(limits, first, begun, length)
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
        following, words = best_next(
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
        ended = _merge(beams.ended, new, pad)

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

    tokens = start_tokens(prompt, length, pad)
    tokens = jnp.repeat(tokens[:, None], beam, axis=1)
    none = jnp.full((rows, beam), -jnp.inf)
    start = _Beams(
        jnp.int32(begun - 1), state, tokens, none.at[:, 0].set(0.0),
        Hypotheses(jnp.full_like(tokens, pad), jnp.zeros((rows, beam), jnp.int32), none),
    )  # fmt: skip

    def unfinished(beams):
        return (beams.place < length - 1) & ~is_done(beams).all()

    ended = states.loop(unfinished, go_on, start, begun - 1).ended
    return ended._replace(tokens=to_front(ended.tokens, first, pad))


def _merge(old: Hypotheses, new: Hypotheses, pad: int) -> Hypotheses:
    """Merge old and new texts and keep the best; ties prefer the old ones."""
    both = [jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
    tokens, lengths, scores = both
    scores, order = jax.lax.top_k(scores, old.scores.shape[1])
    there = scores > -jnp.inf
    lengths = jnp.where(there, jnp.take_along_axis(lengths, order, axis=1), 0)
    tokens = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
    return Hypotheses(jnp.where(there[:, :, None], tokens, pad), lengths, scores)


# --- Prompts, length limits, and the best next tokens ---


def check_prompt(prompt: Int[Array, "B P"], length: int) -> None:
    """Raise ValueError for a prompt that leaves nothing to generate."""
    if prompt.ndim != 2 or not 1 <= prompt.shape[1] < length:
        raise ValueError(
            f"The prompt is {list(prompt.shape)}; it must be [rows, tokens] with at least one "
            f"token and fewer than length={length}."
        )


def last_places(
    limits: Int[Array, " B"] | None, first: Int[Array, " B"], begun: int, length: int
) -> Int[Array, " B"]:
    """Return each row's last place, which can only hold the end token.

    It is the last of `length` or of the row's own limit, but at least the first after the prompt.
    """
    if limits is None:
        return jnp.full_like(first, length - 1)
    return jnp.clip(first + limits - 1, begun, length - 1)


def start_tokens(prompt: Int[Array, "B P"], length: int, pad: int) -> Int[Array, "B L"]:
    """Append `pad` to the prompts up to `length`."""
    width = ((0, 0), (0, length - prompt.shape[1]))
    return jnp.pad(prompt, width, constant_values=pad)


def to_front(
    tokens: Int[Array, "B *K L"], first: Int[Array, " B"], pad: int
) -> Int[Array, "B *K L"]:
    """Move rows to the left over the entries before their first tokens, and fill up with `pad`."""
    places = jnp.arange(tokens.shape[-1]) + first[:, None]
    places = places.reshape(len(first), *[1] * (tokens.ndim - 2), -1)
    moved = jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[-1] - 1), axis=-1)
    return jnp.where(places < tokens.shape[-1], moved, pad)


def only_end(scores: Float[Array, "B V"], end: int, last: Bool[Array, " B"]) -> Float[Array, "B V"]:
    """Set all scores except the one of `end` to -inf in rows whose next token must be the last."""
    return jnp.where(last[:, None] & (jnp.arange(scores.shape[1]) != end), -jnp.inf, scores)


def best_next(
    logits: Float[Array, "B V"],
    count: int,
    end: int,
    last: Bool[Array, " B"],
    never: Sequence[int] = (),
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the `count` most probable next tokens with their log probabilities.

    These are the largest entries of `only_end(log_probabilities(logits, never), end, last)`, which
    is not materialized. A forced end token is returned even if it is in `never`.
    """
    logits = logits.astype(jnp.float32)
    total, ends = jax.nn.logsumexp(logits, axis=-1), logits[:, end]
    # More candidates in place of those in `never`, instead of a masked copy of all logits.
    found, tokens = top_k(logits, min(count + len(never), logits.shape[1]))
    if len(never):
        found = jnp.where(jnp.isin(tokens, jnp.asarray(never)), -jnp.inf, found)
        found, order = jax.lax.top_k(found, count)
        tokens = jnp.take_along_axis(tokens, order, axis=1)
    scores, last = found - total[:, None], last[:, None]
    only = jnp.where(jnp.arange(count) == 0, (ends - total)[:, None], -jnp.inf)
    return jnp.where(last, only, scores), jnp.where(last, jnp.asarray(end, tokens.dtype), tokens)


def log_probabilities(
    logits: Float[Array, "B V"], never: Sequence[int] = ()
) -> Float[Array, "B V"]:
    """Return log probabilities in float32; ids in `never` get -inf, without renormalization."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return scores.at[:, jnp.asarray(never)].set(-jnp.inf) if len(never) else scores


BLOCK = 32  # entries per block; 16 to 64 perform alike on a CPU


def top_k(scores: Float[Array, "R N"], count: int) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
    """Return the same as `jax.lax.top_k(scores, count)`, faster for long rows.

    The `count` largest entries are in the `count` blocks with the largest maxima, which one pass
    over the row finds; only these blocks are sorted.

    Args:
      scores: Must not contain NaN.
    """
    rows, entries = scores.shape
    blocks = -(-entries // BLOCK)
    if blocks <= 2 * count:
        return tuple(jax.lax.top_k(scores, count))  # it returns a list
    filled = jnp.pad(
        scores, ((0, 0), (0, blocks * BLOCK - entries)), constant_values=-jnp.inf
    ).reshape(rows, blocks, BLOCK)
    _, best = jax.lax.top_k(filled.max(axis=-1), count)
    best = jnp.sort(best, axis=-1)  # ties prefer the first entry, as in jax.lax.top_k
    candidates = jnp.take_along_axis(filled, best[:, :, None], axis=1).reshape(rows, -1)
    found, places = jax.lax.top_k(candidates, count)
    block = jnp.take_along_axis(best, places // BLOCK, axis=1)
    return found, block * BLOCK + places % BLOCK
