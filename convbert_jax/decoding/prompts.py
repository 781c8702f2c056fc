"""Left-padded prompts, length limits, and the best next tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.decoding.top_k import top_k

Step = Callable[[Array, Any, Array], tuple[Array, Any]]


def check(prompt: Int[Array, "B P"], length: int) -> None:
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


def best(
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
