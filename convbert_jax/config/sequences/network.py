"""Configs of generative models for the model code, derived from the config sections."""

import dataclasses
from collections.abc import Mapping

from convbert_jax.config import network
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.mixers import Mixer, MixerSettings, check_causal, make_mixer
from convbert_jax.config.network import EncoderConfig, StageConfig, derive_encoder, list_stages
from convbert_jax.config.sections import ModelSection
from convbert_jax.config.sequences.sections import SequenceSection


@dataclasses.dataclass(frozen=True)
class TokensConfig:
    """Token and position embeddings with `size` channels."""

    vocab_size: int
    size: int
    positions: str  # a value of sections.POSITIONS
    rows: int  # of the learned position table
    dropout: float


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Stages of causal layers, with cross-attention after each mixer if `source` is given."""

    hidden_size: int
    stages: tuple[StageConfig, ...]
    source: Mixer | None  # cross-attention, described by the mixer `attention`
    last_norm: bool  # final norm after pre-norm layers
    last_dropout: float  # after the final norm
    remat: str
    scan_unroll: int

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder-only model."""

    tokens: TokensConfig
    decoder: DecoderConfig
    tied_output: bool


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder-decoder; `source` equals `target` if they share vocabulary and embeddings."""

    source: TokensConfig
    target: TokensConfig
    encoder: EncoderConfig
    decoder: DecoderConfig
    shared_vocabulary: bool
    tied_output: bool


def derive_language_model(
    model: ModelSection, sequence: SequenceSection, vocab_size: int
) -> LanguageModelConfig:
    """Returns the decoder-only model that config.model describes.

    Raises:
      ConfigError: a mixer is unknown, invalid or not causal, or the embeddings and layers have
        different widths.
    """
    return LanguageModelConfig(
        tokens=_tokens(model, sequence, vocab_size),
        decoder=_decoder(model, sequence, source=None),
        tied_output=sequence.tied_output,
    )


def derive_encoder_decoder(
    model: ModelSection, sequence: SequenceSection, source_vocab: int, target_vocab: int
) -> EncoderDecoderConfig:
    """Returns the encoder of config.model, with the decoder of config.model and config.sequence.

    Raises:
      ConfigError: as `derive_language_model`, or a shared vocabulary has two sizes.
    """
    if sequence.shared_vocabulary and source_vocab != target_vocab:
        raise ConfigError(
            f"needs equal vocabulary sizes, but the source has {source_vocab} and the target "
            f"{target_vocab}; make them equal, or set config.sequence.shared_vocabulary=False.",
            field="config.sequence.shared_vocabulary",
            value=True,
        )
    encoder = derive_encoder(model)
    return EncoderDecoderConfig(
        source=_tokens(model, sequence, source_vocab),
        target=_tokens(model, sequence, target_vocab),
        encoder=dataclasses.replace(
            encoder, stages=_stages(encoder, sequence), last_dropout=sequence.last_dropout
        ),
        decoder=_decoder(
            dataclasses.replace(model, **decoder_fields(model, sequence)),
            sequence,
            source=_source_attention(model),
            names=_decoder_names(sequence),
        ),
        shared_vocabulary=sequence.shared_vocabulary,
        tied_output=sequence.tied_output,
    )


def decoder_fields(model: ModelSection, sequence: SequenceSection) -> dict[str, object]:
    """Returns the fields of config.model with the values of the decoder."""
    other = sequence.decoder_mixer not in ("", model.mixer)
    own_fields = sequence.decoder_mixer_fields
    return {
        "layers": sequence.decoder_layers or model.layers,
        "mixer": sequence.decoder_mixer or model.mixer,
        "mixer_fields": own_fields if other else own_fields or model.mixer_fields,
        "kernel_sizes": sequence.decoder_kernel_sizes,
        "dilations": sequence.decoder_dilations,
        "stages": (),
    }


def idle_fields(model: ModelSection, sequence: SequenceSection) -> list[str]:
    """Returns the fields of config.model without effect on encoder and decoder.

    Cross-attention uses `heads`; the decoder has separate kernel_sizes and dilations.
    """
    decoder = dataclasses.replace(model, **decoder_fields(model, sequence))
    idle = {*network.idle_fields(decoder, _decoder_names(sequence)), "kernel_sizes", "dilations"}
    return [name for name in network.idle_fields(model) if name in idle - {"heads"}]


def _decoder_names(sequence: SequenceSection) -> dict[str, str]:
    """Returns field of `decoder_fields` -> the field of config.sequence that sets it."""
    of_sequence = {
        "mixer": "decoder_mixer",
        "mixer_fields": "decoder_mixer_fields",
        "kernel_size": "decoder_kernel_sizes",
        "dilation": "decoder_dilations",
    }
    return {
        name: f"config.sequence.{field}"
        for name, field in of_sequence.items()
        if getattr(sequence, field)
    }


def _tokens(model: ModelSection, sequence: SequenceSection, vocab_size: int) -> TokensConfig:
    if model.embedding_size != model.hidden_size:
        raise ConfigError(
            f"must equal config.model.hidden_size={model.hidden_size} in a generative model.",
            field="config.model.embedding_size",
            value=model.embedding_size,
        )
    return TokensConfig(
        vocab_size=vocab_size,
        size=model.hidden_size,
        positions=sequence.positions,
        rows=model.positions,
        dropout=model.dropout,
    )


def _decoder(
    model: ModelSection,
    sequence: SequenceSection,
    source: Mixer | None,
    names: Mapping[str, str] | None = None,
) -> DecoderConfig:
    encoder = derive_encoder(model, names)
    for stage, made in zip(list_stages(model, names), encoder.stages, strict=True):
        check_causal(made.layer.mixer, f"{stage.names['mixer']}={stage.sizes.mixer}")
    return DecoderConfig(
        hidden_size=encoder.hidden_size,
        stages=_stages(encoder, sequence),
        source=source,
        last_norm=sequence.last_norm and sequence.norm == "pre",
        last_dropout=sequence.last_dropout,
        remat=encoder.remat,
        scan_unroll=encoder.scan_unroll,
    )


def _stages(encoder: EncoderConfig, sequence: SequenceSection) -> tuple[StageConfig, ...]:
    """Returns the stages of an encoder with norm, activation and initializers of `sequence`."""
    forms = {
        "norm": sequence.norm,
        "normalization": sequence.normalization,
        "activation": sequence.activation,
        "activation_dropout": sequence.activation_dropout,
        "biases": sequence.biases,
        "initializers": "glorot",
    }
    return tuple(
        dataclasses.replace(stage, layer=dataclasses.replace(stage.layer, **forms))
        for stage in encoder.stages
    )


def _source_attention(model: ModelSection) -> Mixer:
    """Creates the cross-attention, with all heads of config.model."""
    settings = MixerSettings(
        names={
            name: f"config.model.{name}"
            for name in ("heads", "head_ratio", "mixer", "mixer_fields")
        },
        mixer="attention",
        heads=model.heads,
        head_size=model.hidden_size // model.heads,
        head_ratio=2,
        kernel_size=model.kernel_size,
        dilation=model.dilation,
        attention_dropout=model.attention_dropout,
        attention=model.attention,
        convolution=model.convolution,
        mask_convolution=model.mask_convolution,
    )
    return make_mixer(settings, ())
