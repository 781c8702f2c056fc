"""What a text begins with, given: of each row another number of tokens, which all end at one place;
and the best tokens behind it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.decoding.top_k import top_k

Step = Callable[[Array, Any, Array], tuple[Array, Any]]


def check(prompt: Int[Array, "B P"], length: int) -> None:
    """Raises ValueError for a prompt that leaves nothing to write."""
    if prompt.ndim != 2 or not 1 <= prompt.shape[1] < length:
        raise ValueError(
            f"The prompt is {list(prompt.shape)}, but must be [rows, tokens] with at least one "
            f"token and fewer than the length of {length}."
        )


def last_places(
    limits: Int[Array, " B"] | None, first: Int[Array, " B"], begun: int, length: int
) -> Int[Array, " B"]:
    """Of each row the place that only an end may have: the last of `length`, or of its own limit,
    at the earliest the one behind its prompt.
    """
    if limits is None:
        return jnp.full_like(first, length - 1)
    return jnp.clip(first + limits - 1, begun, length - 1)


def start_tokens(prompt: Int[Array, "B P"], length: int, pad: int) -> Int[Array, "B L"]:
    """The prompts, and `pad` behind them."""
    width = ((0, 0), (0, length - prompt.shape[1]))
    return jnp.pad(prompt, width, constant_values=pad)


def to_front(
    tokens: Int[Array, "B *K L"], first: Int[Array, " B"], pad: int
) -> Int[Array, "B *K L"]:
    """Rows without what is before their first tokens, and `pad` behind them instead."""
    places = jnp.arange(tokens.shape[-1]) + first[:, None]
    places = places.reshape(len(first), *[1] * (tokens.ndim - 2), -1)
    moved = jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[-1] - 1), axis=-1)
    return jnp.where(places < tokens.shape[-1], moved, pad)


def only_end(scores: Float[Array, "B V"], end: int, last: Bool[Array, " B"]) -> Float[Array, "B V"]:
    """The scores, of all but the end -inf in rows whose next token is the `last` one."""
    return jnp.where(last[:, None] & (jnp.arange(scores.shape[1]) != end), -jnp.inf, scores)


def best(
    logits: Float[Array, "B V"],
    count: int,
    end: int,
    last: Bool[Array, " B"],
    never: Sequence[int] = (),
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The `count` most probable next tokens, with their log probabilities: the largest entries of
    `only_end(log_probabilities(logits, never), end, last)`, of which no other is written. An end
    that has to be is one though it is among `never`.
    """
    logits = logits.astype(jnp.float32)
    total, ends = jax.nn.logsumexp(logits, axis=-1), logits[:, end]
    # Others in place of those among `never`, instead of a copy of all logits without these.
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
    """In float32; -inf of the ids `never`, the others as they are."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return scores.at[:, jnp.asarray(never)].set(-jnp.inf) if len(never) else scores
