"""Attention masks: keys of the same segment, and for causal attention no later ones."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible_keys(
    segment_ids: Int[Array, "B L"], key_segment_ids: Int[Array, "B S"] | None = None
) -> Bool[Array, "B L S"]:
    """Returns whether each key is a real token in the segment that the query sees."""
    key = (segment_ids if key_segment_ids is None else key_segment_ids)[:, None, :]
    return (key != 0) & (key == own_segment(segment_ids)[:, :, None])


def visible_pairs(query, key, segment_ids, key_segment_ids, causal):
    """Returns the mask [B or 1, 1, L, S] of visible keys, or None if all are visible."""
    seen = None
    if segment_ids is not None:
        seen = visible_keys(segment_ids, key_segment_ids)[:, None]
    if causal:
        before = jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
        seen = before if seen is None else seen & before
    return seen


def own_segment(segment_ids):
    """Returns the segment that each position sees; for padding the one with the largest id."""
    if segment_ids is None:
        return None
    return jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
