"""Pre-training models: ELECTRA-style generator and discriminator, and BERT-style masked LM."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config
from convbert_jax.models.embeddings import Embeddings, add
from convbert_jax.models.encoder import Encoder, Seen
from convbert_jax.models.heads import DiscriminatorHead, MaskedLanguageHead, PairHead
from convbert_jax.models.layers import Dense, Initializers, initializers


class Projections(nnx.Module):
    """Projections of a student's states to the width of its teacher (TinyBERT §3.1, W_h and W_e).

    One dense layer is shared by all layers, one is for the embeddings.
    """

    def __init__(self, config: Config, starts: Initializers, rngs: nnx.Rngs):
        for name, (ours, theirs) in config.projections.items():
            setattr(self, name, Dense(ours, theirs, starts.glorot, rngs))

    def __call__(self, name: str, x: Float[Array, "B L C"]) -> Float[Array, "B L C_teacher"]:
        """Project `x`; returns it unchanged where student and teacher have the same width."""
        return getattr(self, name)(x) if hasattr(self, name) else x


class PretrainingModel(nnx.Module):
    """Replaced-token detection (ELECTRA §2) with every kind of generator.

    config.generator.kind:
      separate: A second encoder, on the discriminator's embeddings or, untied, its own.
      shared: The discriminator's encoder with a second head.
      uniform: Uniform replacements, no generator parameters.

    With config.generator.disentangle_embeddings, `embeddings` belong to the generator, and the
    discriminator reads their sum with `own_embeddings`. With config.objective.masked_lm_steps, the
    discriminator's encoder has a masked language head for its first, masked-LM phase.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        starts = _initializers(config)
        self.embeddings = Embeddings(config.embeddings, starts.dense, rngs)
        self.discriminator = Encoder(config.encoder, rngs)
        self.discriminator_head = DiscriminatorHead(config.encoder.hidden_size, starts, rngs)
        tied = config.generator.tie_embeddings
        if config.generator.kind == "shared":
            self.generator_head = MaskedLanguageHead(
                config.encoder.hidden_size, config.embeddings, starts, rngs
            )
        elif config.generator.kind == "separate":
            sizes = config.embeddings if tied else config.generator_embeddings
            if not tied:
                self.generator_embeddings = Embeddings(sizes, starts.dense, rngs)
            generator = config.generator_encoder
            self.generator = Encoder(generator, rngs)
            self.generator_head = MaskedLanguageHead(generator.hidden_size, sizes, starts, rngs)
        if config.generator.disentangle_embeddings:
            self.own_embeddings = Embeddings(config.embeddings, starts.dense, rngs)
            zeros = jax.tree.map(jnp.zeros_like, nnx.state(self.own_embeddings))
            nnx.update(self.own_embeddings, zeros)
        if config.objective.masked_lm_steps:
            self.masked_lm_head = MaskedLanguageHead(
                config.encoder.hidden_size, config.embeddings, starts, rngs
            )
        self.projections = Projections(config, starts, rngs)
        self.config = config

    def generate(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        positions: Int[Array, "B M"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B M V"]:
        """Compute float32 generator logits at `positions`, which index into each row.

        Args:
          tokens: Token ids, already masked.
          segment_ids: 0 marks padding; positions of different segments do not interact.
          type_ids: First or second text of a pair.
          dtype: Compute dtype; parameters and logits are float32.
          key: Dropout key; None is deterministic.
        """
        c = self.config.generator
        if c.kind == "uniform":
            return jnp.zeros((*positions.shape, self.config.tokenizer.vocab_size))
        encoder = self.discriminator if c.kind == "shared" else self.generator
        untied = c.kind == "separate" and not c.tie_embeddings
        embeddings = self.generator_embeddings if untied else self.embeddings
        with jax.named_scope("generator"):
            hidden = _encode(embeddings, encoder, tokens, segment_ids, type_ids, dtype, key)
            return self.generator_head(_pick(hidden, positions), embeddings)

    def discriminate(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L"]:
        """Return a float32 logit per token, positive where the token looks replaced."""
        return self.detect(self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=key))

    def detect(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B L"]:
        """Return the logits of `discriminate` from the hidden states of `encode`."""
        return self.discriminator_head(hidden)

    def predict(
        self, hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """Compute float32 masked-LM logits of the discriminator's encoder at `positions`.

        Args:
          hidden: Hidden states from `encode`. Requires config.objective.masked_lm_steps.
        """
        return self.masked_lm_head(_pick(hidden, positions), self._read_embeddings())

    def embed(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
    ) -> Float[Array, "B L E"]:
        """Return the input embeddings of the discriminator's encoder, without dropout."""
        return self._read_embeddings()(tokens, segment_ids, type_ids, dtype=dtype)

    def encode(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
        capture: str | Collection[str] = (),
    ) -> Float[Array, "B L C"] | tuple[Float[Array, "B L C"], Seen]:
        """Compute last-layer hidden states of the discriminator, in `dtype`.

        With `capture`, also return the captured activations, see `Encoder`.
        """
        return _encode(
            self._read_embeddings(),
            self.discriminator,
            tokens,
            segment_ids,
            type_ids,
            dtype,
            key,
            capture,
        )

    def _read_embeddings(self) -> Embeddings:
        """Return the embeddings of the discriminator."""
        if self.config.generator.disentangle_embeddings:
            return add(self.embeddings, self.own_embeddings)
        return self.embeddings


class MaskedLanguageModel(nnx.Module):
    """One encoder with a masked language head (BERT §3.1).

    With config.objective.sentence_pairs, it also has a head for sentence pairs.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        starts = _initializers(config)
        self.embeddings = Embeddings(config.embeddings, starts.dense, rngs)
        self.encoder = Encoder(config.encoder, rngs)
        self.head = MaskedLanguageHead(config.encoder.hidden_size, config.embeddings, starts, rngs)
        if config.objective.sentence_pairs != "none":
            self.pair_head = PairHead(config.encoder.hidden_size, starts, rngs)
        self.projections = Projections(config, starts, rngs)

    def generate(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        positions: Int[Array, "B M"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B M V"]:
        """Compute float32 logits at `positions`; see `PretrainingModel.generate`."""
        hidden = self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=key)
        return self.predict(hidden, positions)

    def generate_and_judge(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        positions: Int[Array, "B M"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B M V"], Float[Array, "B 2"]]:
        """Return the logits of `generate`, and float32 logits per pair: follows, does not."""
        hidden = self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=key)
        return self.predict(hidden, positions), self.judge(hidden)

    def predict(
        self, hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """Return the logits of `generate` from the hidden states of `encode`."""
        return self.head(_pick(hidden, positions), self.embeddings)

    def judge(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B 2"]:
        """Return float32 pair logits; requires config.objective.sentence_pairs."""
        return self.pair_head(hidden)

    def embed(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
    ) -> Float[Array, "B L E"]:
        """Return the input embeddings of the encoder, without dropout."""
        return self.embeddings(tokens, segment_ids, type_ids, dtype=dtype)

    def encode(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
        capture: str | Collection[str] = (),
    ) -> Float[Array, "B L C"] | tuple[Float[Array, "B L C"], Seen]:
        """Compute last-layer hidden states in `dtype`; for `capture` see `Encoder`."""
        return _encode(
            self.embeddings, self.encoder, tokens, segment_ids, type_ids, dtype, key, capture
        )


# config.recipe -> model class
MODELS = {"replaced_token": PretrainingModel, "masked_lm": MaskedLanguageModel}


def _initializers(config: Config) -> Initializers:
    m = config.model
    return initializers(m.initializers, m.initializer_range)


def _encode(embeddings, encoder, tokens, segment_ids, type_ids, dtype, key, capture=()):
    keys = (None, None) if key is None else jax.random.split(key)
    x = embeddings(tokens, segment_ids, type_ids, dtype=dtype, key=keys[0])
    return encoder(x, segment_ids, keys[1], capture)


def _pick(hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]) -> Float[Array, "B M C"]:
    # In float32: gradients of unused slots and repeated positions are summed.
    picked = jnp.take_along_axis(hidden.astype(jnp.float32), positions[..., None], axis=1)
    return picked.astype(hidden.dtype)
