"""Cross-attention of a decoder to the encoder's output."""

from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.models.layers import Dense, Initializers, State
from convbert_jax.models.mixers.attention import Attention, join, project, split
from convbert_jax.ops.attention import attention, attention_to_kept
from convbert_jax.ops.dropout import dropout_of


class SourceAttention(nnx.Module):
    """softmax(query . key / sqrt(D)) . value, target to source (Vaswani et al. 2017, §3.2.3).

    Keys and values come from the source; parameters are named as in self-attention.
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
        """Attend to the source of the same segment; with a key, apply dropout to the softmax."""
        c = self.config
        keys, values = project(source, c.attention_heads, self.key, self.value)
        attended = attention(
            split(self.query(x), c.attention_heads), keys, values,
            segment_ids=segment_ids, key_segment_ids=source_ids, implementation=c.attention,
            drop=dropout_of(c.attention_dropout, key),
        )  # fmt: skip
        return self.output(join(attended))

    def keep(self, source: Float[Array, "B S C"]) -> State:
        """Compute the source's keys [B, H, D, S] and values [B, H, S, D], once for all steps."""
        keys, values = project(source, self.config.attention_heads, self.key, self.value)
        return {"key": keys.transpose(0, 2, 3, 1), "value": values.swapaxes(1, 2)}

    def step(
        self, x: Float[Array, "R 1 C"], kept: State, source_ids: Int[Array, "B S"]
    ) -> Float[Array, "R 1 C"]:
        """Attend from one position of R = B x copies rows; rows of one source are adjacent."""
        query = split(self.query(x), self.config.attention_heads)
        of_source = query.reshape(len(source_ids), -1, *query.shape[2:]).swapaxes(1, 2)
        visible = (source_ids == 1)[:, None, None]
        attended = attention_to_kept(of_source, kept["key"], kept["value"], visible)
        return self.output(join(attended.swapaxes(1, 2).reshape(query.shape)))
