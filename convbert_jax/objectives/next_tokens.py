"""Rows of a corpus as a language model reads them: each token is told from those before it."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from convbert_jax.config import Config
from convbert_jax.interfaces.batch import Batch, LanguageBatch
from convbert_jax.interfaces.special_ids import SpecialIds
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
    """Mean cross-entropy of each token from those before it in its document.

    Args:
      model: `(tokens, segment_ids, dtype, key) -> logits [B, T, V]`.
      key: draws dropout where `train`.
      begins_word: 1 for words of the vocabulary that begin a word of the text.
    """
    told = shift(batch["tokens"], batch["segment_ids"], pad=special.pad)
    logits = model(told["tokens"], told["segment_ids"], dtype=dtype, key=key if train else None)
    value, found = written_text.judge(logits, told, config.objective.label_smoothing)
    nats = found["token_loss"]
    words = written_text.count_words(nats, told, begins_word, special.sep)
    return value, found | {"word_loss": words}


def shift(tokens: Int[Array, "B L"], segment_ids: Int[Array, "B L"], *, pad: int) -> LanguageBatch:
    """Packed rows as pairs of what is read and what comes next; T = L, which a mesh can divide.

    Each document of a row is told from its own [CLS] to its [SEP]. The [SEP] of one is not asked
    what comes next: its place is padding (segment 0), as the row's is. Nor is the [SEP] told that
    ends a full row: there the document was cut (`data.corpus.packing`), and a model that learned it
    would end every text at the length of a row. So every token but the [CLS] and that [SEP] is a
    label.

    Args:
      pad: id of padding.
    """
    following, ids = (jnp.pad(x, ((0, 0), (0, 1)))[:, 1:] for x in (tokens, segment_ids))
    same = (ids == segment_ids) & (ids != 0)
    same &= jnp.arange(tokens.shape[1]) < tokens.shape[1] - 2
    return {
        "tokens": jnp.where(same, tokens, pad),
        "segment_ids": jnp.where(same, ids, 0),
        "labels": jnp.where(same, following, pad),
    }
