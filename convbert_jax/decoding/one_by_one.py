"""One text for each row, a token at a time: the most probable one, or a drawn one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.decoding import prompts
from convbert_jax.decoding import state as states
from convbert_jax.decoding.prompts import Step


class Texts(NamedTuple):
    """What was written.

    Attributes:
      tokens: with the prompt and the end, `pad` behind it.
      lengths: tokens of each row, these two counted.
      scores: log probability of what stands behind the prompt, the end counted; of a sampled text
        that by the model, before temperature and cuts.
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
    """The most probable token at each place, until the end.

    Args:
      state: of `step`, behind all of the prompt but its last token, as in `beam.search`: the first
        step is that of this token, at place P - 1.
      prompt: what rows begin with, at least one token, so that all end at place P - 1; before
        `first` anything.
      first: the place of each row's first token, from 0 to P - 1; None: 0.
      length: L, the most places with prompt and end; the last can only be the end.
      end, pad: ids.
      limits: of each row, the most tokens with prompt and end; so a row may be with longer ones and
        still end where it would alone. None: `length`.
      never: ids that no text has, as padding, which a model need not have learned not to write.

    Raises:
      ValueError: a prompt without room behind it.
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
    """Tokens drawn from softmax(logits / temperature), of the `top_k` most probable ones and of the
    fewest that have a probability of `top_p` together (Holtzman et al. 2020), in this order.

    Args:
      keys: [B], a key for each row: what it draws does not depend on where it stands.
      top_k: 0 is all.
      top_p: above 0; the most probable token always stays.
      the others: as in `greedy`.

    Raises:
      ValueError: a prompt without room behind it, or numbers outside of their range.
    """
    if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"sample: temperature={temperature}, top_k={top_k}, top_p={top_p}, but temperature "
            "must be above 0, top_k at least 0 and top_p above 0 and at most 1."
        )

    def choose(scores, places):
        logits = cut(scores / temperature, top_k, top_p)
        drawn = jax.vmap(jax.random.fold_in)(keys, places)
        return jax.vmap(jax.random.categorical)(drawn, logits)

    return _write(step, state, prompt, first, choose, length, end, pad, limits, never)


def cut(logits: Float[Array, "B V"], top_k: int, top_p: float) -> Float[Array, "B V"]:
    """-inf for tokens that are not to be drawn; of equally probable ones at an edge all stay."""
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
