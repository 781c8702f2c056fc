"""Greedy decoding and sampling: one text per row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.decoding import prompts
from convbert_jax.decoding import state as states
from convbert_jax.decoding.prompts import Step


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
      state: State of `step` after all prompt tokens but the last, as in `beam.search`. The first
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

    return _write(step, state, prompt, first, choose, length, end, pad, limits, never)


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
        logits = cut(scores / temperature, top_k, top_p)
        drawn = jax.vmap(jax.random.fold_in)(keys, places)
        return jax.vmap(jax.random.categorical)(drawn, logits)

    return _write(step, state, prompt, first, choose, length, end, pad, limits, never)


def cut(logits: Float[Array, "B V"], top_k: int, top_p: float) -> Float[Array, "B V"]:
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


def _write(
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
    prompts.check(prompt, length)
    rows, begun = prompt.shape
    first = jnp.zeros(rows, jnp.int32) if first is None else first
    last = prompts.last_places(limits, first, begun, length)

    def unfinished(carry):
        return (carry.place < length - 1) & ~carry.done.all()

    def go_on(carry):
        place, state, tokens, texts, done = carry
        logits, state = step(tokens[:, place], state, place)
        scores = prompts.log_probabilities(logits, never)
        scores = prompts.only_end(scores, end, place + 1 >= last)
        chosen = jnp.where(done, pad, choose(scores, place - first)).astype(tokens.dtype)
        score = jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, place + 1].set(chosen)
        lengths = jnp.where(done, texts[0], place + 2 - first)
        texts = lengths, jnp.where(done, texts[1], texts[1] + score)
        return _Rows(place + 1, state, tokens, texts, done | (chosen == end))

    texts = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    tokens = prompts.start_tokens(prompt, length, pad)
    start = _Rows(jnp.int32(begun - 1), state, tokens, texts, jnp.zeros(rows, bool))
    written = states.loop(unfinished, go_on, start, begun - 1)
    return Texts(prompts.to_front(written.tokens, first, pad), *written.texts)
