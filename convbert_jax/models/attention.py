"""Scaled dot-product self-attention over the segments of a row."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.models.functions import softmax
from convbert_jax.models.layers import dropout


def visible_keys(segment_ids: Int[Array, "B L"]) -> Bool[Array, "B L L"]:
    """[query, key]: real tokens of the query's segment; padding sees all real tokens.

    What padding computes is read by nobody. It is given the whole row, because that is what it
    sees in the release where a row is one segment.
    """
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    return (key != 0) & ((key == query) | (query == 0))


def attend(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L H D"],
    value: Float[Array, "B L H D"],
    segment_ids: Int[Array, "B L"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "B L H D"]:
    """softmax(query . key / sqrt(D)) . value, softmax in float32, dropout on its result."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores *= query.shape[-1] ** -0.5
    weights = softmax(scores, visible_keys(segment_ids)[:, None], value.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
