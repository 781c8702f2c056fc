"""Input embeddings, and output logits from the same (tied) word embedding matrix."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.models.layers import Initializer, dropout, make_norm, positions
from convbert_jax.ops.embedding import attend, embedding_lookup


class Embed(nnx.Module):
    """Embedding matrix `embedding` [rows, size], looked up by row index."""

    def __init__(self, rows: int, size: int, initializer: Initializer, rngs: nnx.Rngs):
        self.embedding = nnx.Param(initializer(rngs.params(), (rows, size)))

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        return embedding_lookup(self.embedding[...], ids)


class Embeddings(nnx.Module):
    """Sum of word, position and segment-type embeddings, norm, dropout.

    BERT normalizes the sum (§3). Generative models multiply word embeddings by sqrt(C) and have no
    norm (Vaswani et al. 2017, §3.4 and §3.5). Rotary positions are applied by attention.
    """

    def __init__(self, config: EmbeddingsConfig, initializer: Initializer, rngs: nnx.Rngs):
        self.word = Embed(config.vocab_size, config.size, initializer, rngs)
        if config.position_embedding == "learned":
            self.position = Embed(config.positions, config.size, initializer, rngs)
        if config.types:
            self.type = Embed(config.types, config.size, initializer, rngs)
        if config.norm:
            self.norm = make_norm(config, config.size)
        self.config = config

    @jax.named_scope("embeddings")
    def __call__(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"] | None = None,
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L E"]:
        """Return the embeddings, in `dtype`; positions restart in each segment.

        Args:
          type_ids: First or second text of a pair; needed with a table of types.

        Raises:
          ValueError: The rows are longer than the position embedding matrix.
        """
        self.check_length(tokens.shape[1])
        return self._embed(tokens, positions(segment_ids), type_ids, dtype, key)

    def at(
        self, tokens: Int[Array, " R"], places: Int[Array, " R"], dtype: jnp.dtype
    ) -> Float[Array, "R 1 C"]:
        """Return the embeddings at one position of each row, without types."""
        return self._embed(tokens[:, None], places[:, None], None, dtype, None)

    def check_length(self, length: int) -> None:
        """Raise ValueError for rows longer than the position embedding matrix."""
        if not hasattr(self, "position"):
            return
        if length > (rows := self.position.embedding.shape[-2]):
            raise ValueError(
                f"Rows of {length} tokens are longer than the position table of {rows}; shorten "
                "them, raise config.model.positions or set config.model.position_embedding."
            )

    def attend(self, h: Float[Array, "*B E"], bias: Float[Array, " V"]) -> Float[Array, "*B V"]:
        """Return float32 logits: product of `h` with every word embedding, plus a bias per word."""
        return attend(h, self.word.embedding[...], bias)

    def _embed(self, tokens, places, type_ids, dtype, key):
        c = self.config
        x = self.word(tokens)
        if c.scaled:
            x *= c.size**0.5
        if c.position_embedding == "learned":
            x += self.position(places)
        elif c.position_embedding == "sinusoidal":
            x += sinusoids(places, c.size)
        if c.types:
            x += self.type(type_ids)
        if c.norm:
            x = self.norm(x)
        return dropout(x.astype(dtype), c.dropout, key)


def add(shared: Embeddings, own: Embeddings) -> Embeddings:
    """Return embeddings with parameters stop_gradient(shared) + own, so only `own` is trained."""
    graphdef, theirs = nnx.split(shared)
    return nnx.merge(
        graphdef, jax.tree.map(lambda a, b: jax.lax.stop_gradient(a) + b, theirs, nnx.state(own))
    )


# The published code counts positions from padding id 1 + 1, so the first token has position 2.
FIRST_POSITION = 2
MAX_WAVELENGTH = 10_000.0


def sinusoids(places: Int[Array, "*B"], size: int) -> Float[Array, "*B C"]:
    """Return sinusoidal embeddings: sin(w_i p), then cos(w_i p), with p = place + 2.

    w_i = 10,000^(-i / (size / 2 - 1)) for i from 0. As in fairseq, all sines come before all
    cosines; Vaswani et al. 2017 alternate them and divide by size / 2. With an odd size, the last
    channel is 0.
    """
    half = size // 2
    waves = MAX_WAVELENGTH ** (-jnp.arange(half, dtype=jnp.float32) / max(1, half - 1))
    angles = (places + FIRST_POSITION)[..., None].astype(jnp.float32) * waves
    parts = [jnp.sin(angles), jnp.cos(angles), jnp.zeros((*places.shape, size - 2 * half))]
    return jnp.concatenate(parts, axis=-1)


def output_logits(h: Float[Array, "*B C"], table: Embed) -> Float[Array, "*B V"]:
    """Return float32 logits, the products with the rows of an embedding matrix."""
    return attend(h, table.embedding[...])
