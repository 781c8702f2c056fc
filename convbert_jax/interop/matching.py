"""Which run a network fits into: its sizes as fields of a config, and what differs from one."""

import dataclasses
import itertools
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from absl import logging

from convbert_jax.config import (
    Config,
    ConfigError,
    EncoderConfig,
    ModelSection,
    StageSection,
    mixers,
    to_text,
)
from convbert_jax.config.network import SCHEDULED, GeneratorSizes, list_stages
from convbert_jax.interop.networks import ConversionError, Network, is_disentangled, places

# Sizes that parameters have, and what an encoder computes with them.
_MODEL = (
    "layers",
    "hidden_size",
    "embedding_size",
    "heads",
    "head_ratio",
    "mixer",
    "mixer_fields",
    "kernel_size",
    "dilation",
    "kernel_sizes",
    "dilations",
    "ffn_size",
    "ffn_groups",
    "stages",
    "positions",
    "types",
    "layer_norm_epsilon",
)
# How a model is trained: weights fit any value.
DROPOUT = ("model.dropout", "model.attention_dropout")
_TRAINING = (
    *(*DROPOUT, "sequence.activation_dropout", "sequence.last_dropout"),
    "model.mask_convolution",
)
_STAGE = {field.name for field in dataclasses.fields(StageSection)}
_LAYER = ("ffn_size", "ffn_groups", "dropout", "layer_norm_epsilon")  # as config.model calls them
# Fields of mixers that change neither shapes nor, but near padding, what is computed.
_ANY = {"attention": "", "convolution": "", "attention_dropout": 0.0, "mask_convolution": True}

# What a run may have chosen for the machine that it was trained on.
_OF_THE_MACHINE = {"model.attention": "auto", "model.convolution": "auto"}


def derive_fields(networks: Mapping[str, Network], config: Config) -> dict[str, Any]:
    """Field of a config -> value, for a run whose model holds these networks.

    Several spellings make the same encoder, as stages cut elsewhere: where `config` makes it, its
    own come back.

    Args:
      config: keeps what the networks do not tell.

    Raises:
      ConversionError: no config describes them.
    """
    main = networks["main"]
    encoder = main.encoder
    try:
        stages = _stage_fields(encoder)
    except ConfigError as error:
        raise ConversionError(str(error), field=error.field, value=error.value) from None
    sizes = {
        "model.hidden_size": encoder.hidden_size,
        "model.embedding_size": main.embeddings.size,
        "model.positions": main.embeddings.positions,
        "model.types": main.embeddings.types,
    }
    fields = {"tokenizer.vocab_size": main.embeddings.vocab_size, **sizes}
    # Unless a mixer reads it: some refuse a ratio that does nothing.
    fields["model.head_ratio"] = ModelSection().head_ratio
    for stage in reversed(stages):  # those of the first, and what only a later one has
        fields |= {f"model.{name}": value for name, value in stage.items()}
    fields |= {"model.layers": encoder.depth, "model.stages": ()}
    fields |= {f"model.{name}s": () for name in SCHEDULED}
    if len(stages) > 1:
        parts = ({name: v for name, v in stage.items() if name in _STAGE} for stage in stages)
        fields["model.stages"] = tuple(StageSection(**part) for part in parts)
        fields["model.mixer_fields"] = ()  # a stage without any has the defaults of its mixer
    if not _difference(replace(config, sizes), "encoder", encoder):
        own = ("stages", *sorted(_STAGE - {"layers"}), *(f"{name}s" for name in SCHEDULED))
        fields |= {f"model.{name}": getattr(config.model, name) for name in own}
    if config.recipe == "replaced_token" and "generator" in networks:
        fields |= _generator_fields(networks["generator"], main, replace(config, fields))
    derived = replace(config, fields)
    for name in places(derived):
        if name in networks:
            _check_same(networks[name], name, derived)
    return fields


def _stage_fields(encoder: EncoderConfig) -> list[dict[str, Any]]:
    """Field of config.model -> value, for each stage; one if all layers are the same.

    Raises:
      ConversionError: stages differ in what config.model says of all.
      ConfigError: no config makes a mixer.
    """
    found = []
    for stage in encoder.stages:
        layer = stage.layer
        fields = {"layers": stage.depth, **mixers.describe(layer.mixer, layer.hidden_size)}
        fields |= {name: getattr(layer, name) for name in _LAYER}
        for before in found:
            for name in sorted(set(fields) & set(before) - _STAGE):
                if fields[name] != before[name]:
                    raise ConversionError(
                        f"the layers differ in {name} ({before[name]} and {fields[name]}), which "
                        f"config.model.{name} says of all.",
                        field=f"config.model.{name}",
                    )
        found.append(fields)
    if all(stage.layer == encoder.stages[0].layer for stage in encoder.stages):
        return [found[0] | {"layers": encoder.depth}]
    return found


def replace(config: Config, fields: Mapping[str, Any]) -> Config:
    """`config` with `{"section.field": value}` changed."""
    for path, value in fields.items():
        section, _, field = path.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def for_any_machine(config: Config, path: str) -> Config:
    """The config of the run at `path` without what it chose for the machine that it was trained on,
    which another one need not have.
    """
    changed = {field: v for field, v in _OF_THE_MACHINE.items() if value_of(config, field) != v}
    if changed:
        named = ", ".join(f"config.{field}={value_of(config, field)}" for field in changed)
        logging.info("%s was trained with %s; here it is auto.", path, named)
    return dataclasses.replace(replace(config, changed), platform="any")


def decisive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `fields` without which parameters would not fit or mean another thing."""
    return {path: value for path, value in fields.items() if path not in _TRAINING}


def keep_given(
    fields: Mapping[str, Any], config: Config, given: Collection[str], source: str
) -> dict[str, Any]:
    """The fields of a source that the user has not named.

    Args:
      fields: path -> value, as the source has it.
      config: with the values that the user has named.
      given: paths of fields that the user has named, "model.layers" for one.
      source: path of the weights, for an error.

    Raises:
      ConversionError: a named field contradicts the weights.
    """
    for path in sorted(set(given) & set(decisive(fields))):
        if not _is_same(path, fields[path], value_of(config, path)):
            theirs, ours = (to_text(value) for value in (fields[path], value_of(config, path)))
            raise ConversionError(
                f"config.{path}={ours} contradicts {source}, which has {theirs or 'none'}. Remove "
                f"--config.{path}.",
                field=f"config.{path}",
                value=value_of(config, path),
                path=source,
            )
    return {path: value for path, value in fields.items() if path not in given}


def sizes_of(config: Config) -> dict[str, Any]:
    """The fields of a config that its parameters depend on, but for those of its vocabulary."""
    fields = {f"model.{name}": getattr(config.model, name) for name in _MODEL}
    generator = dataclasses.asdict(config.generator)
    return fields | {f"generator.{name}": value for name, value in generator.items()}


def value_of(config: Config, path: str) -> Any:
    """The value of the field "section.field"."""
    section, _, field = path.partition(".")
    return getattr(getattr(config, section), field)


def flags(fields: Mapping[str, Any]) -> str:
    """The flags that set fields, to be pasted into a shell."""
    return " ".join(f"--config.{path}={shlex.quote(to_text(v))}" for path, v in fields.items())


def differences(fields: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Field -> (of the networks, of the config), where parameters would not fit or mean another
    thing.
    """
    pairs = {path: (v, value_of(config, path)) for path, v in decisive(fields).items()}
    return {path: pair for path, pair in pairs.items() if not _is_same(path, *pair)}


def _is_same(path: str, first: Any, second: Any) -> bool:
    return first == second or (path == "model.mixer" and mixers.is_same(first, second))


def _generator_fields(generator: Network, main: Network, config: Config) -> dict[str, Any]:
    tied = _same_arrays(generator, main, "embeddings/")
    own_size = generator.embeddings.size == generator.encoder.hidden_size
    if not tied and generator.embeddings.size == main.embeddings.size:
        disentangled = is_disentangled(config) or not own_size
        tied = disentangled
    else:
        disentangled = tied and is_disentangled(config)
    if (
        generator.encoder == main.encoder
        and tied
        and not disentangled
        and _same_arrays(generator, main, "layers/")
    ):
        return {"generator.kind": "shared"}
    fields = {
        "generator.kind": "separate",
        "generator.tie_embeddings": tied,
        "generator.disentangle_embeddings": disentangled,
    }
    if not _difference(replace(config, fields), "generator_encoder", generator.encoder):
        return fields  # several fractions round to the same sizes: those of the config do
    fields |= {
        "generator.size": generator.encoder.hidden_size / main.encoder.hidden_size,
        "generator.layers": _depth_fraction(replace(config, fields), generator.encoder.depth),
    }
    for release_heads in (config.generator.release_heads, not config.generator.release_heads):
        tried = fields | {"generator.release_heads": release_heads}
        why = _difference(replace(config, tried), "generator_encoder", generator.encoder)
        if not why:
            return tried
    layer = generator.encoder.stages[0].layer
    raise ConversionError(
        f"the generator ({layer.hidden_size} channels, heads {layer.mixer}, feed-forward "
        f"{layer.ffn_size}) is none that config.generator can describe ({why.rstrip('.')}); take "
        "it away from the source to import the discriminator alone.",
        field="config.generator",
    )


def _depth_fraction(config: Config, depth: int) -> float:
    """config.generator.layers of a generator of `depth` layers, each stage of which is rounded."""
    stages = list_stages(config.model)

    def layers(fraction: float) -> int:
        section = dataclasses.replace(config.generator, layers=fraction)
        return sum(GeneratorSizes(config.model, section).depth(stage) for stage in stages)

    def fractions() -> Iterator[float]:
        yield depth / sum(stage.sizes.layers for stage in stages)
        depths = [stage.sizes.layers for stage in stages]
        steps = sorted({0.0, 1.0, *((k + 0.5) / d for d in depths for k in range(d))})
        yield from ((a + b) / 2 for a, b in itertools.pairwise(steps))
        yield from steps[1:]  # a half is rounded to the even number

    # No stage gets less of a larger fraction, so the sum tells the depth of each.
    first = next(fractions())
    return next((fraction for fraction in fractions() if layers(fraction) == depth), first)


def _difference(config: Config, name: str, encoder: EncoderConfig) -> str:
    """Why `config` does not make `encoder`, "" if it does.

    Args:
      name: "encoder" or "generator_encoder".
    """
    try:
        found = _shape(getattr(config, name))
    except ConfigError as error:  # as heads that do not divide
        return str(error)
    return "" if found == _shape(encoder) else f"the nearest is {found}"


def _check_same(network: Network, name: str, config: Config) -> None:
    encoder = config.encoder
    if name == "generator" and config.generator.kind == "separate":
        encoder = config.generator_encoder
    if _shape(network.encoder) != _shape(encoder):
        raise ConversionError(
            f"no config.model describes this {name} network: {_shape(network.encoder)}, nearest "
            f"{_shape(encoder)}."
        )


def _same_arrays(first: Network, second: Network, folder: str) -> bool:
    names = [path for path in first.parameters if path.startswith(folder)]
    return all(
        path in second.parameters
        and first.parameters[path].shape == second.parameters[path].shape
        and (first.parameters[path] == second.parameters[path]).all()
        for path in names
    )


def _shape(encoder: EncoderConfig) -> tuple:
    """What decides the shapes of an encoder and what it computes."""
    layers = []
    for stage in encoder.stages:
        layer = stage.layer
        mixer = mixers.change(layer.mixer, **_ANY)
        layers += [(layer.hidden_size, mixer, layer.ffn_size, layer.ffn_groups)] * stage.depth
    return encoder.embedding_size, tuple(layers)
