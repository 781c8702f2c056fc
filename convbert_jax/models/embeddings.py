"""Input embeddings, and output logits from the same (tied) word embedding matrix."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.models.layers import Initializer, LayerNorm, dropout
from convbert_jax.ops.tables import attend, look_up


class Table(nnx.Module):
    """Embedding matrix `embedding` [rows, size], looked up by row index."""

    def __init__(self, rows: int, size: int, initializer: Initializer, rngs: nnx.Rngs):
        self.embedding = nnx.Param(initializer(rngs.params(), (rows, size)))

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        return look_up(self.embedding[...], ids)


class Embeddings(nnx.Module):
    """Sum of word, position and segment-type embeddings, layer norm, dropout (BERT §3)."""

    def __init__(self, config: EmbeddingsConfig, initializer: Initializer, rngs: nnx.Rngs):
        self.word = Table(config.vocab_size, config.size, initializer, rngs)
        self.position = Table(config.positions, config.size, initializer, rngs)
        self.type = Table(config.types, config.size, initializer, rngs)
        self.norm = LayerNorm(config.size, config.layer_norm_epsilon)
        self.dropout = config.dropout

    @jax.named_scope("embeddings")
    def __call__(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L E"]:
        """Return the embeddings, in `dtype`.

        Raises:
          ValueError: The rows are longer than the position embedding matrix.
        """
        rows = self.position.embedding.shape[-2]
        if tokens.shape[1] > rows:
            raise ValueError(
                f"Rows of {tokens.shape[1]} tokens are longer than the position table of {rows}; "
                "shorten them or raise config.model.positions."
            )
        x = self.word(tokens) + self.position(positions(segment_ids)) + self.type(type_ids)
        return dropout(self.norm(x).astype(dtype), self.dropout, key)

    def attend(self, h: Float[Array, "*B E"], bias: Float[Array, " V"]) -> Float[Array, "*B V"]:
        """Return float32 logits: product of `h` with every word embedding, plus a bias per word."""
        return attend(h, self.word.embedding[...], bias)


def add(shared: Embeddings, own: Embeddings) -> Embeddings:
    """Return embeddings with parameters stop_gradient(shared) + own, so only `own` is trained."""
    graphdef, theirs = nnx.split(shared)
    return nnx.merge(
        graphdef, jax.tree.map(lambda a, b: jax.lax.stop_gradient(a) + b, theirs, nnx.state(own))
    )


def positions(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Return position indices that restart at 0 in each segment, so that documents can be packed.

    Padding continues the count: a padded row with one segment gets 0 .. L-1, as in the official
    code.
    """
    places = jnp.arange(segment_ids.shape[1])
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = (segment_ids != before) & (segment_ids != 0)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
