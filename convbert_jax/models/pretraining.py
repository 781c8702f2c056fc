"""Models to pre-train: generator and discriminator around one embedding table, or one network."""

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
    """What a student's states go through before they are compared with those of a wider teacher
    (TinyBERT §3.1, W_h and W_e): one dense for all layers, one for the embeddings.
    """

    def __init__(self, config: Config, starts: Initializers, rngs: nnx.Rngs):
        for name, (ours, theirs) in config.projections.items():
            setattr(self, name, Dense(ours, theirs, starts.glorot, rngs))

    def __call__(self, name: str, x: Float[Array, "B L C"]) -> Float[Array, "B L C_teacher"]:
        """`x` itself where the teacher is as wide."""
        return getattr(self, name)(x) if hasattr(self, name) else x


class PretrainingModel(nnx.Module):
    """Replaced-token detection (ELECTRA §2), with every choice of config.generator.

    separate: a generator of its own, on the discriminator's embeddings or (untied) on its own.
    shared: the discriminator's encoder with a second head. uniform: no generator parameters.
    With config.generator.disentangle_embeddings `embeddings` are the generator's, and the encoder's
    are these plus `own_embeddings`. With config.objective.masked_lm_steps the discriminator's
    encoder has a second head of its own, for the masked words that it predicts before that.
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
        """Float32 logits of the generator at `positions`, each an index into its row.

        Args:
          tokens: with masks in place.
          segment_ids: 0 is padding; nothing flows from one segment to another.
          type_ids: first or second text of a pair.
          dtype: of the computation; parameters and logits are float32.
          key: draws dropout; None is deterministic.
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
        """Float32 logit for each token, above 0 where it looks replaced."""
        return self.detect(self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=key))

    def detect(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B L"]:
        """What `discriminate` gives, of the hidden states that `encode` gives."""
        return self.discriminator_head(hidden)

    def predict(
        self, hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """Float32 logits of the discriminator's encoder for the words at `positions`, of the hidden
        states that `encode` gives; only with config.objective.masked_lm_steps.
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
        """What the discriminator's encoder reads, without dropout."""
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
        """Hidden states of the discriminator's last layer, in `dtype`; with `capture` also what its
        layers saw, as `Encoder` hands it out.
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
        """Those of the discriminator."""
        if self.config.generator.disentangle_embeddings:
            return add(self.embeddings, self.own_embeddings)
        return self.embeddings


class MaskedLanguageModel(nnx.Module):
    """One encoder with a masked language head (BERT §3.1), and with config.objective.sentence_pairs
    one for pairs.
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
        """Float32 logits at `positions`; arguments as `PretrainingModel.generate`."""
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
        """What `generate` gives, and the float32 logits of each row's pair: follows, does not."""
        hidden = self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=key)
        return self.predict(hidden, positions), self.judge(hidden)

    def predict(
        self, hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """What `generate` gives, of the hidden states that `encode` gives."""
        return self.head(_pick(hidden, positions), self.embeddings)

    def judge(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B 2"]:
        """Float32 logits of each row's pair; only with config.objective.sentence_pairs."""
        return self.pair_head(hidden)

    def embed(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
    ) -> Float[Array, "B L E"]:
        """What the encoder reads, without dropout."""
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
        """Hidden states of the last layer, in `dtype`; `capture` as in `Encoder`."""
        return _encode(
            self.embeddings, self.encoder, tokens, segment_ids, type_ids, dtype, key, capture
        )


# config.recipe -> the model that it trains
MODELS = {"replaced_token": PretrainingModel, "masked_lm": MaskedLanguageModel}


def _initializers(config: Config) -> Initializers:
    m = config.model
    return initializers(m.initializers, m.initializer_range)


def _encode(embeddings, encoder, tokens, segment_ids, type_ids, dtype, key, capture=()):
    keys = (None, None) if key is None else jax.random.split(key)
    x = embeddings(tokens, segment_ids, type_ids, dtype=dtype, key=keys[0])
    return encoder(x, segment_ids, keys[1], capture)


def _pick(hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]) -> Float[Array, "B M C"]:
    # In float32, as unused slots and positions drawn twice add up their gradients.
    picked = jnp.take_along_axis(hidden.astype(jnp.float32), positions[..., None], axis=1)
    return picked.astype(hidden.dtype)
