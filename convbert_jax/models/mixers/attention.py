"""Self-attention, the mixer of BERT and ELECTRA; the computation is in `ops/attention/`."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import MixerSettings
from convbert_jax.config.mixers import nominal_heads
from convbert_jax.interfaces.placement import Split
from convbert_jax.models import costs
from convbert_jax.models.capture import Capture
from convbert_jax.models.layers import Dense, Initializers, apply_all
from convbert_jax.models.mixers.cache import Cache
from convbert_jax.ops.attention import attention, attention_scores, attention_weights
from convbert_jax.ops.dropout import dropout_of


@dataclasses.dataclass(frozen=True)
class Attention:
    """Specification of `SelfAttention`.

    It is the bottleneck variant where the heads do not fill the hidden size.
    """

    attention_heads: int
    head_size: int
    attention_dropout: float
    attention: str

    # Heads are not split across devices: projections are sharded along their outputs and
    # `output` along its input.
    RULES = ((r"output/kernel", Split(tensor=-2)), (r"\w+/kernel", Split(tensor=-1)))

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Attention":
        """Make full self-attention, or the bottleneck of ConvBERT's ablation.

        Self-attention uses all heads of the config and ignores head_ratio, which other mixers
        use. The bottleneck has heads / head_ratio attention heads and no convolution.
        """
        bottleneck = settings.mixer == "bottleneck"
        return cls(
            settings.reduced_heads() if bottleneck else settings.all_heads(),
            settings.head_size,
            settings.attention_dropout,
            settings.attention,
            **own,
        )

    def fields(self, hidden_size: int) -> dict[str, Any]:
        heads = nominal_heads(hidden_size, self.head_size)
        fields = {"heads": heads, "attention_dropout": self.attention_dropout}
        if self.attention_heads < heads:
            fields |= {"mixer": "bottleneck", "head_ratio": heads // self.attention_heads}
        return fields

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return SelfAttention(self, hidden_size, initializers, rngs, causal)

    def products(self, hidden_size: int, length: int) -> float:
        width = self.attention_heads * self.head_size
        return 3 * 2 * hidden_size * width + 2 * 2 * length * width + 2 * width * hidden_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        heads, width = self.attention_heads, self.attention_heads * self.head_size
        return (1 + costs.SOFTMAX + costs.DROPOUT) * length * heads + 3 * width

    @property
    def reads_padding(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.attention_heads} of {self.head_size}"


class SelfAttention(nnx.Module):
    """Multi-head self-attention (BERT, ELECTRA); fewer heads make the bottleneck."""

    def __init__(
        self,
        config: Attention,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        width = config.attention_heads * config.head_size
        self.query = Dense(hidden_size, width, initializers.dense, rngs)
        self.key = Dense(hidden_size, width, initializers.dense, rngs)
        self.value = Dense(hidden_size, width, initializers.dense, rngs)
        self.output = Dense(width, hidden_size, initializers.dense, rngs)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        return self._attend(x, segment_ids, key, capture)[0]

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> Cache:
        c = self.config
        return Cache.start(rows, copies, length, c.attention_heads, c.head_size, dtype)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], Cache]:
        out, keys, value = self._attend(x, segment_ids)
        return out, Cache.prefill(keys, value, segment_ids, copies, length)

    def step(
        self, x: Float[Array, "R 1 C"], state: Cache, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], Cache]:
        heads = self.config.attention_heads
        query, keys, value = project(x, heads, self.query, self.key, self.value)
        attended, state = state.attend(query, keys, value)
        return self.output(join(attended)), state

    def _attend(self, x, segment_ids, key=None, capture=None):
        """Return the output, the keys and the values."""
        c = self.config
        query, keys, value = project(x, c.attention_heads, self.query, self.key, self.value)
        attended = attend(
            query, keys, value, segment_ids, dropout_rate=c.attention_dropout, dropout_key=key,
            causal=self.causal, implementation=c.attention, capture=capture,
        )  # fmt: skip
        return self.output(join(attended)), keys, value


def attend(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L H D"],
    value: Float[Array, "B L H D"],
    segment_ids: Int[Array, "B L"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    causal: bool = False,
    implementation: str = "auto",
    capture: Capture | None = None,
) -> Float[Array, "B L H D"]:
    """Compute softmax(query . key / sqrt(D)) . value within segments, dropout on the softmax.

    Args:
      dropout_key: None disables dropout.
      causal: Whether a position sees only itself and earlier positions.
      implementation: As in `ops.attention.attention`.
      capture: Is offered "attention", float32 maps [B, H, L, L] before dropout, and "scores", the
        values before the softmax.
    """
    if capture is not None:
        capture.offer(
            "attention",
            lambda: attention_weights(query, key, segment_ids=segment_ids, causal=causal),
        )
        capture.offer(
            "scores",
            lambda: attention_scores(query, key, segment_ids=segment_ids, causal=causal),
        )
    return attention(
        query, key, value, segment_ids=segment_ids, causal=causal, implementation=implementation,
        drop=dropout_of(dropout_rate, dropout_key),
    )  # fmt: skip


def project(
    x: Float[Array, "B L C"], heads: int, *layers: Dense
) -> list[Float[Array, "B L {heads} D"]]:
    """Apply each layer to `x` and split the results into heads."""
    return [split(y, heads) for y in apply_all(layers, x)]


def split(x: Float[Array, "B L C"], heads: int) -> Float[Array, "B L {heads} D"]:
    """Split channels into heads of neighboring channels."""
    return x.reshape(*x.shape[:2], heads, -1)


def join(x: Float[Array, "B L H D"]) -> Float[Array, "B L HD"]:
    """Merge the heads into channels again."""
    return x.reshape(*x.shape[:2], -1)
