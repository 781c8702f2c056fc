"""Self-attention, the mixer of BERT and ELECTRA, and its key-value cache for decoding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.config import ConfigError, MixerSettings
from convbert_jax.config.mixers import AttentionOptions, nominal_heads
from convbert_jax.interfaces import Split
from convbert_jax.models.layers import (
    Canons,
    Capture,
    Dense,
    Initializers,
    PaperFlops,
    RMSNorm,
    State,
    apply_fused,
    positions,
)
from convbert_jax.ops.attention import (
    attention,
    attention_scores,
    attention_weights,
    decode_attention,
    rotary,
)
from convbert_jax.ops.nn import dropout_of


@dataclasses.dataclass(frozen=True)
class Attention:
    """Specification of `SelfAttention`.

    It is the bottleneck variant where the heads do not fill the hidden size.
    """

    attention_heads: int
    head_size: int
    attention_dropout: float
    attention: str
    options: AttentionOptions

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
        heads = settings.reduced_heads() if bottleneck else settings.all_heads()
        check_options(settings, heads, settings.head_size)
        return cls(
            heads,
            settings.head_size,
            settings.attention_dropout,
            settings.attention,
            settings.options,
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

    @property
    def key_value_heads(self) -> int:
        return self.options.key_value_heads or self.attention_heads

    @property
    def canon_widths(self) -> dict[str, int]:
        """Channels of the projections that position B of config.model.canon convolves."""
        shared = self.key_value_heads * self.head_size
        return {"query": self.attention_heads * self.head_size, "key": shared, "value": shared}

    def products(self, hidden_size: int, length: int) -> float:
        width = self.attention_heads * self.head_size
        projected = 2 * width + 2 * self.key_value_heads * self.head_size
        return 2 * hidden_size * projected + 2 * 2 * keys_seen(self.options, length) * width

    def elementwise(self, hidden_size: int, length: int) -> float:
        heads, width = self.attention_heads, self.attention_heads * self.head_size
        seen = keys_seen(self.options, length)
        return (1 + PaperFlops.SOFTMAX + PaperFlops.DROPOUT) * seen * heads + 3 * width

    @property
    def reads_padding(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.attention_heads} of {self.head_size}"


def check_options(settings: MixerSettings, heads: int, size: int) -> None:
    """Raise ConfigError for options that `heads` heads of `size` channels cannot have."""
    options = settings.options
    if options.rotary_base and size % 2:
        raise ConfigError(
            f"needs an even number of channels per head, not {size}; change "
            f"{settings.names['heads']}.",
            field="config.model.position_embedding",
            value="rotary",
        )
    if options.key_value_heads and heads % options.key_value_heads:
        raise ConfigError(
            f"does not divide the {heads} attention heads.",
            field="config.model.key_value_heads",
            value=options.key_value_heads,
        )


def keys_seen(options: AttentionOptions, length: int) -> int:
    """Return how many keys of a row of `length` tokens a position sees, at most."""
    return min(length, 2 * options.window + 1) if options.window else length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of R rows in groups of J rows, such as the beams of one text.

    All rows of a group share its entries, and each row has a mask of the entries that are its own
    past. Reordering the rows of a group therefore only permutes masks; keys and values are not
    copied, which would take most of the time of a beam search. `pack` drops entries that no row
    sees: beams soon share most of their past, so little more than L of L J entries remain.

    Attributes:
      key, value: N entries per group, interleaved by row, with axes in the order of the matrix
        products, so that a step appends its entries without a transpose.
      seen: Mask of the entries that are a row's past.
      used: Number of written entries; in groups with fewer, the remaining ones are masked.
    """

    key: Float[Array, "B H D N"]
    value: Float[Array, "B H N D"]
    seen: Bool[Array, "B J N"]
    used: Int[Array, ""]

    @classmethod
    def start(
        cls, rows: int, copies: int, length: int, heads: int, size: int, dtype: jnp.dtype
    ) -> "KVCache":
        """Create an empty cache of `rows` rows in groups of `copies`, for `length` positions."""
        groups, room = rows // copies, length * copies
        return cls(
            jnp.zeros((groups, heads, size, room), dtype),
            jnp.zeros((groups, heads, room, size), dtype),
            jnp.zeros((groups, copies, room), bool),
            jnp.int32(0),
        )

    @classmethod
    def prefill(
        cls,
        key: Float[Array, "B P H D"],
        value: Float[Array, "B P H D"],
        segment_ids: Int[Array, "B P"],
        copies: int,
        length: int,
    ) -> "KVCache":
        """Create the cache of B x `copies` rows that continue B prompts, up to `length` positions.

        A prompt's entries are stored once per group; padding is masked.
        """
        groups, begun = segment_ids.shape
        seen = jnp.broadcast_to((segment_ids != 0)[:, None], (groups, copies, begun))
        kept = cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), seen, jnp.int32(begun))
        return kept.resize(begun + (length - begun) * copies)

    @property
    def room(self) -> int:
        """N, the number of entries that fit into a group."""
        return self.seen.shape[2]

    @property
    def growth(self) -> int:
        """J, the number of entries that a step adds to a group."""
        return self.seen.shape[1]

    def take(self, rows: Int[Array, " R"], axis: int = 0) -> "KVCache":
        """Reorder rows like `jnp.take`: row `rows[r]`, of the same group, becomes row r."""
        seen = self.seen.reshape(-1, self.room).take(rows, axis=axis)
        return dataclasses.replace(self, seen=seen.reshape(self.seen.shape))

    def resize(self, room: int) -> "KVCache":
        """Grow or shrink the cache to `room` entries per group, at least those in use."""

        def fit(x, axis):
            x = jax.lax.slice_in_dim(x, 0, min(room, self.room), axis=axis)
            pads = [(0, max(0, room - self.room) if at == axis else 0, 0) for at in range(x.ndim)]
            return jax.lax.pad(x, jnp.zeros((), x.dtype), pads)

        return KVCache(fit(self.key, 3), fit(self.value, 2), fit(self.seen, 2), self.used)

    def pack(self) -> "KVCache":
        """Move visible entries to the front, in order, and drop all others."""
        live = self.seen.any(axis=1)
        order = jnp.argsort(~live, axis=1, stable=True)
        return KVCache(
            jnp.take_along_axis(self.key, order[:, None, None], axis=3),
            jnp.take_along_axis(self.value, order[:, None, :, None], axis=2),
            jnp.take_along_axis(self.seen, order[:, None], axis=2),
            live.sum(axis=1, dtype=jnp.int32).max(),
        )

    def attend(
        self,
        query: Float[Array, "R 1 H D"],
        key: Float[Array, "R 1 G D"],
        value: Float[Array, "R 1 G D"],
        window: int = 0,
    ) -> tuple[Float[Array, "R 1 H D"], "KVCache"]:
        """Append the next position's key and value and compute its causal attention.

        Scores are float32.

        Args:
          window: The position sees this many earlier positions; 0: all.
        """
        groups, copies, _ = self.seen.shape

        def by_group(x):  # [B, G, J, D]
            return x.reshape(groups, copies, *x.shape[2:]).swapaxes(1, 2)

        own = jnp.broadcast_to(jnp.eye(copies, dtype=bool), (groups, copies, copies))
        put = jax.lax.dynamic_update_slice_in_dim
        kept = KVCache(
            put(self.key, by_group(key).swapaxes(2, 3), self.used, axis=3),
            put(self.value, by_group(value), self.used, axis=2),
            put(self.seen, own, self.used, axis=2),
            self.used + copies,
        )
        if window:  # entries are in the order of time
            newest_first = jnp.cumsum(kept.seen[..., ::-1], axis=-1)[..., ::-1]
            kept = dataclasses.replace(kept, seen=kept.seen & (newest_first <= window + 1))
        # The query heads that share a key are further queries of it: [B, G, H / G * J, D].
        heads, size = query.shape[2:]
        shared = heads // key.shape[2]
        queries = by_group(query).reshape(groups, -1, shared * copies, size)
        visible = jnp.tile(kept.seen, (1, shared, 1))[:, None]
        attended = decode_attention(queries, kept.key, kept.value, visible)
        attended = attended.reshape(groups, heads, copies, size)
        return attended.swapaxes(1, 2).reshape(query.shape), kept


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
        options = config.options
        width, shared = (
            heads * config.head_size for heads in (config.attention_heads, config.key_value_heads)
        )
        self.query = Dense(hidden_size, width, initializers.dense, rngs, options.biases)
        self.key = Dense(hidden_size, shared, initializers.dense, rngs, options.biases)
        self.value = Dense(hidden_size, shared, initializers.dense, rngs, options.biases)
        self.output = Dense(width, hidden_size, initializers.dense, rngs, options.biases)
        add_qk_norms(self, options, config.head_size)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        return self._attend(x, segment_ids, Canons(segment_ids), key, capture)[0]

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        c = self.config
        cache = KVCache.start(rows, copies, length, c.key_value_heads, c.head_size, dtype)
        return cache, Canons.start(rows, dtype, self)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        canons = Canons(segment_ids, copies=copies)
        out, keys, value = self._attend(x, segment_ids, canons)
        return out, (KVCache.prefill(keys, value, segment_ids, copies, length), canons.state)

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        cache, past = state
        canons = Canons(past=past)
        query, keys, value = self._project(x, places[:, None], canons)
        attended, cache = cache.attend(query, keys, value, self.config.options.window)
        return self.output(join(attended)), (cache, canons.state)

    def _attend(self, x, segment_ids, canons, key=None, capture=None):
        """Return the output, the keys and the values."""
        c = self.config
        query, keys, value = self._project(x, positions(segment_ids), canons)
        attended = attend(
            query, keys, value, segment_ids, window=c.options.window,
            dropout_rate=c.attention_dropout, dropout_key=key, causal=self.causal,
            implementation=c.attention, capture=capture,
        )  # fmt: skip
        return self.output(join(attended)), keys, value

    def _project(self, x, places, canons):
        c = self.config
        query, keys, value = apply_fused([self.query, self.key, self.value], x)
        query = canons(self, "query", query)
        keys, value = canons(self, "key", keys), canons(self, "value", value)
        query, keys = split(query, c.attention_heads), split(keys, c.key_value_heads)
        query, keys = normalize_and_rotate(self, query, keys, places, c.options)
        return query, keys, split(value, c.key_value_heads)


def add_qk_norms(module: nnx.Module, options: AttentionOptions, head_size: int) -> None:
    """Add the norms of queries and keys to a module, if `options` has them."""
    if options.qk_norm_epsilon:
        module.query_norm = RMSNorm(head_size, options.qk_norm_epsilon)
        module.key_norm = RMSNorm(head_size, options.qk_norm_epsilon)


def normalize_and_rotate(
    module: nnx.Module,
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L G D"],
    places: Int[Array, "B L"],
    options: AttentionOptions,
) -> tuple[Float[Array, "B L H D"], Float[Array, "B L G D"]]:
    """Normalize and rotate queries and keys, as `options` says."""
    if options.qk_norm_epsilon:
        query, key = module.query_norm(query), module.key_norm(key)
    if options.rotary_base:
        query, key = (rotary(x, places, options.rotary_base) for x in (query, key))
    return query, key


def attend(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L G D"],
    value: Float[Array, "B L G D"],
    segment_ids: Int[Array, "B L"],
    *,
    window: int = 0,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    causal: bool = False,
    implementation: str = "auto",
    capture: Capture | None = None,
) -> Float[Array, "B L H D"]:
    """Compute softmax(query . key / sqrt(D)) . value within segments, dropout on the softmax.

    Args:
      key, value: Of H query heads or, shared, of G heads that divide H.
      window: As in `ops.attention.attention`.
      dropout_key: None disables dropout.
      causal: Whether a position sees only itself and earlier positions.
      implementation: As in `ops.attention.attention`.
      capture: Is offered "attention", float32 maps [B, H, L, L] before dropout, and "scores", the
        values before the softmax.
    """
    if (shared := query.shape[2] // key.shape[2]) > 1:
        key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    seen = {"segment_ids": segment_ids, "causal": causal, "window": window}
    if capture is not None:
        capture.offer("attention", lambda: attention_weights(query, key, **seen))
        capture.offer("scores", lambda: attention_scores(query, key, **seen))
    return attention(
        query, key, value, **seen, implementation=implementation,
        drop=dropout_of(dropout_rate, dropout_key),
    )  # fmt: skip


def project(
    x: Float[Array, "B L C"], heads: int, *layers: Dense
) -> list[Float[Array, "B L {heads} D"]]:
    """Apply each layer to `x` and split the results into heads."""
    return [split(y, heads) for y in apply_fused(layers, x)]


def split(x: Float[Array, "B L C"], heads: int) -> Float[Array, "B L {heads} D"]:
    """Split channels into heads of neighboring channels."""
    return x.reshape(*x.shape[:2], heads, -1)


def join(x: Float[Array, "B L H D"]) -> Float[Array, "B L HD"]:
    """Merge the heads into channels again."""
    return x.reshape(*x.shape[:2], -1)
