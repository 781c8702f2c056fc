"""Encoder: stages of identical layers; the parameters of each stage are stacked and scanned."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EncoderConfig, LayerConfig
from convbert_jax.models.layers import (
    NORMS,
    Capture,
    Dense,
    Initializers,
    dropout,
    feed_forward_dense,
    initializers,
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

    def __call__(self, x: Float[Array, "B L C"], key: Array | None = None) -> Float[Array, "B L C"]:
        """Apply the block; with a key, use `activation_dropout` before the last dense layer."""
        inner = ACTIVATIONS[self.config.activation](self.intermediate(x))
        if self.config.gated:
            inner = inner * self.gate(x)
        return self.output(dropout(inner, self.config.activation_dropout, key))


def inner_key(key: Array | None) -> Array | None:
    """Derive a key for an additional dropout, independent of the draws from `key` itself."""
    return None if key is None else jax.random.fold_in(key, 1 << 16)


class Layer(nnx.Module):
    """Mixer and feed-forward, each with dropout, residual and layer norm."""

    def __init__(self, config: LayerConfig, rngs: nnx.Rngs):
        starts = initializers(config.initializers, config.initializer_range)
        self.mixer = config.mixer.module(config.hidden_size, starts, rngs)
        norm = NORMS[config.normalization]
        self.mixer_norm = norm(config.hidden_size, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config, starts, rngs)
        self.feed_forward_norm = norm(config.hidden_size, config.layer_norm_epsilon)
        self.dropout, self.norm = config.dropout, config.norm

    def __call__(
        self,
        x: Float[Array, "B L C"],
        segment_ids: Int[Array, "B L"],
        key: Array | None = None,
        capture: Capture | None = None,
    ) -> Float[Array, "B L C"]:
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x = constrain_activations(x)

        def mix(x):
            return dropout(self.mixer(x, segment_ids, keys[0], capture), self.dropout, keys[1])

        def feed(x):
            return dropout(self.feed_forward(x, inner_key(keys[2])), self.dropout, keys[2])

        with jax.named_scope("mixer"):
            x = constrain_activations(residual(x, mix, self.mixer_norm, self.norm))
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
        # A Dict with string keys: parameter paths and checkpoints do not support lists.
        self.stages = nnx.Dict(
            {
                str(i): _stack(stage.layer, stage.depth, rngs)
                for i, stage in enumerate(config.stages)
            }
        )
        last = config.stages[-1].layer
        if last.norm == "pre":
            norm = NORMS[last.normalization]
            self.norm = norm(config.hidden_size, last.layer_norm_epsilon)
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

        def run(x, layer_and_key):
            layer, layer_key = layer_and_key
            if not wanted:
                return layer(x, segment_ids, layer_key), None
            captured = Capture(wanted)
            x = layer(x, segment_ids, layer_key, captured)
            captured.offer("hidden", lambda: x)
            offered.update(captured.offered)
            return x, captured.seen

        policy = REMAT_POLICIES[c.remat]
        if policy is not None:
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        seen = []
        for i, stage in enumerate(c.stages):
            keys = (
                None if key is None else jax.random.split(jax.random.fold_in(key, i), stage.depth)
            )
            unroll = layers_at_once(stage.depth, c.scan_unroll)
            x, of_stage = jax.lax.scan(run, x, (self.stages[str(i)], keys), unroll=unroll)
            seen.append(of_stage)
        if c.stages[-1].layer.norm == "pre":
            x = dropout(self.norm(x), c.last_dropout, inner_key(key))
        if missing := wanted - offered:
            raise ValueError(
                f"Unknown capture {sorted(wanted)}: no layer offers {sorted(missing)}. "
                f"Choose from {sorted(offered)}."
            )
        return (x, tuple(seen)) if wanted else x

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


def _stack(config: LayerConfig, depth: int, rngs: nnx.Rngs) -> Layer:
    return nnx.vmap(lambda layer_rngs: Layer(config, layer_rngs))(rngs.split(depth))
