"""ConvBERT's mixed block: self-attention and, by default, span-based dynamic convolution."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import ConfigError, MixerSettings
from convbert_jax.config.fields import check_choice
from convbert_jax.config.mixers import AttentionOptions, nominal_heads
from convbert_jax.interfaces import REPLICATED, Split
from convbert_jax.models.layers import (
    Canons,
    Capture,
    Dense,
    Initializers,
    PaperFlops,
    State,
    apply_fused,
    keep_past,
    positions,
    start_past,
)
from convbert_jax.models.mixers.attention import (
    Attention,
    KVCache,
    add_qk_norms,
    attend,
    check_options,
    join,
    keys_seen,
    normalize_and_rotate,
    split,
)
from convbert_jax.models.mixers.convolution import (
    SeparableConv,
    at_all_positions,
    convolve,
    convolve_step,
    start_filters,
    unless_masked,
)
from convbert_jax.ops.convolution import dynamic_conv, span_filters
from convbert_jax.ops.nn import softmax

FILTERS = ("span_dynamic", "dynamic", "light")


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Specification of `MixedAttention`.

    With C hidden channels, K taps, a channels in attention heads and b in B convolution heads, it
    has C times a (query), a, a, b (value of the convolution) and a + b weights. Filters add
    K C + C b + b B K (span_dynamic), b B K (dynamic) or B K (light).
    """

    attention_heads: int
    convolution_heads: int
    head_size: int
    kernel_size: int  # taps of the convolution and of its key
    attention_dropout: float
    attention: str
    convolution: str
    mask_convolution: bool
    options: AttentionOptions
    filters: str = "span_dynamic"  # input of the filters: a span, the token, or none (light)
    own_value: bool = True  # convolution has its own value; in the paper's formula V is shared
    convolution_share: float = 0.5  # of the 2 heads / head_ratio heads

    RULES = (
        (r"key_conv/pointwise", Split(tensor=-1)),
        (r"conv_filters", REPLICATED),
        *Attention.RULES,
    )

    reads_padding = property(unless_masked)

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> "Mixed":
        """Make a block with 2 heads / head_ratio heads, split by `convolution_share`.

        By default, half of the heads convolve. A generator has fewer heads, so its number of
        convolution heads is rounded.

        With fewer heads than head_ratio, as in small generators, the official code has one head of
        each kind, both of the nominal width. Without `release_heads`, the two share that width.
        """
        fields, own_fields = {**_defaults(cls), **own}, settings.names["mixer_fields"]
        check_choice(f"{own_fields.removeprefix('config.')}: filters", fields["filters"], FILTERS)
        if settings.options.key_value_heads:
            raise ConfigError(
                f"has no effect with {settings.names['mixer']}={settings.mixer}; set it to 0.",
                field="config.model.key_value_heads",
                value=settings.options.key_value_heads,
            )
        total = 2 * settings.reduced_heads()
        halved = settings.heads < settings.head_ratio and not settings.release_heads
        size = settings.head_size // 2 if halved else settings.head_size
        check_options(settings, total, size)
        convolution_heads = _heads_of_share(fields["convolution_share"], total, settings)
        return cls(
            attention_heads=total - convolution_heads,
            convolution_heads=convolution_heads,
            head_size=size,
            kernel_size=settings.kernel_size,
            attention_dropout=settings.attention_dropout,
            attention=settings.attention,
            convolution=settings.convolution,
            mask_convolution=settings.mask_convolution,
            options=settings.options,
            **own,
        )

    def fields(self, hidden_size: int) -> dict[str, Any]:
        heads = nominal_heads(hidden_size, self.head_size)
        return {
            "heads": heads,
            "head_ratio": 2 * heads // (self.attention_heads + self.convolution_heads),
            "kernel_size": self.kernel_size,
            "attention_dropout": self.attention_dropout,
            "mask_convolution": self.mask_convolution,
        }

    def module(
        self, hidden_size: int, initializers: Initializers, rngs: nnx.Rngs, causal: bool = False
    ) -> nnx.Module:
        return MixedAttention(self, hidden_size, initializers, rngs, causal)

    @property
    def query_heads(self) -> int:
        """Heads of the query, shared by both kinds; light filters need no query."""
        if self.filters == "light":
            return self.attention_heads
        return max(self.attention_heads, self.convolution_heads)

    @property
    def value_heads(self) -> int:
        """Heads of the value, also used by the convolution unless `own_value` is true."""
        shared = 0 if self.own_value else self.convolution_heads
        return max(self.attention_heads, shared)

    @property
    def canon_widths(self) -> dict[str, int]:
        """As in `Attention`; the convolution's own value is not convolved twice."""
        heads = {"query": self.query_heads, "key": self.attention_heads, "value": self.value_heads}
        return {name: number * self.head_size for name, number in heads.items()}

    def products(self, hidden_size: int, length: int) -> float:
        size, taps = self.head_size, self.kernel_size
        attended, convolved = self.attention_heads * size, self.convolution_heads * size
        into = (self.query_heads + self.value_heads) * size + attended
        into += self.own_value * convolved
        into += (self.filters == "span_dynamic") * convolved  # the pointwise part of the key
        products = 2 * hidden_size * into + 2 * 2 * keys_seen(self.options, length) * attended
        if self.filters != "light":
            products += 2 * convolved * self.convolution_heads * taps
        return products + 2 * (attended + convolved) * hidden_size

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Count attention, convolution and, for span_dynamic, the convolution of the key."""
        size, taps, heads = self.head_size, self.kernel_size, self.convolution_heads
        seen = keys_seen(self.options, length)
        scores = (1 + PaperFlops.SOFTMAX + PaperFlops.DROPOUT) * seen * self.attention_heads
        biases = (self.query_heads + self.value_heads + self.attention_heads) * size
        convolution = (2 * taps + self.own_value) * heads * size
        if self.filters != "light":
            convolution += (1 + PaperFlops.SOFTMAX) * taps * heads
        if self.filters == "span_dynamic":
            convolution += 2 * taps * hidden_size + 2 * heads * size
        return scores + biases + convolution

    def __str__(self) -> str:
        kind = "" if self.filters == "span_dynamic" else f" ({self.filters})"
        return (
            f"{self.attention_heads} attention + {self.convolution_heads} convolution heads{kind} "
            f"of {self.head_size}, {self.kernel_size} taps"
        )


def _defaults(cls) -> dict[str, Any]:
    missing = dataclasses.MISSING
    return {f.name: f.default for f in dataclasses.fields(cls) if f.default is not missing}


def _heads_of_share(share: float, total: int, settings: MixerSettings) -> int:
    """Return the number of convolution heads; at least one head of each kind remains.

    Raises:
      ConfigError: `share` does not split `total` into whole heads of both kinds.
    """
    heads = share * total
    if 0 < share < 1 and settings.generator_size is not None:
        return min(max(1, round(heads)), total - 1)
    if not 0 < share < 1 or abs(heads - round(heads)) > 1e-6 or round(heads) in (0, total):
        raise ConfigError(
            f"{settings.names['mixer_fields']}=convolution_share={share} of {total} heads (2 heads "
            f"/ head_ratio) does not split into whole heads of both kinds. Use a multiple of "
            f"1/{total} between 0 and 1, or mixer=attention or span_dynamic for a single kind.",
            field=settings.names["mixer_fields"],
            value=share,
        )
    return round(heads)


class MixedAttention(nnx.Module):
    """Parallel self-attention heads and convolution heads (ConvBERT §3.2).

    Both kinds share the query. The convolution has its own value projection, as in the official
    code, or shares the value, as in the paper's formula. The kind with fewer heads uses the first
    heads of a shared projection. Outputs are concatenated: [attention heads, convolution heads].

    Filters are softmax(W_f (Q * K_s)) from a span, softmax(W_f Q) from the token, or softmax(w),
    the same at all positions. They have no dropout, as in the official code.
    """

    def __init__(
        self,
        config: Mixed,
        hidden_size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool = False,
    ):
        hidden, taps, size = hidden_size, config.kernel_size, config.head_size
        attended, heads = config.attention_heads * size, config.convolution_heads
        convolved = heads * size
        dense, biases = initializers.dense, config.options.biases
        self.query = Dense(hidden, config.query_heads * size, dense, rngs, biases)
        self.key = Dense(hidden, attended, dense, rngs, biases)
        self.value = Dense(hidden, config.value_heads * size, dense, rngs, biases)
        add_qk_norms(self, config.options, size)
        if config.filters == "span_dynamic":
            self.key_conv = SeparableConv(hidden, convolved, taps, initializers, rngs, causal)
        if config.filters == "light":
            self.conv_filters = nnx.Param(start_filters(heads, taps, initializers, rngs))
        else:
            self.conv_kernel = Dense(convolved, heads * taps, dense, rngs)
        if config.own_value:
            self.conv_value = Dense(hidden, convolved, dense, rngs, biases)
        self.output = Dense(attended + convolved, hidden, dense, rngs, biases)
        self.config, self.causal = config, causal

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        ids = segment_ids if self.config.mask_convolution else None
        return self._mix(x, segment_ids, ids, Canons(segment_ids), key, capture)[0]

    def _mix(self, x, segment_ids, ids, canons, key=None, capture=None):
        """Return the output, the keys and values of attention, and the convolution's values."""
        c, heads = self.config, self.config.convolution_heads
        layers = [self.query, self.key, self.value]
        if c.own_value:
            layers.append(self.conv_value)
        query, keys, value, *own_value = apply_fused(layers, x)
        query = split(canons(self, "query", query), c.query_heads)
        keys = split(canons(self, "key", keys), c.attention_heads)
        value = split(canons(self, "value", value), c.value_heads)
        values = own_value[0] if c.own_value else join(value[:, :, :heads])
        value = value[:, :, : c.attention_heads]
        attending, keys = normalize_and_rotate(
            self, query[:, :, : c.attention_heads], keys, positions(segment_ids), c.options
        )
        attended = attend(
            attending, keys, value, segment_ids, window=c.options.window,
            dropout_rate=c.attention_dropout, dropout_key=key, causal=self.causal,
            implementation=c.attention, capture=capture,
        )  # fmt: skip
        with jax.named_scope("convolution"):
            convolved = self._convolve(x, query, values, ids, capture)
        out = self.output(jnp.concatenate([join(attended), convolved], axis=-1))
        return out, (keys, value), values

    def _convolve(self, x, query, values, ids, capture):
        c, heads = self.config, self.config.convolution_heads
        if c.filters == "light":
            filters = softmax(self.conv_filters[...], None, jnp.float32)
            if capture is not None:
                capture.offer("filters", lambda: at_all_positions(filters, x))
            convolved = dynamic_conv(
                split(values, heads),
                filters,
                segment_ids=ids,
                causal=self.causal,
                implementation=c.convolution,
            )
            return join(convolved)
        query = join(query[:, :, :heads])
        spanned = c.filters == "span_dynamic"
        span_key = self.key_conv(x, ids, c.convolution) if spanned else None
        return convolve(
            query, span_key, values, self.conv_kernel.kernel[...], self.conv_kernel.bias[...],
            heads=heads, segment_ids=ids, causal=self.causal, implementation=c.convolution,
            capture=capture,
        )  # fmt: skip

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        c = self.config
        state = {
            "attention": KVCache.start(rows, copies, length, c.attention_heads, c.head_size, dtype),
            "value": start_past(rows, c.kernel_size, c.convolution_heads * c.head_size, dtype),
            "canons": Canons.start(rows, dtype, self),
        }
        if c.filters == "span_dynamic":
            state["span"] = self.key_conv.start(rows, dtype)
        return state

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[Float[Array, "B P C"], State]:
        canons = Canons(segment_ids, copies=copies)
        out, attended, values = self._mix(x, segment_ids, segment_ids, canons)
        state = {
            "attention": KVCache.prefill(*attended, segment_ids, copies, length),
            "value": keep_past(values, segment_ids, self.config.kernel_size, copies),
            "canons": canons.state,
        }
        if self.config.filters == "span_dynamic":
            state["span"] = self.key_conv.keep(x, segment_ids, copies)
        return out, state

    def step(
        self, x: Float[Array, "R 1 C"], state: State, places: Int[Array, " R"]
    ) -> tuple[Float[Array, "R 1 C"], State]:
        c, heads = self.config, self.config.convolution_heads
        canons = Canons(past=state["canons"])
        query = split(canons(self, "query", self.query(x)), c.query_heads)
        keys = split(canons(self, "key", self.key(x)), c.attention_heads)
        value = split(canons(self, "value", self.value(x)), c.value_heads)
        kept = {"canons": canons.state}
        attending, keys = normalize_and_rotate(
            self, query[:, :, : c.attention_heads], keys, places[:, None], c.options
        )
        attended, kept["attention"] = state["attention"].attend(
            attending, keys, value[:, :, : c.attention_heads], c.options.window
        )
        if c.filters == "light":
            filters = softmax(self.conv_filters[...], None, jnp.float32)
        else:
            span_key = None
            if c.filters == "span_dynamic":
                span_key, kept["span"] = self.key_conv.step(x, state["span"])
            kernel = self.conv_kernel
            filters = span_filters(
                join(query[:, :, :heads]), span_key, kernel.kernel[...], kernel.bias[...],
                heads=heads, dtype=x.dtype,
            )[:, 0]  # fmt: skip
        values = self.conv_value(x) if c.own_value else join(value[:, :, :heads])
        convolved, kept["value"] = convolve_step(state["value"], values, filters)
        return self.output(jnp.concatenate([join(attended), convolved], axis=-1)), kept
