"""Encoder: stages of layers; the parameters of each stage are stacked and scanned."""

import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EncoderConfig, LayerConfig, StageConfig
from convbert_jax.config.network import DecoderConfig
from convbert_jax.models.layers import (
    Canons,
    Capture,
    Dense,
    Initializers,
    add_canons,
    dropout,
    feed_forward_dense,
    initializers,
    make_norm,
    residual,
)
from convbert_jax.ops import products
from convbert_jax.ops.nn import ACTIVATIONS
from convbert_jax.ops.partitioning import constrain_activations, layers_at_once

# Activations saved for the backward pass, by config.model.remat; None saves everything needed.
# "dots" saves products with weights; attention is large but cheap, so it is recomputed.
REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(products.DENSE),
    "full": jax.checkpoint_policies.nothing_saveable,
}


Seen = tuple[dict[str, Array], ...]  # of each stage, name -> [N, ...]


class FeedForward(nnx.Module):
    """Dense, activation, dense; grouped if `ffn_groups` > 1 (ConvBERT §3.3).

    The gated form multiplies by a third dense layer without activation before the last dense
    layer (Shazeer 2020).
    """

    def __init__(self, config: LayerConfig, initializers: Initializers, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.ffn_size

        def make(inputs, outputs):
            return feed_forward_dense(
                inputs, outputs, config.ffn_groups, initializers.dense, rngs, config.biases
            )

        self.intermediate = make(hidden, inner)
        if config.gated:
            self.gate = make(hidden, inner)
        self.output = make(inner, hidden)
        self.config = config

    def __call__(
        self, x: Float[Array, "B L C"], canons: Canons, key: Array | None = None
    ) -> Float[Array, "B L C"]:
        """Apply the block; with a key, use `activation_dropout` before the last dense layer."""
        inner = canons(self, "intermediate", self.intermediate(x))
        inner = ACTIVATIONS[self.config.activation](inner)
        if self.config.gated:
            inner = inner * canons(self, "gate", self.gate(x))
        return self.output(dropout(inner, self.config.activation_dropout, key))


def inner_key(key: Array | None) -> Array | None:
    """Derive a key for an additional dropout, independent of the draws from `key` itself."""
    return None if key is None else jax.random.fold_in(key, 1 << 16)


class Layer(nnx.Module):
    """Mixer and feed-forward, each with dropout, residual and layer norm."""

    def __init__(self, config: LayerConfig, rngs: nnx.Rngs):
        starts = initializers(config.initializers, config.initializer_range)
        self.mixer = config.mixer.module(config.hidden_size, starts, rngs)
        if config.mixer_norm:
            self.mixer_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config, starts, rngs)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        add_canons(self, config, starts, rngs)
        self.dropout, self.norm = config.dropout, config.norm

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x, canons = constrain_activations(x), Canons(segment_ids)

        def mix(x):
            x = canons(self, "mixer", x)
            return dropout(self.mixer(x, segment_ids, keys[0], capture), self.dropout, keys[1])

        def feed(x):
            x = self.feed_forward(canons(self, "feed_forward", x), canons, inner_key(keys[2]))
            return dropout(x, self.dropout, keys[2])

        with jax.named_scope("mixer"):
            norm = getattr(self, "mixer_norm", None)
            x = constrain_activations(residual(x, mix, norm, self.norm))
        with jax.named_scope("feed_forward"):
            return constrain_activations(residual(x, feed, self.feed_forward_norm, self.norm))


class Encoder(nnx.Module):
    """Encoder stages in order, after a projection if embedding and hidden sizes differ.

    Parameters of stage i are under `stages/i`, with a leading axis of N layers. Pre-norm layers
    are followed by a final norm.
    """

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        if config.embedding_size != config.hidden_size:
            starts = initializers(config.initializers, config.initializer_range)
            self.embeddings_project = Dense(
                config.embedding_size, config.hidden_size, starts.glorot, rngs
            )
        self.stages = make_stages(Layer, config.stages, rngs)
        last = config.stages[-1].layer
        if last.norm == "pre":
            self.norm = make_norm(last, config.hidden_size)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L E"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: str | Collection[str] = (),
    ) -> Float[Array, "B L C"] | tuple[Float[Array, "B L C"], Seen]:
        """Compute the hidden states of the last layer.

        Args:
          segment_ids: 0 marks padding; positions of different segments do not interact.
          key: Dropout key; None is deterministic.
          capture: Activations to return for every layer whose mixer offers them:
            "attention": Attention maps [N, B, H, L, L] in float32, before dropout. Each row sums
              to 1 over the keys visible to its position.
            "filters": Filters of dynamic or lightweight convolution, [N, B, L, H, K]; lightweight
              filters are repeated at all positions. Each sums to 1; masked taps have weight 0.
            "scores": Attention scores before the softmax, 0 where masked.
            "hidden": Output of each layer, [N, B, L, C].

        Returns:
          The hidden states. With `capture`, also one dict per stage that maps each name to the
          arrays of its layers, stacked on axis 0. Names that the mixer does not offer are absent.

        Raises:
          ValueError: No layer offers a requested name.
        """
        c = self.config
        wanted, offered = {capture} if isinstance(capture, str) else set(capture), set()
        if c.embedding_size != c.hidden_size:
            x = self.embeddings_project(x)

        def run(x, layer, layer_key):
            if not wanted:
                return layer(x, segment_ids, layer_key), None
            captured = Capture(wanted)
            x = layer(x, segment_ids, layer_key, captured)
            captured.offer("hidden", lambda: x)
            offered.update(captured.offered)
            return x, captured.seen

        x, seen = scan_stages(run, x, self.stages, c, key)
        if c.stages[-1].layer.norm == "pre":
            x = dropout(self.norm(x), c.last_dropout, inner_key(key))
        if missing := wanted - offered:
            raise ValueError(
                f"Unknown capture {sorted(wanted)}: no layer offers {sorted(missing)}. "
                f"Choose from {sorted(offered)}."
            )
        return (x, seen) if wanted else x

    def offers(self) -> tuple[frozenset[str], ...]:
        """Return the names that `capture` accepts for each stage, without computing anything."""
        x, ids = jnp.zeros((1, 1, self.config.hidden_size)), jnp.ones((1, 1), int)
        found = []
        for i in range(len(self.config.stages)):
            capture = Capture(())

            def run(layers, capture=capture):
                return jax.tree.map(lambda leaf: leaf[0], layers)(x, ids, None, capture)

            jax.eval_shape(run, self.stages[str(i)])
            found.append(frozenset(capture.offered))
        return tuple(found)


def make_stages(
    make: Callable[[LayerConfig, nnx.Rngs], nnx.Module],
    stages: Sequence[StageConfig],
    rngs: nnx.Rngs,
) -> nnx.Dict:
    """Make the layers of each stage, with parameters stacked along axis 0.

    The keys are numbers as strings: parameter paths and checkpoints do not support lists.
    """
    made = {}
    for i, stage in enumerate(stages):
        stack = nnx.vmap(functools.partial(make, stage.layer))
        made[str(i)] = stack(rngs.split(stage.depth))
    return nnx.Dict(made)


def scan_stages(
    run: Callable[[Array, nnx.Module, Array | None], tuple[Array, dict[str, Array] | None]],
    x: Float[Array, "B L C"],
    stages: nnx.Dict,
    config: EncoderConfig | DecoderConfig,
    key: Array | None,
) -> tuple[Float[Array, "B L C"], tuple[dict[str, Array] | None, ...]]:
    """Apply `run(x, layer, key)` to the layers of all stages, in order.

    A stage is one `lax.scan` over its pattern, so each member is compiled once.

    Returns:
      The last output, and for each stage the second results of its layers, stacked.
    """
    policy = REMAT_POLICIES[config.remat]
    if policy is not None:
        run = jax.checkpoint(run, policy=policy, prevent_cse=False)
    seen = []
    for i, stage in enumerate(config.stages):
        layers, period = stages[str(i)], len(stage.pattern)
        keys = None if key is None else jax.random.split(jax.random.fold_in(key, i), stage.depth)
        wanted = max(1, config.scan_unroll // period)
        unroll = layers_at_once(stage.depth // period, wanted, training=key is not None)
        if period == 1:
            scanned = jax.lax.scan(lambda x, each: run(x, *each), x, (layers, keys), unroll=unroll)
        else:
            scanned = _scan_pattern(run, x, layers, keys, stage, unroll)
        x, of_stage = scanned
        seen.append(of_stage)
    return x, tuple(seen)


def _scan_pattern(run, x, layers, keys, stage: StageConfig, unroll: int):
    period = len(stage.pattern)

    def by_pattern(leaf):
        return leaf.reshape(-1, period, *leaf.shape[1:])

    def run_pattern(x, layers_and_keys):
        found = []
        for n, config in enumerate(stage.pattern):
            layer, layer_key = jax.tree.map(lambda leaf, n=n: leaf[n], layers_and_keys)
            layer.mixer.config = config.mixer
            x, of_layer = run(x, layer, layer_key)
            found.append(of_layer)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    xs = jax.tree.map(by_pattern, (layers, keys))
    x, found = jax.lax.scan(run_pattern, x, xs, unroll=unroll)
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)
