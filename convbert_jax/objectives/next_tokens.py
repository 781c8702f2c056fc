"""Rows of a corpus as a language model reads them: each token is told from those before it."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from convbert_jax.interfaces.batch import LanguageBatch


def shift(tokens: Int[Array, "B L"], segment_ids: Int[Array, "B L"], *, pad: int) -> LanguageBatch:
    """Packed rows as pairs of what is read and what comes next, T = L - 1.

    Each document of a row is told from its own [CLS] to its [SEP]. The [SEP] of one is not asked
    what comes next: its place is padding (segment 0), as the row's is. So B x (real tokens -
    documents) labels come out, every token but the [CLS].

    Args:
      pad: id of padding.
    """
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return {
        "tokens": jnp.where(same, tokens[:, :-1], pad),
        "segment_ids": jnp.where(same, segment_ids[:, 1:], 0),
        "labels": jnp.where(same, tokens[:, 1:], pad),
    }
