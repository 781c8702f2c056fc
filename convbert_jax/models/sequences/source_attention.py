"""Attention of a decoder to what the encoder made of the source."""

from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.models.mixers.attention import Attention, join, project, split
from convbert_jax.ops.attention import attention, attention_to_kept
from convbert_jax.ops.dropout import dropout_of


class SourceAttention(nnx.Module):
    """softmax(query . key / sqrt(D)) . value, queries of the target, keys and values of the source
    (Vaswani et al. 2017, §3.2.3); parameters are called as those of self-attention.
    """

    def __init__(
        self,
        config: Attention,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        biases: bool = True,
    ):
        width = config.attention_heads * config.head_size
        self.query = Dense(hidden_size, width, initializers.dense, rngs, biases)
        self.key = Dense(hidden_size, width, initializers.dense, rngs, biases)
        self.value = Dense(hidden_size, width, initializers.dense, rngs, biases)
        self.output = Dense(width, hidden_size, initializers.dense, rngs, biases)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        source: Float[Array, "B S C"],
        source_ids: Int[Array, "B S"],
        key: Array | None = None,
    ) -> Float[Array, "B L C"]:
        """A position sees the source of its own segment; with a key, dropout on the softmax."""
        c = self.config
        keys, values = project(source, c.attention_heads, self.key, self.value)
        attended = attention(
            split(self.query(x), c.attention_heads), keys, values,
            segment_ids=segment_ids, key_segment_ids=source_ids, implementation=c.attention,
            drop=dropout_of(c.attention_dropout, key),
        )  # fmt: skip
        return self.output(join(attended))

    def keep(self, source: Float[Array, "B S C"]) -> State:
        """Keys [B, H, D, S] and values [B, H, S, D] of the source, once for all positions of the
        target.
        """
        keys, values = project(source, self.config.attention_heads, self.key, self.value)
        return {"key": keys.transpose(0, 2, 3, 1), "value": values.swapaxes(1, 2)}

    def step(
        self, x: Float[Array, "R 1 C"], kept: State, source_ids: Int[Array, "B S"]
    ) -> Float[Array, "R 1 C"]:
        """One position of each of R = B x copies rows, those of one source side by side."""
        query = split(self.query(x), self.config.attention_heads)
        of_source = query.reshape(len(source_ids), -1, *query.shape[2:]).swapaxes(1, 2)
        visible = (source_ids == 1)[:, None, None]
        attended = attention_to_kept(of_source, kept["key"], kept["value"], visible)
        return self.output(join(attended.swapaxes(1, 2).reshape(query.shape)))
