"""What the model code is built from, and how it follows from the sections: a config of layers,
stages and encoders that no user writes.
"""

import dataclasses
import itertools
from collections.abc import Mapping

from convbert_jax.config.mixers import Mixer, MixerSettings, make_mixer
from convbert_jax.config.sections import GeneratorSection, ModelSection, StageSection

# Fields of config.model that may be a schedule, one number for each layer, in config.model.NAMEs.
SCHEDULED = ("kernel_size", "dilation")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer: a token mixer and a feed-forward block, in the form of the encoders of BERT unless
    something else is said.
    """

    hidden_size: int
    mixer: Mixer
    ffn_size: int
    ffn_groups: int  # contiguous channel groups in both feed-forward matmuls (ConvBERT §3.3)
    dropout: float
    layer_norm_epsilon: float
    initializers: str
    initializer_range: float
    norm: str = "post"  # layer norm behind each residual sum, or "pre", before what is added
    # in the feed-forward block, or another of sequences.sections.ACTIVATIONS
    activation: str = "gelu"
    normalization: str = "layer"  # or "rms"
    biases: bool = True  # of feed-forward blocks, and in a decoder of the attention to the source
    activation_dropout: float = 0.0  # inside of feed-forward blocks

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a third dense layer, a gate."""
        return self.activation.startswith("gated_")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """`depth` identical layers, their parameters stacked and run by one `lax.scan`."""

    depth: int
    layer: LayerConfig


@dataclasses.dataclass(frozen=True)
class EmbeddingsConfig:
    """Word + position + segment-type tables and their layer norm, at `size` channels."""

    vocab_size: int
    size: int
    positions: int
    types: int
    dropout: float
    layer_norm_epsilon: float


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """After the embeddings: a projection if the sizes differ, then the stages in order."""

    embedding_size: int
    hidden_size: int
    stages: tuple[StageConfig, ...]
    remat: str
    scan_unroll: int
    initializers: str
    initializer_range: float
    last_dropout: float = 0.0  # behind the last norm of layers of pre-norm

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)

    @property
    def reads_padding(self) -> bool:
        """Whether padding, or a document packed behind, changes the outputs of real tokens."""
        return any(stage.layer.mixer.reads_padding for stage in self.stages)

    @property
    def reads_whole_row(self) -> bool:
        """Whether some layer shows every token all others: a token then costs more in a longer row,
        where a convolution's price stays.
        """

        def price(length):
            return sum(s.layer.mixer.products(self.hidden_size, length) for s in self.stages)

        return price(2_048) > price(1_024)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage with nothing left out.

    Attributes:
      place: what an error calls it: "config.model", the only one, or "config.model.stages[1]".
      names: field of StageSection -> where it was set, "config.model.heads" for one.
    """

    place: str
    names: Mapping[str, str]
    sizes: StageSection


@dataclasses.dataclass(frozen=True)
class GeneratorSizes:
    """Those of a generator of its own: the release's rule, for each stage.

    Hidden size and heads are cut by config.generator.size and rounded, the feed-forward is four
    times the hidden size, every stage is config.generator.layers as deep, at least one layer.
    Mixer, head ratio, kernel size and groups stay.
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
        """Nominal heads, which must divide the hidden size."""
        return max(1, int(stage.sizes.heads * self.generator.size + 1e-9))

    def depth(self, stage: Stage) -> int:
        return max(1, round(stage.sizes.layers * self.generator.layers))


def list_stages(model: ModelSection, names: Mapping[str, str] | None = None) -> list[Stage]:
    """Those of config.model.stages, where the other fields of config.model fill the gaps; without
    any those of its schedules, or the one that these fields describe.

    Args:
      names: of fields without stages that were not set in config.model, see `Stage`.
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
            given.add("mixer_fields")  # those of config.model are of another mixer
        gaps = {name: getattr(flat, name) for name in fields if name not in given}
        names = of_model | {name: f"{place}.{name}" for name in given}
        stages.append(Stage(place, names, dataclasses.replace(section, **gaps)))
    return stages


def schedules(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Field of SCHEDULED -> its number for each layer, where layers have not all the same."""
    found = zip(SCHEDULED, (model.kernel_sizes, model.dilations), strict=True)
    return {name: numbers for name, numbers in found if numbers}


def _cut(model: ModelSection) -> list[dict[str, int]]:
    """Fields of the stages that schedules make: as many layers in a row as have equal numbers."""
    found = schedules(model)
    if not found:
        return [{}]
    layers = zip(*found.values(), strict=True)
    return [
        {"layers": len(list(equal)), **dict(zip(found, numbers, strict=True))}
        for numbers, equal in itertools.groupby(layers)
    ]


def idle_fields(model: ModelSection, names: Mapping[str, str] | None = None) -> list[str]:
    """Fields of config.model without effect: each stage has another value, or its mixer reads none.
    Of one that only few mixers read, no word if nothing was asked for.

    Args:
      names: as `list_stages` takes them.

    Raises:
      ConfigError: a mixer is unknown or cannot be made.
    """

    def is_idle(name: str, stage: Stage, layer: LayerConfig) -> bool:
        if getattr(stage.sizes, name) != getattr(model, name):
            return True
        of_mixer = name in ("heads", "head_ratio", *SCHEDULED)
        return of_mixer and name not in layer.mixer.fields(layer.hidden_size)

    layers = [stage.layer for stage in derive_encoder(model, names).stages]
    pairs = list(zip(list_stages(model), layers, strict=True))
    of_few, default = ("head_ratio", "dilation"), ModelSection()
    asked = tuple(name for name in of_few if getattr(model, name) != getattr(default, name))
    fields = ("heads", *asked, "mixer", "kernel_size", "ffn_size", "ffn_groups")
    idle = [name for name in fields if all(is_idle(name, *pair) for pair in pairs)]
    read = {name for layer in layers for name in layer.mixer.fields(layer.hidden_size)}
    return idle + [f"{name}s" for name in schedules(model) if name not in read]


def derive_encoder(model: ModelSection, names: Mapping[str, str] | None = None) -> EncoderConfig:
    """The encoder that is kept.

    Args:
      names: as `list_stages` takes them.

    Raises:
      ConfigError: a mixer is unknown or cannot be made.
    """
    stages = [
        StageConfig(
            stage.sizes.layers,
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
    return _encoder(model, model.embedding_size, model.hidden_size, stages)


def derive_generator(model: ModelSection, section: GeneratorSection) -> EncoderConfig:
    """The encoder of a separate generator, see `GeneratorSizes`; errors as `derive_encoder`."""
    sizes = GeneratorSizes(model, section)
    stages = [
        StageConfig(
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
    encoder = _encoder(model, sizes.embedding_size, sizes.hidden_size, stages)
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
        **generator,
    )
    return LayerConfig(
        hidden_size=hidden_size,
        mixer=make_mixer(settings, stage.sizes.mixer_fields),
        ffn_size=ffn_size,
        ffn_groups=stage.sizes.ffn_groups,
        dropout=model.dropout,
        layer_norm_epsilon=model.layer_norm_epsilon,
        initializers=model.initializers,
        initializer_range=model.initializer_range,
    )


def _encoder(model: ModelSection, embedding_size: int, hidden_size: int, stages) -> EncoderConfig:
    return EncoderConfig(
        embedding_size=embedding_size,
        hidden_size=hidden_size,
        stages=tuple(stages),
        remat=model.remat,
        scan_unroll=model.scan_unroll,
        initializers=model.initializers,
        initializer_range=model.initializer_range,
    )
