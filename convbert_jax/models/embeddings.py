"""Input embeddings, and output logits from the same (tied) word embedding matrix.

`Embeddings` belong to encoders (BERT), `Tokens` to decoders and their encoders (Vaswani et al.
2017).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EmbeddingsConfig
from convbert_jax.config.network import TokensConfig
from convbert_jax.models.layers import Initializer, LayerNorm, dropout
from convbert_jax.ops.embedding import attend, embedding_lookup


class Embed(nnx.Module):
    """Embedding matrix `embedding` [rows, size], looked up by row index."""

    def __init__(self, rows: int, size: int, initializer: Initializer, rngs: nnx.Rngs):
        self.embedding = nnx.Param(initializer(rngs.params(), (rows, size)))

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        return embedding_lookup(self.embedding[...], ids)


class Embeddings(nnx.Module):
    """Sum of word, position and segment-type embeddings, layer norm, dropout (BERT §3)."""

    def __init__(self, config: EmbeddingsConfig, initializer: Initializer, rngs: nnx.Rngs):
        self.word = Embed(config.vocab_size, config.size, initializer, rngs)
        self.position = Embed(config.positions, config.size, initializer, rngs)
        self.type = Embed(config.types, config.size, initializer, rngs)
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


# The published code counts positions from padding id 1 + 1, so the first token has position 2.
FIRST_POSITION = 2
MAX_WAVELENGTH = 10_000.0


class Tokens(nnx.Module):
    """Token embeddings times sqrt(C), plus position embeddings, dropout.

    Positions are sinusoidal, learned or absent (Vaswani et al. 2017, §3.4 and §3.5).
    """

    def __init__(self, config: TokensConfig, rngs: nnx.Rngs):
        start = nnx.initializers.normal(config.size**-0.5)
        self.word = Embed(config.vocab_size, config.size, start, rngs)
        if config.positions == "learned":
            self.position = Embed(config.rows, config.size, start, rngs)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L C"]:
        """Return the embeddings, in `dtype`; positions restart in each segment.

        Raises:
          ValueError: The rows are longer than the position embedding matrix.
        """
        self.check_length(tokens.shape[1])
        return self._embed(tokens, positions(segment_ids), dtype, key)

    def at(
        self, tokens: Int[Array, " R"], places: Int[Array, " R"], dtype: jnp.dtype
    ) -> Float[Array, "R 1 C"]:
        """Return the embeddings at one position of each row."""
        return self._embed(tokens[:, None], places[:, None], dtype, None)

    def check_length(self, length: int) -> None:
        """Raise ValueError for rows longer than the position embedding matrix."""
        if self.config.positions == "learned" and length > self.config.rows:
            raise ValueError(
                f"Rows of {length} tokens are longer than the position table of "
                f"{self.config.rows}; shorten them, raise config.model.positions or set "
                "config.sequence.positions=sinusoidal."
            )

    def _embed(self, tokens, places, dtype, key):
        x = self.word(tokens) * self.config.size**0.5
        if self.config.positions == "learned":
            x += self.position(places)
        elif self.config.positions == "sinusoidal":
            x += sinusoids(places, self.config.size)
        return dropout(x.astype(dtype), self.config.dropout, key)


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
