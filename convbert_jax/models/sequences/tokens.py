"""Token and position embeddings of decoders and their encoders, and their output logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config.sequences import TokensConfig
from convbert_jax.models.embeddings import Table, positions
from convbert_jax.models.layers import dropout
from convbert_jax.ops.tables import attend

# The published code counts positions from padding id 1 + 1, so the first token has position 2.
FIRST_PLACE = 2
LONGEST_WAVE = 10_000.0


class Tokens(nnx.Module):
    """Token embeddings times sqrt(C), plus position embeddings, dropout.

    Positions are sinusoidal, learned or absent (Vaswani et al. 2017, §3.4 and §3.5).
    """

    def __init__(self, config: TokensConfig, rngs: nnx.Rngs):
        start = nnx.initializers.normal(config.size**-0.5)
        self.word = Table(config.vocab_size, config.size, start, rngs)
        if config.positions == "learned":
            self.position = Table(config.rows, config.size, start, rngs)
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
    waves = LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / max(1, half - 1))
    angles = (places + FIRST_PLACE)[..., None].astype(jnp.float32) * waves
    parts = [jnp.sin(angles), jnp.cos(angles), jnp.zeros((*places.shape, size - 2 * half))]
    return jnp.concatenate(parts, axis=-1)


def to_words(h: Float[Array, "*B C"], table: Table) -> Float[Array, "*B V"]:
    """Return float32 logits, the products with the rows of an embedding matrix."""
    return attend(h, table.embedding[...])
