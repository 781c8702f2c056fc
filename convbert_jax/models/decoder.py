"""Decoder: stages of causal layers, applied to whole rows or one position at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import LayerConfig, Mixer
from convbert_jax.config.network import DecoderConfig
from convbert_jax.models.encoder import FeedForward, inner_key, make_stages, scan_stages
from convbert_jax.models.layers import (
    Canons,
    Dense,
    Initializers,
    State,
    add_canons,
    dropout,
    initializers,
    make_norm,
    residual,
)
from convbert_jax.models.mixers.attention import Attention, join, project, split
from convbert_jax.ops.attention import attention, decode_attention
from convbert_jax.ops.nn import dropout_of
from convbert_jax.ops.partitioning import constrain_activations


class DecodeContext(NamedTuple):
    """Inputs of every decoding step that never change.

    Attributes:
      layers: The decoder's layers, unstacked once: slicing the stacks in each step is slower.
      kept: Keys and values of the source for each layer; None without a source.
      segment_ids: Segments of the source rows; 0 marks padding.
      first: Index of each text's first token, since prompts are padded on the left.
    """

    layers: tuple["DecoderLayer", ...]
    kept: tuple[State | None, ...]
    segment_ids: Int[Array, "B S"] | None
    first: Int[Array, " B"]


class DecoderLayer(nnx.Module):
    """Causal mixer, optional cross-attention, feed-forward; each with dropout and residual norm."""

    def __init__(self, config: LayerConfig, source: Mixer | None, rngs: nnx.Rngs):
        hidden = config.hidden_size
        starts = initializers(config.initializers, config.initializer_range)
        self.mixer = config.mixer.module(hidden, starts, rngs, causal=True)
        self.mixer_norm = make_norm(config, hidden)
        if source is not None:
            self.source = SourceAttention(source, hidden, starts, rngs)
            self.source_norm = make_norm(config, hidden)
        self.feed_forward = FeedForward(config, starts, rngs)
        self.feed_forward_norm = make_norm(config, hidden)
        add_canons(self, config, starts, rngs, causal=True)
        self.dropout, self.norm, self.reads = config.dropout, config.norm, source is not None

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        source: Float[Array, "B S C"] | None,
        source_ids: Int[Array, "B S"] | None,
        key: Array | None = None,
    ) -> Float[Array, "B L C"]:
        keys = [None] * 5 if key is None else jax.random.split(key, 5)
        x, canons = constrain_activations(x), Canons(segment_ids)

        def mix(x):
            return self.mixer(canons(self, "mixer", x), segment_ids, keys[0])

        x = self._add(x, mix, "mixer", keys[1])
        if self.reads:

            def read(x):
                return self.source(x, segment_ids, source, source_ids, keys[2])

            x = self._add(x, read, "source", keys[3])

        return self._feed(x, canons, keys[4])

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> State:
        """Return the state before the first position."""
        mixer = self.mixer.start(rows, length, dtype, copies)
        return mixer, Canons.start(rows, dtype, self, self.feed_forward)

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int
    ) -> tuple[Float[Array, "B P C"], State]:
        """Process all prompt positions of a decoder-only layer; also return the decoding state."""
        state, canons = None, Canons(segment_ids, copies=copies)

        def mix(x):
            nonlocal state
            x = canons(self, "mixer", x)
            out, state = self.mixer.prefill(x, segment_ids, length, copies)
            return out

        x = self._add(constrain_activations(x), mix, "mixer")
        return self._feed(x, canons), (state, canons.state)

    def step(
        self,
        x: Float[Array, "R 1 C"],
        state: State,
        places: Int[Array, " R"],
        kept: State | None,
        source_ids: Int[Array, "B S"] | None,
    ) -> tuple[Float[Array, "R 1 C"], State]:
        """Process one position; `kept` and `source_ids` are None without cross-attention."""
        of_mixer, past = state
        canons = Canons(past=past)

        def mix(x):
            nonlocal of_mixer
            out, of_mixer = self.mixer.step(canons(self, "mixer", x), of_mixer, places)
            return out

        x = self._add(x, mix, "mixer")
        if self.reads:
            x = self._add(x, lambda x: self.source.step(x, kept, source_ids), "source")
        return self._feed(x, canons), (of_mixer, canons.state)

    def _feed(self, x, canons, key=None):
        def feed(x):
            return self.feed_forward(canons(self, "feed_forward", x), canons, inner_key(key))

        return self._add(x, feed, "feed_forward", key)

    def _add(self, x, inner, name, key=None):
        def drop(x):
            return dropout(inner(x), self.dropout, key)

        return constrain_activations(residual(x, drop, getattr(self, f"{name}_norm"), self.norm))


class Decoder(nnx.Module):
    """Decoder stages in order; pre-norm stages usually have a final norm.

    Parameters are named as in `Encoder`.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        def make(layer, rngs):
            return DecoderLayer(layer, config.source, rngs)

        self.stages = make_stages(make, config.stages, rngs)
        if config.last_norm:
            self.norm = make_norm(config.stages[-1].layer, config.hidden_size)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        source: Float[Array, "B S C"] | None = None,
        source_ids: Int[Array, "B S"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "B L C"]:
        """Compute the hidden states of the last layer.

        A position sees itself, earlier positions of its segment, and the source of its segment.
        """

        def run(x, layer, layer_key):
            return layer(x, segment_ids, source, source_ids, layer_key), None

        x, _ = scan_stages(run, x, self.stages, self.config, key)
        return dropout(self._finish(x), self.config.last_dropout, inner_key(key))

    def start(self, rows: int, length: int, dtype: jnp.dtype, copies: int = 1) -> tuple[State, ...]:
        """Return each layer's state before the first position of rows of up to `length` positions.

        Each group of `copies` adjacent rows may be reordered later, as in a beam search.
        """
        return tuple(layer.start(rows, length, dtype, copies) for layer in self._layers())

    def prefill(
        self, x: Float[Array, "B P C"], segment_ids: Int[Array, "B P"], length: int, copies: int = 1
    ) -> tuple[State, ...]:
        """Return each layer's state after the P prompt positions, which are processed at once.

        Shorter prompts are padded on the left with segment 0. The state has B x `copies` rows, as
        in `start`.
        """
        states = []
        for layer in self._layers():
            x, state = layer.prefill(x, segment_ids, length, copies)
            states.append(state)
        return tuple(states)

    def read(
        self,
        first: Int[Array, " B"],
        source: Float[Array, "B S C"] | None = None,
        source_ids: Int[Array, "B S"] | None = None,
    ) -> DecodeContext:
        """Return the constant inputs of all steps: layers, and the source's keys and values."""
        layers = self._layers()
        kept = tuple(None if source is None else layer.source.keep(source) for layer in layers)
        return DecodeContext(layers, kept, source_ids, first)

    def step(
        self,
        x: Float[Array, "R 1 C"],
        state: tuple[State, ...],
        places: Int[Array, " R"],
        read: DecodeContext,
    ) -> tuple[Float[Array, "R 1 C"], tuple[State, ...]]:
        """Process one position; return its hidden states and the state after it.

        Args:
          places: Index of the position in each row's text.
          read: For a source of B rows, R / B adjacent rows share one source row.
        """
        # No scan: it would put layers before rows in the state, and copy each layer's weights.
        after = []
        for layer, layer_state, kept in zip(read.layers, state, read.kept, strict=True):
            x, layer_state = layer.step(x, layer_state, places, kept, read.segment_ids)
            after.append(layer_state)
        return self._finish(x), tuple(after)

    def _layers(self) -> tuple[DecoderLayer, ...]:
        """Unstack the layers."""
        layers = []
        for i, stage in enumerate(self.config.stages):
            for n, config in enumerate(stage.layers):
                layer = jax.tree.map(lambda leaf, n=n: leaf[n], self.stages[str(i)])
                if len(stage.pattern) > 1:
                    layer.mixer.config = config.mixer
                layers.append(layer)
        return tuple(layers)

    def _finish(self, x):
        return self.norm(x) if self.config.last_norm else x


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
    ):
        biases = config.options.biases
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
        attended = decode_attention(of_source, kept["key"], kept["value"], visible)
        return self.output(join(attended.swapaxes(1, 2).reshape(query.shape)))
