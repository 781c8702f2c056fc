"""Causal language modeling on packed rows of a corpus."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from convbert_jax.config import Config
from convbert_jax.interfaces import Batch, LanguageBatch, SpecialIds
from convbert_jax.objectives import metrics, written_text


def loss(
    model: nnx.Module,
    batch: Batch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
    begins_word: Int[Array, " V"],
) -> tuple[Array, metrics.Metrics]:
    """Compute the mean cross-entropy of each token given the earlier tokens of its document.

    Args:
      model: `(tokens, segment_ids, dtype, key) -> logits [B, T, V]`.
      key: Draws dropout if `train`.
      begins_word: 1 for vocabulary entries that begin a word of the text.
    """
    told = shift(batch["tokens"], batch["segment_ids"], pad=special.pad)
    logits = model(told["tokens"], told["segment_ids"], dtype=dtype, key=key if train else None)
    value, found = written_text.judge(logits, told, config.objective)
    nats = found["token_loss"]
    words = written_text.count_words(nats, told, begins_word, special.sep)
    return value, found | {"word_loss": words}


def shift(tokens: Int[Array, "B L"], segment_ids: Int[Array, "B L"], *, pad: int) -> LanguageBatch:
    """Split packed rows into inputs and next-token labels; T = L, which a mesh can divide.

    Each document is predicted from its [CLS] to its [SEP]. Positions of [SEP] have no label and
    become padding (segment 0). The [SEP] that ends a full row is no label either, because packing
    cut the document there (`data.layouts`); a model that learned it would end every text at
    the row length. All tokens except [CLS] and that [SEP] are labels.

    Args:
      pad: Id of the padding token.
    """
    following, ids = (jnp.pad(x, ((0, 0), (0, 1)))[:, 1:] for x in (tokens, segment_ids))
    same = (ids == segment_ids) & (ids != 0)
    same &= jnp.arange(tokens.shape[1]) < tokens.shape[1] - 2
    return {
        "tokens": jnp.where(same, tokens, pad),
        "segment_ids": jnp.where(same, ids, 0),
        "labels": jnp.where(same, following, pad),
    }
