"""Configs of layers, encoders and decoders for the model code, derived from the sections."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from convbert_jax.config.errors import ConfigError
from convbert_jax.config.mixers import (
    AttentionOptions,
    Mixer,
    MixerSettings,
    check_causal,
    make_mixer,
)
from convbert_jax.config.mixers import change as change_mixer
from convbert_jax.config.model import GeneratorSection, ModelSection, StageSection
from convbert_jax.config.sequences import SequenceSection

GATED = ("geglu", "gated_gelu", "swiglu")  # activations with a third dense layer, a gate
CANON_TAPS = 4
# Fields of config.model that config.model.NAMEs can set for each layer.
SCHEDULED = ("kernel_size", "dilation")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer: a token mixer and a feed-forward block. The defaults are those of BERT."""

    hidden_size: int
    mixer: Mixer
    ffn_size: int
    ffn_groups: int  # contiguous channel groups in both feed-forward matmuls (ConvBERT §3.3)
    dropout: float
    layer_norm_epsilon: float
    initializers: str
    initializer_range: float
    # The rest as in config.model.
    norm: str = "post"
    activation: str = "gelu"
    normalization: str = "layer"
    biases: bool = True
    activation_dropout: float = 0.0
    canon: str = ""
    convolution: str = "auto"  # implementation of the convolutions of `canon`
    mixer_norm: bool = True  # False: the input of a pre-norm layer is already normalized

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a third dense layer, a gate."""
        return self.activation in GATED

    @property
    def canon_widths(self) -> dict[str, Mapping[str, int]]:
        """Position in `canon` -> name of each input that is convolved there -> its channels."""
        units = ("intermediate", "gate") if self.gated else ("intermediate",)
        widths = {
            "A": {"mixer": self.hidden_size},
            "B": getattr(self.mixer, "canon_widths", {}),
            "C": {"feed_forward": self.hidden_size},
            "D": dict.fromkeys(units, self.ffn_size),
        }
        return {position: widths[position] for position in self.canon}


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """`depth` layers with stacked parameters, executed by one `lax.scan`.

    The layers repeat `pattern`. Its members have equal parameters and differ only in the window and
    rotary base of their attention.
    """

    depth: int
    pattern: tuple[LayerConfig, ...]

    @property
    def layer(self) -> LayerConfig:
        """The first layer."""
        return self.pattern[0]

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        return self.pattern * (self.depth // len(self.pattern))

    def map(self, change: Callable[[LayerConfig], LayerConfig]) -> "StageConfig":
        """Returns the stage with changed layers."""
        return dataclasses.replace(self, pattern=tuple(map(change, self.pattern)))


def group_layers(layers: Sequence[LayerConfig]) -> tuple[StageConfig, ...]:
    """Groups consecutive layers with equal parameters into stages with the shortest pattern."""
    stages = []
    for _, equal in itertools.groupby(layers, global_layer):
        run = tuple(equal)
        most = len(run)

        def repeats(period, run=run, most=most):
            whole = run[: most // period * period]
            return whole == run[:period] * (most // period)

        period = next((n for n in range(1, most // 2 + 1) if repeats(n)), most)
        repeated = most // period * period
        stages.append(StageConfig(repeated, run[:period]))
        if repeated < most:
            stages.append(StageConfig(most - repeated, run[repeated:]))
    return tuple(stages)


def global_layer(layer: LayerConfig) -> LayerConfig:
    """Returns the layer without window and rotary base, which have no parameters."""
    if not hasattr(layer.mixer, "options"):
        return layer
    options = dataclasses.replace(layer.mixer.options, window=0, rotary_base=0.0)
    return dataclasses.replace(layer, mixer=change_mixer(layer.mixer, options=options))


@dataclasses.dataclass(frozen=True)
class EmbeddingsConfig:
    """Token, position and segment-type embeddings with `size` channels."""

    vocab_size: int
    size: int
    positions: int  # rows of the learned position table
    types: int  # rows of the segment-type table; 0: none
    dropout: float
    layer_norm_epsilon: float
    # As in config.model.
    position_embedding: str = "learned"
    normalization: str = "layer"
    biases: bool = True
    norm: bool = True
    scaled: bool = False  # token embeddings times sqrt(size) (Vaswani et al. 2017)


class _Stages:
    """The layers of an encoder or a decoder, in order."""

    stages: tuple[StageConfig, ...]

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        return tuple(layer for stage in self.stages for layer in stage.layers)


@dataclasses.dataclass(frozen=True)
class EncoderConfig(_Stages):
    """An encoder: a projection of the embeddings if the sizes differ, then the stages in order."""

    embedding_size: int
    hidden_size: int
    stages: tuple[StageConfig, ...]
    remat: str
    scan_unroll: int
    initializers: str
    initializer_range: float
    last_dropout: float = 0.0  # after the final norm of pre-norm layers

    def with_mixers(self, **fields: object) -> "EncoderConfig":
        """Returns the encoder with changed fields in those mixers that have them.

        `convolution` also changes the implementation of the layers' `canon`.
        """
        of_canon = {name: fields[name] for name in {"convolution"} & fields.keys()}

        def change(layer):
            return dataclasses.replace(layer, mixer=change_mixer(layer.mixer, **fields), **of_canon)

        return dataclasses.replace(self, stages=tuple(stage.map(change) for stage in self.stages))

    @property
    def reads_padding(self) -> bool:
        """Whether padding or a following packed document changes the outputs of a document."""
        return any(stage.layer.mixer.reads_padding for stage in self.stages)

    @property
    def reads_whole_row(self) -> bool:
        """Whether some layer is global. Detected by FLOPs per token that grow with row length."""

        def price(length):
            return sum(layer.mixer.products(self.hidden_size, length) for layer in self.layers)

        return price(2_048) > price(1_024)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage with all fields resolved.

    Attributes:
      place: its name in errors: "config.model" if it is the only one, or "config.model.stages[1]".
      names: field of StageSection -> the config field that set it, as "config.model.heads".
    """

    place: str
    names: Mapping[str, str]
    sizes: StageSection


@dataclasses.dataclass(frozen=True)
class GeneratorSizes:
    """Sizes of a separate generator, by the rule of the official code for each stage.

    Hidden size and heads are multiplied by config.generator.size and rounded. The feed-forward size
    is four times the hidden size. The depth of each stage is multiplied by config.generator.layers
    (at least one layer). Mixer, head ratio, kernel size and groups are kept.
    """

    model: ModelSection
    generator: GeneratorSection

    @property
    def hidden_size(self) -> int:
        return round(self.model.hidden_size * self.generator.size)

    @property
    def embedding_size(self) -> int:
        tied = self.generator.tie_embeddings
        return self.model.embedding_size if tied else self.hidden_size

    def heads(self, stage: Stage) -> int:
        """Returns the nominal heads, which must divide the hidden size."""
        return max(1, int(stage.sizes.heads * self.generator.size + 1e-9))

    def depth(self, stage: Stage) -> int:
        return max(1, round(stage.sizes.layers * self.generator.layers))


def list_stages(model: ModelSection, names: Mapping[str, str] | None = None) -> list[Stage]:
    """Returns the stages of config.model, with missing fields filled in from config.model.

    Without config.model.stages, layers are grouped by kernel_sizes and dilations, else one stage.

    Args:
      names: `Stage.names` of fields that were set elsewhere than in config.model; only used without
        config.model.stages.
    """
    fields = [field.name for field in dataclasses.fields(StageSection)]
    flat = StageSection(**{name: getattr(model, name) for name in fields})
    of_model = {name: f"config.model.{name}" for name in fields}
    if not model.stages:
        of_schedule = {name: f"config.model.{name}s" for name in schedules(model)}
        all_names = of_model | of_schedule | dict(names or {})
        return [
            Stage("config.model", all_names, dataclasses.replace(flat, **part))
            for part in _cut(model)
        ]
    stages = []
    for i, section in enumerate(model.stages):
        place = f"config.model.stages[{i}]"
        given = {name for name in fields if getattr(section, name)}
        if section.mixer not in ("", model.mixer):
            given.add("mixer_fields")  # config.model.mixer_fields is for another mixer
        gaps = {name: getattr(flat, name) for name in fields if name not in given}
        names = of_model | {name: f"{place}.{name}" for name in given}
        stages.append(Stage(place, names, dataclasses.replace(section, **gaps)))
    return stages


def schedules(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Returns field of SCHEDULED -> its value for each layer, for fields that are set per layer."""
    found = zip(SCHEDULED, (model.kernel_sizes, model.dilations), strict=True)
    return {name: numbers for name, numbers in found if numbers}


def _cut(model: ModelSection) -> list[dict[str, int]]:
    """Groups consecutive layers with equal values into stages; returns the fields of each."""
    found = schedules(model)
    if not found:
        return [{}]
    layers = zip(*found.values(), strict=True)
    return [
        {"layers": len(list(equal)), **dict(zip(found, numbers, strict=True))}
        for numbers, equal in itertools.groupby(layers)
    ]


def derive_encoder(model: ModelSection, names: Mapping[str, str] | None = None) -> EncoderConfig:
    """Returns the config of the main encoder.

    Args:
      names: as in `list_stages`.

    Raises:
      ConfigError: a mixer is unknown or cannot be made.
    """
    layers = [(stage.sizes.layers, layer) for stage, layer in layers_of_stages(model, names)]
    return _encoder(model, model.embedding_size, model.hidden_size, layers)


def layers_of_stages(
    model: ModelSection, names: Mapping[str, str] | None = None
) -> list[tuple[Stage, LayerConfig]]:
    """Returns the stages of `list_stages`, each with a layer of global attention.

    Raises:
      ConfigError: as `derive_encoder`.
    """
    return [
        (
            stage,
            _layer(
                model,
                stage,
                hidden_size=model.hidden_size,
                heads=stage.sizes.heads,
                ffn_size=stage.sizes.ffn_size,
            ),
        )
        for stage in list_stages(model, names)
    ]


def derive_generator(model: ModelSection, section: GeneratorSection) -> EncoderConfig:
    """Returns the encoder of a separate generator, see `GeneratorSizes`.

    Raises:
      ConfigError: as `derive_encoder`.
    """
    sizes = GeneratorSizes(model, section)
    layers = [
        (
            sizes.depth(stage),
            _layer(
                model,
                stage,
                hidden_size=sizes.hidden_size,
                heads=sizes.heads(stage),
                ffn_size=4 * sizes.hidden_size,
                generator_size=section.size,
                release_heads=section.release_heads,
            ),
        )
        for stage in list_stages(model)
    ]
    encoder = _encoder(model, sizes.embedding_size, sizes.hidden_size, layers)
    return dataclasses.replace(encoder, scan_unroll=max(model.scan_unroll, section.scan_unroll))


def _layer(
    model: ModelSection, stage: Stage, *, hidden_size: int, heads: int, ffn_size: int, **generator
) -> LayerConfig:
    settings = MixerSettings(
        names=stage.names,
        mixer=stage.sizes.mixer,
        heads=heads,
        head_size=hidden_size // heads,
        head_ratio=stage.sizes.head_ratio,
        kernel_size=stage.sizes.kernel_size,
        dilation=stage.sizes.dilation,
        attention_dropout=model.attention_dropout,
        attention=model.attention,
        convolution=model.convolution,
        mask_convolution=model.mask_convolution,
        options=AttentionOptions(
            rotary_base=model.rotary_base * (model.position_embedding == "rotary"),
            qk_norm_epsilon=model.layer_norm_epsilon * model.qk_norm,
            key_value_heads=model.key_value_heads,
            biases=model.biases,
        ),
        **generator,
    )
    mixer = make_mixer(settings, stage.sizes.mixer_fields)
    if "B" in model.canon and not hasattr(mixer, "canon_widths"):
        raise ConfigError(
            f"has position B, but {stage.names['mixer']}={stage.sizes.mixer} has no queries, keys "
            "and values; leave out B.",
            field="config.model.canon",
            value=model.canon,
        )
    return LayerConfig(
        hidden_size=hidden_size,
        mixer=mixer,
        ffn_size=ffn_size,
        ffn_groups=stage.sizes.ffn_groups,
        dropout=model.dropout,
        layer_norm_epsilon=model.layer_norm_epsilon,
        initializers=model.initializers,
        initializer_range=model.initializer_range,
        norm=model.norm,
        activation=model.activation,
        normalization=model.normalization,
        biases=model.biases,
        activation_dropout=model.activation_dropout,
        canon=model.canon,
        convolution=model.convolution,
    )


def _encoder(
    model: ModelSection,
    embedding_size: int,
    hidden_size: int,
    layers: Sequence[tuple[int, LayerConfig]],
) -> EncoderConfig:
    """Returns an encoder with each layer as often as its number says."""
    normalized = model.norm == "pre" and model.embedding_norm and embedding_size == hidden_size
    stages, first = [], 0
    for depth, layer in layers:
        numbers = range(first, first + depth)
        stages += group_layers([_at(model, layer, number, normalized) for number in numbers])
        first += depth
    return EncoderConfig(
        embedding_size=embedding_size,
        hidden_size=hidden_size,
        stages=tuple(stages),
        remat=model.remat,
        scan_unroll=model.scan_unroll,
        initializers=model.initializers,
        initializer_range=model.initializer_range,
        last_dropout=model.last_dropout,
    )


def _at(model: ModelSection, layer: LayerConfig, number: int, normalized: bool) -> LayerConfig:
    """Returns the layer at a place of the encoder: local or global, and with a norm or without.

    Args:
      normalized: whether the input of layer 0 is normalized, which then needs no norm of its own
        (ModernBERT: Warner et al. 2024).
    """
    if normalized and number == 0:
        layer = dataclasses.replace(layer, mixer_norm=False)
    is_global = model.global_every and number % model.global_every == 0
    if not model.window or is_global or not hasattr(layer.mixer, "options"):
        return layer
    base = model.local_rotary_base * (model.position_embedding == "rotary")
    options = dataclasses.replace(layer.mixer.options, window=model.window, rotary_base=base)
    return dataclasses.replace(layer, mixer=change_mixer(layer.mixer, options=options))


def derive_embeddings(model: ModelSection, vocab_size: int, size: int) -> EmbeddingsConfig:
    """Returns the embeddings of an encoder, with `size` channels."""
    return EmbeddingsConfig(
        vocab_size=vocab_size,
        size=size,
        positions=model.positions,
        types=model.types,
        dropout=model.dropout,
        layer_norm_epsilon=model.layer_norm_epsilon,
        position_embedding=model.position_embedding,
        normalization=model.normalization,
        biases=model.biases,
        norm=model.embedding_norm,
    )


@dataclasses.dataclass(frozen=True)
class DecoderConfig(_Stages):
    """Stages of causal layers, with cross-attention after each mixer if `source` is given."""

    hidden_size: int
    stages: tuple[StageConfig, ...]
    source: Mixer | None  # cross-attention, described by the mixer `attention`
    last_norm: bool  # final norm after pre-norm layers
    last_dropout: float  # after the final norm
    remat: str
    scan_unroll: int


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder-only model."""

    tokens: EmbeddingsConfig
    decoder: DecoderConfig
    tied_output: bool


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder-decoder; `source` equals `target` if they share vocabulary and embeddings."""

    source: EmbeddingsConfig
    target: EmbeddingsConfig
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
    model = dataclasses.replace(model, embedding_norm=False)
    return LanguageModelConfig(
        tokens=_tokens(model, vocab_size),
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
    model = dataclasses.replace(model, embedding_norm=False)
    encoder = derive_encoder(model)
    return EncoderDecoderConfig(
        source=_tokens(model, source_vocab),
        target=_tokens(model, target_vocab),
        encoder=dataclasses.replace(encoder, stages=_stages(encoder)),
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


def idle_fields(model: ModelSection, decoder: SequenceSection | None = None) -> list[str]:
    """Returns the fields of config.model without effect.

    A field has no effect if every stage overrides it or has a mixer that does not use it.
    head_ratio and dilation, which few mixers use, are listed only if they differ from the default.
    Cross-attention uses `heads`; a decoder has separate kernel_sizes and dilations.

    Args:
      decoder: config.sequence of an encoder-decoder.

    Raises:
      ConfigError: a mixer is unknown or cannot be made.
    """
    idle = _idle_fields(model)
    if decoder is None:
        return idle
    of_decoder = dataclasses.replace(model, **decoder_fields(model, decoder))
    also = {*_idle_fields(of_decoder, _decoder_names(decoder)), "kernel_sizes", "dilations"}
    return [name for name in idle if name in also - {"heads"}]


def _idle_fields(model: ModelSection, names: Mapping[str, str] | None = None) -> list[str]:
    def is_idle(name: str, stage: Stage, layer: LayerConfig) -> bool:
        if getattr(stage.sizes, name) != getattr(model, name):
            return True
        of_mixer = name in ("heads", "head_ratio", *SCHEDULED)
        return of_mixer and name not in layer.mixer.fields(layer.hidden_size)

    pairs = layers_of_stages(model, names)
    layers = [layer for _, layer in pairs]
    of_few, default = ("head_ratio", "dilation"), ModelSection()
    asked = tuple(name for name in of_few if getattr(model, name) != getattr(default, name))
    fields = ("heads", *asked, "mixer", "kernel_size", "ffn_size", "ffn_groups")
    idle = [name for name in fields if all(is_idle(name, *pair) for pair in pairs)]
    read = {name for layer in layers for name in layer.mixer.fields(layer.hidden_size)}
    return idle + [f"{name}s" for name in schedules(model) if name not in read]


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


def _tokens(model: ModelSection, vocab_size: int) -> EmbeddingsConfig:
    if model.embedding_size != model.hidden_size:
        raise ConfigError(
            f"must equal config.model.hidden_size={model.hidden_size} in a generative model.",
            field="config.model.embedding_size",
            value=model.embedding_size,
        )
    embeddings = derive_embeddings(model, vocab_size, model.hidden_size)
    return dataclasses.replace(embeddings, types=0, scaled=True)


def _decoder(
    model: ModelSection,
    sequence: SequenceSection,
    source: Mixer | None,
    names: Mapping[str, str] | None = None,
) -> DecoderConfig:
    encoder = derive_encoder(model, names)
    for stage, layer in layers_of_stages(model, names):
        check_causal(layer.mixer, f"{stage.names['mixer']}={stage.sizes.mixer}")
    return DecoderConfig(
        hidden_size=encoder.hidden_size,
        stages=_stages(encoder),
        source=source,
        last_norm=sequence.last_norm and model.norm == "pre",
        last_dropout=model.last_dropout,
        remat=encoder.remat,
        scan_unroll=encoder.scan_unroll,
    )


def _stages(encoder: EncoderConfig) -> tuple[StageConfig, ...]:
    """Returns the stages of an encoder with the initializers of generative models."""
    return tuple(
        stage.map(lambda layer: dataclasses.replace(layer, initializers="glorot"))
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
        options=AttentionOptions(biases=model.biases),
    )
    return make_mixer(settings, ())
