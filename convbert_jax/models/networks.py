"""Complete networks: embeddings, encoder or decoder, and heads or output logits.

Pre-training has replaced-token detection (`PretrainingModel`) and masked language modeling,
fine-tuning an encoder with one task head. Generative networks process whole rows for training, and
one position at a time for decoding, with the same logits:

    state, read = model.start(source, source_ids, copies=4, length=64)
    logits, state = model.step(tokens, state, place, read)  # place 0, then 1, ...
"""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config, EmbeddingsConfig, EncoderConfig
from convbert_jax.config.network import EncoderDecoderConfig, LanguageModelConfig
from convbert_jax.interfaces import REPLICATED, Rules
from convbert_jax.models.decoder import DecodeContext, Decoder
from convbert_jax.models.embeddings import Embed, Embeddings, add, output_logits
from convbert_jax.models.encoder import Encoder, Seen
from convbert_jax.models.heads import (
    DiscriminatorHead,
    MaskedLanguageHead,
    PairHead,
    SequenceHead,
    SpanBeamHead,
    TokenHead,
)
from convbert_jax.models.layers import Dense, Initializers, State, dropout, initializers
from convbert_jax.models.mixers.attention import Attention

# --- Encoders ---


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


class _EncoderModel(nnx.Module):
    """A network with one main encoder."""

    def _main(self) -> tuple[Embeddings, Encoder]:
        """Return the input embeddings and the main encoder."""
        return self.embeddings, self.encoder

    def embed(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
    ) -> Float[Array, "B L E"]:
        """Return the input embeddings of the encoder, without dropout."""
        embeddings, _ = self._main()
        return embeddings(tokens, segment_ids, type_ids, dtype=dtype)

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
        """Compute last-layer hidden states in `dtype`.

        Args:
          segment_ids: 0 marks padding; positions of different segments do not interact.
          type_ids: First or second text of a pair.
          key: Dropout key; None is deterministic.
          capture: With names, also return the captured activations, see `Encoder`.
        """
        return _encode(*self._main(), tokens, segment_ids, type_ids, dtype, key, capture)


class PretrainingModel(_EncoderModel):
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

    @staticmethod
    def parts(config: Config) -> dict[str, dict[str, str]]:
        """Return network -> {part of the network: its path in the parameters}, for `interop`."""
        main = {
            "embeddings": "embeddings",
            "encoder": "discriminator",
            "rtd_head": "discriminator_head",
        }
        kind = config.generator.kind
        if kind == "uniform":
            return {"main": main}
        untied = kind == "separate" and not config.generator.tie_embeddings
        generator = {
            "embeddings": "generator_embeddings" if untied else "embeddings",
            "encoder": "generator" if kind == "separate" else "discriminator",
            "mlm_head": "generator_head",
        }
        return {"main": main, "generator": generator}

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

    def _main(self) -> tuple[Embeddings, Encoder]:
        return self._read_embeddings(), self.discriminator

    def _read_embeddings(self) -> Embeddings:
        """Return the embeddings of the discriminator."""
        if self.config.generator.disentangle_embeddings:
            return add(self.embeddings, self.own_embeddings)
        return self.embeddings


class MaskedLanguageModel(_EncoderModel):
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

    @staticmethod
    def parts(config: Config) -> dict[str, dict[str, str]]:
        """Return the parts of the main network; see `PretrainingModel.parts`."""
        main = {"embeddings": "embeddings", "encoder": "encoder", "mlm_head": "head"}
        pairs = config.objective.sentence_pairs != "none"
        return {"main": main | ({"pair_head": "pair_head"} if pairs else {})}

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

    def predict(
        self, hidden: Float[Array, "B L C"], positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """Return the logits of `generate` from the hidden states of `encode`."""
        return self.head(_pick(hidden, positions), self.embeddings)

    def judge(self, hidden: Float[Array, "B L C"]) -> Float[Array, "B 2"]:
        """Return float32 pair logits; requires config.objective.sentence_pairs."""
        return self.pair_head(hidden)


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


class EmbeddingModel(_EncoderModel):
    """Embeddings and encoder without a head, for vectors of texts."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config.embeddings, _initializers(config).dense, rngs)
        self.encoder = Encoder(config.encoder, rngs)

    @staticmethod
    def parts(config: Config) -> dict[str, dict[str, str]]:
        """Return the parts of the main network; see `PretrainingModel.parts`."""
        return {"main": {"embeddings": "embeddings", "encoder": "encoder"}}


# --- Fine-tuning ---


class FinetunedModel(_EncoderModel):
    """Embeddings, encoder and the head named by `config.outputs.head`.

    Parameters are under `embeddings/`, `encoder/` and `head/`.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        m = config.model
        starts = _initializers(config)
        self.embeddings = Embeddings(config.embeddings, starts.dense, rngs)
        self.encoder = Encoder(config.encoder, rngs)
        self.head = HEADS[config.outputs.head](config, starts, rngs)
        self.kind = config.outputs.head
        self.dropout = m.dropout

    @staticmethod
    def parts(config: Config) -> dict[str, dict[str, str]]:
        """Return the parts of the main network; see `PretrainingModel.parts`."""
        head = f"{config.outputs.head}_head"
        return {"main": {"embeddings": "embeddings", "encoder": "encoder", head: "head"}}

    def classify(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        type_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B ..."]:
        """Compute float32 logits, [B, labels] per text or [B, L, labels] with head "token".

        Args:
          key: Dropout key, used before the head too; None is deterministic.
        """
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        hidden = self.encode(tokens, segment_ids, type_ids, dtype=dtype, key=keys[0])
        if self.kind == "first_and_mean":
            hidden = jnp.concatenate([hidden[:, :1], _mean(hidden, segment_ids)], -1)
        elif self.kind != "token":
            hidden = hidden[:, :1]
        hidden = dropout(hidden, self.dropout, keys[1])
        if self.kind in ("sequence", "first_and_mean"):
            return self.head(hidden, self.dropout, keys[2])
        logits = self.head(hidden)
        return logits if self.kind == "token" else logits[:, 0]


def _mean(hidden, segment_ids):
    """Average the hidden states of each row, without padding: [B, L, C] -> [B, 1, C]."""
    real = (segment_ids > 0)[..., None].astype(jnp.float32)
    total = (hidden.astype(jnp.float32) * real).sum(1, keepdims=True)
    return (total / jnp.maximum(real.sum(1, keepdims=True), 1.0)).astype(hidden.dtype)


def _sequence_head(config: Config, starts, rngs) -> SequenceHead:
    return SequenceHead(config.encoder.hidden_size, len(config.outputs.labels), starts, rngs)


def _first_and_mean_head(config: Config, starts, rngs) -> SequenceHead:
    size = config.encoder.hidden_size
    return SequenceHead(size, len(config.outputs.labels), starts, rngs, inputs=2 * size)


def _token_head(config: Config, starts, rngs) -> TokenHead:
    return TokenHead(config.encoder.hidden_size, len(config.outputs.labels), starts, rngs)


def _release_head(config: Config, starts, rngs) -> TokenHead:
    """One dense layer with TensorFlow's default Glorot initializer, as in the official code."""
    return _token_head(config, dataclasses.replace(starts, dense=starts.glorot), rngs)


def _span_beam_head(config: Config, starts, rngs) -> SpanBeamHead:
    return SpanBeamHead(config.encoder.hidden_size, starts, rngs)


# config.outputs.head -> (config, initializers, rngs) -> the module
HEADS = {
    "sequence": _sequence_head,
    "first_and_mean": _first_and_mean_head,
    "first_token": _release_head,
    "token": _token_head,
    "span": _token_head,
    "span_beam": _span_beam_head,
}


# --- Generation ---


class _Generative(nnx.Module):
    """A network with a decoder, its embeddings `target` and an output table."""

    def _add_output(self, config, tokens, rngs: nnx.Rngs):
        if not config.tied_output:
            self.output = Embed(tokens.vocab_size, tokens.size, _normal(tokens), rngs)
        self.config = config

    def step(
        self,
        tokens: Int[Array, " R"],
        state: tuple[State, ...],
        place: Int[Array, ""],
        read: DecodeContext,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[Float[Array, "R V"], tuple[State, ...]]:
        """Return logits of the token after the one at `place`, and the state after it."""
        # Position within each row's own text.
        places = place - jnp.repeat(read.first, len(tokens) // len(read.first))
        x = self.target.at(tokens, places, dtype)
        x, state = self.decoder.step(x, state, places, read)
        return self._logits(x)[:, 0], state

    def _logits(self, x):
        return output_logits(x, self.target.word if self.config.tied_output else self.output)


def _normal(tokens: EmbeddingsConfig) -> nnx.Initializer:
    return nnx.initializers.normal(tokens.size**-0.5)


class LanguageModel(_Generative):
    """Decoder-only language model: each position predicts the next token."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs):
        self.target = Embeddings(config.tokens, _normal(config.tokens), rngs)
        self.decoder = Decoder(config.decoder, rngs)
        self._add_output(config, config.tokens, rngs)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L V"]:
        """Return float32 logits of the token after each position.

        Args:
          segment_ids: 0 marks padding; positions of different segments do not interact.
          dtype: Compute dtype; parameters and logits are float32.
          key: Dropout key; None is deterministic.
        """
        keys = [None] * 2 if key is None else jax.random.split(key)
        x = self.target(tokens, segment_ids, dtype=dtype, key=keys[0])
        return self._logits(self.decoder(x, segment_ids, key=keys[1]))

    def start(
        self,
        prompt: Int[Array, "B P"],
        first: Int[Array, " B"] | None = None,
        *,
        copies: int,
        length: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[tuple[State, ...], DecodeContext]:
        """Process all but the last token of each prompt, and prepare decoding.

        The first step is then the prompt's last token, at place P - 1.

        Args:
          prompt: At least one token per row; every row ends at place P - 1.
          first: Index of each row's first token; earlier places are padding. None means 0.
          copies: Number of adjacent rows that continue each prompt, such as beams.
          length: Maximum number of places. With learned positions, a text is limited to as many
            tokens as there are positions, wherever it begins.

        Returns:
          The decoding state, and the constant inputs of the steps.

        Raises:
          ValueError: The prompt and one more token exceed the position embedding matrix.
        """
        self.target.check_length(prompt.shape[1] + 1)
        first = jnp.zeros(len(prompt), jnp.int32) if first is None else first
        read, before = self.decoder.read(first), prompt[:, :-1]
        if not before.shape[1]:
            return self.decoder.start(len(prompt) * copies, length, dtype, copies), read
        segment_ids = (jnp.arange(before.shape[1]) >= first[:, None]).astype(jnp.int32)
        x = self.target(before, segment_ids, dtype=dtype)
        return self.decoder.prefill(x, segment_ids, length, copies), read


class EncoderDecoder(_Generative):
    """Encoder-decoder; with a shared vocabulary, `target` embeds the source too."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs):
        self.target = Embeddings(config.target, _normal(config.target), rngs)
        if not config.shared_vocabulary:
            self.source = Embeddings(config.source, _normal(config.source), rngs)
        self.encoder = Encoder(config.encoder, rngs)
        self.decoder = Decoder(config.decoder, rngs)
        self._add_output(config, config.target, rngs)

    def __call__(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L V"]:
        """Return float32 logits of the token after each target position.

        Args:
          source_ids, segment_ids: 0 marks padding. A target segment attends to the source segment
            with the same id, so pairs can be packed.
          dtype, key: As in `LanguageModel`.
        """
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        encoded = self.encode(source, source_ids, dtype=dtype, key=keys[0])
        x = self.target(tokens, segment_ids, dtype=dtype, key=keys[1])
        return self._logits(self.decoder(x, segment_ids, encoded, source_ids, keys[2]))

    def encode(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B S C"]:
        """Compute the hidden states of the encoder's last layer."""
        keys = [None] * 2 if key is None else jax.random.split(key)
        table = self.target if self.config.shared_vocabulary else self.source
        x = table(source, source_ids, dtype=dtype, key=keys[0])
        return self.encoder(x, source_ids, keys[1])

    def start(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        *,
        copies: int,
        length: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[tuple[State, ...], DecodeContext]:
        """Encode the source, and prepare decoding of at most `length` tokens.

        Args:
          source_ids: 1 for tokens, 0 for padding; one text per row.
          copies: Number of adjacent target rows per source row, such as beams.

        Returns:
          The decoding state, and the constant inputs of the steps.

        Raises:
          ValueError: Source or target exceed the position embedding matrix.
        """
        self.target.check_length(length)
        encoded = self.encode(source, source_ids, dtype=dtype)
        state = self.decoder.start(len(source) * copies, length, dtype, copies)
        first = jnp.zeros(len(source), jnp.int32)
        return state, self.decoder.read(first, encoded, source_ids)


def _make_encoder_decoder(config: Config, rngs: nnx.Rngs) -> EncoderDecoder:
    return EncoderDecoder(config.encoder_decoder, rngs)


def _make_language_model(config: Config, rngs: nnx.Rngs) -> LanguageModel:
    return LanguageModel(config.language_model, rngs)


# config.recipe -> class or function that makes the model from (config, rngs)
MODELS = {
    "replaced_token": PretrainingModel,
    "masked_lm": MaskedLanguageModel,
    "finetune": FinetunedModel,
    "embedding": EmbeddingModel,
    "causal_lm": _make_language_model,
    **dict.fromkeys(
        ("span_corruption", "translation", "summarization", "text_to_text"), _make_encoder_decoder
    ),
}


def sharding_rules(config: EncoderConfig | EncoderDecoderConfig | LanguageModelConfig) -> Rules:
    """Return the partition rules of layers; put them before `training.partitioning.RULES`.

    The rules of an encoder also fit its generator, whose stages have the same mixers.
    """
    filters = (r"(^|/)stages/.*/depthwise$", REPLICATED)
    if isinstance(config, EncoderConfig):
        rules = [
            (rf"(^|/)stages/{i}/mixer/{pattern}$", split)
            for i, stage in enumerate(config.stages)
            for pattern, split in stage.layer.mixer.RULES
        ]
        return (*rules, filters)
    parts = [("decoder", config.decoder.stages)]
    if isinstance(config, EncoderDecoderConfig):
        parts.append(("encoder", config.encoder.stages))
    rules = [
        (rf"(^|/){part}/stages/{i}/mixer/{pattern}$", split)
        for part, stages in parts
        for i, stage in enumerate(stages)
        for pattern, split in stage.layer.mixer.RULES
    ]
    of_source = [
        (rf"(^|/)stages/[^/]+/source/{pattern}$", split) for pattern, split in Attention.RULES
    ]
    return (*rules, *of_source, filters)
