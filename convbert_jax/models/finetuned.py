"""Fine-tuning model: an encoder with one task head."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.encoder import Encoder, Seen
from convbert_jax.models.heads import SequenceHead, TokenHead
from convbert_jax.models.layers import dropout, initializers
from convbert_jax.models.span_heads import SpanBeamHead


class FinetunedModel(nnx.Module):
    """Embeddings, encoder and the head named by `config.outputs.head`.

    Parameters are under `embeddings/`, `encoder/` and `head/`.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        m = config.model
        starts = initializers(m.initializers, m.initializer_range)
        self.embeddings = Embeddings(config.embeddings, starts.dense, rngs)
        self.encoder = Encoder(config.encoder, rngs)
        self.head = HEADS[config.outputs.head](config, starts, rngs)
        self.kind = config.outputs.head
        self.dropout = m.dropout

    def encode(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
        capture: str | Collection[str] = (),
    ) -> Float[Array, "B L C"] | tuple[Float[Array, "B L C"], Seen]:
        """Compute last-layer hidden states in `dtype`; see `PretrainingModel.encode`."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = self.embeddings(tokens, segment_ids, type_ids, dtype=dtype, key=keys[0])
        return self.encoder(x, segment_ids, keys[1], capture)

    def classify(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B ..."]:
        """Compute float32 logits, [B, labels] per text or [B, L, labels] with head "token".

        Args:
          key: Dropout key, used before the head too; None is deterministic.
        """
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        hidden = self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=keys[0])
        if self.kind == "first_and_mean":
            hidden = jnp.concatenate([hidden[:, :1], _mean(hidden, segment_ids)], -1)
        elif self.kind != "token":
            hidden = hidden[:, :1]
        hidden = dropout(hidden, self.dropout, keys[1])
        if self.kind in ("sequence", "first_and_mean"):
            return self.head(hidden, self.dropout, keys[2])
        logits = self.head(hidden)
        return logits if self.kind == "token" else logits[:, 0]


def _mean(hidden, segment_ids):
    """Average the hidden states of each row, without padding: [B, L, C] -> [B, 1, C]."""
    real = (segment_ids > 0)[..., None].astype(jnp.float32)
    total = (hidden.astype(jnp.float32) * real).sum(1, keepdims=True)
    return (total / jnp.maximum(real.sum(1, keepdims=True), 1.0)).astype(hidden.dtype)


def _sequence_head(config: Config, starts, rngs) -> SequenceHead:
    return SequenceHead(config.encoder.hidden_size, len(config.outputs.labels), starts, rngs)


def _first_and_mean_head(config: Config, starts, rngs) -> SequenceHead:
    size = config.encoder.hidden_size
    return SequenceHead(size, len(config.outputs.labels), starts, rngs, inputs=2 * size)


def _token_head(config: Config, starts, rngs) -> TokenHead:
    return TokenHead(config.encoder.hidden_size, len(config.outputs.labels), starts, rngs)


def _release_head(config: Config, starts, rngs) -> TokenHead:
    """One dense layer with TensorFlow's default Glorot initializer, as in the official code."""
    return _token_head(config, dataclasses.replace(starts, dense=starts.glorot), rngs)


def _span_beam_head(config: Config, starts, rngs) -> SpanBeamHead:
    return SpanBeamHead(config.encoder.hidden_size, starts, rngs)


# config.outputs.head -> (config, initializers, rngs) -> the module
HEADS = {
    "sequence": _sequence_head,
    "first_and_mean": _first_and_mean_head,
    "first_token": _release_head,
    "token": _token_head,
    "span": _token_head,
    "span_beam": _span_beam_head,
}
