"""What a text begins with, given: of each row another number of tokens."""

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


def most_tokens(
    limits: Int[Array, " B"] | None, lengths: Int[Array, " B"], length: int
) -> Int[Array, " B"]:
    """The most tokens of each row: `length`, or its own limit, with room for an end at least."""
    if limits is None:
        return jnp.full_like(lengths, length)
    return jnp.clip(limits, jnp.minimum(lengths + 1, length), length)


def start_tokens(
    prompt: Int[Array, "B P"], lengths: Int[Array, " B"], length: int, pad: int
) -> Int[Array, "B L"]:
    """The prompts, and `pad` behind them."""
    inside = jnp.arange(prompt.shape[1]) < lengths[:, None]
    width = ((0, 0), (0, length - prompt.shape[1]))
    return jnp.pad(jnp.where(inside, prompt, pad), width, constant_values=pad)


def force(
    scores: Float[Array, "B V"],
    prompt: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    place: Int[Array, ""],
    end: int,
    last: Bool[Array, " B"],
) -> Float[Array, "B V"]:
    """Log probabilities of the token behind `place` where the prompt says it, which costs nothing;
    and where it is the `last` one of its row, which can but be the end.
    """
    words = jnp.arange(scores.shape[1])
    scores = jnp.where(last[:, None] & (words != end), -jnp.inf, scores)
    said, is_said = _said(prompt, lengths, place)
    certain = jnp.where(words == said[:, None], 0.0, -jnp.inf)
    return jnp.where(is_said[:, None], certain, scores)


def best(
    logits: Float[Array, "B V"],
    count: int,
    prompt: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    place: Int[Array, ""],
    end: int,
    last: Bool[Array, " B"],
    never: Sequence[int] = (),
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The `count` most probable tokens behind `place`, with their log probabilities: the largest
    entries of `force(log_probabilities(logits, never), ...)`, of which no other is written. An end
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
    scores = found - total[:, None]
    said, is_said = _said(prompt, lengths, place)
    only = jnp.where(is_said, said, end).astype(tokens.dtype)
    score = jnp.where(is_said, 0.0, ends - total)
    first = jnp.arange(count) == 0
    certain = (is_said | last)[:, None]
    return (
        jnp.where(certain, jnp.where(first, score[:, None], -jnp.inf), scores),
        jnp.where(certain, only[:, None], tokens),
    )


def _said(prompt, lengths, place):
    """([B] the token behind `place` by the prompt, [B] whether the prompt goes so far)."""
    return prompt[:, jnp.minimum(place + 1, prompt.shape[1] - 1)], place + 1 < lengths


def log_probabilities(
    logits: Float[Array, "B V"], never: Sequence[int] = ()
) -> Float[Array, "B V"]:
    """In float32; -inf of the ids `never`, the others as they are."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return scores.at[:, jnp.asarray(never)].set(-jnp.inf) if len(never) else scores
