"""Config fields that describe given networks, and differences between networks and a config."""

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
from convbert_jax.interop.blocks import BLOCK, attention_fields, without_place
from convbert_jax.interop.networks import ConversionError, Network, is_disentangled, places

_ATTENTION = ("rotary_base", "local_rotary_base", "window", "global_every")
_ATTENTION += ("qk_norm", "key_value_heads")
# Fields that affect the parameter shapes or the outputs of an encoder.
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
    "position_embedding",
    "types",
    "layer_norm_epsilon",
    "embedding_norm",
    *BLOCK,
    *_ATTENTION,
)
# Fields of training; weights fit any value.
DROPOUT = ("model.dropout", "model.attention_dropout")
_TRAINING = (
    *(*DROPOUT, "model.activation_dropout", "model.last_dropout"),
    "model.mask_convolution",
)
_STAGE = {field.name for field in dataclasses.fields(StageSection)}
# Fields of LayerConfig with the same names in config.model.
_LAYER = ("ffn_size", "ffn_groups", "dropout", "layer_norm_epsilon", *BLOCK)
# Mixer fields that change no shapes, and outputs at most near padding.
_ANY = {"attention": "", "convolution": "", "attention_dropout": 0.0, "mask_convolution": True}

# Fields whose values may be specific to the hardware of a run.
_OF_THE_MACHINE = {"model.attention": "auto", "model.convolution": "auto"}


def derive_fields(networks: Mapping[str, Network], config: Config) -> dict[str, Any]:
    """Derives the config fields of a run whose model holds these networks.

    Several configs describe the same encoder, for example with layers grouped into other stages.
    If `config` describes it, its own spelling is returned.

    Args:
      networks: "main" and, optionally, "generator".
      config: provides fields that the networks do not determine.

    Returns:
      "section.field" -> value.

    Raises:
      ConversionError: no config describes the networks.
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
        "model.position_embedding": main.embeddings.position_embedding,
        "model.embedding_norm": main.embeddings.norm,
        "model.types": main.embeddings.types,
    }
    attention = attention_fields(encoder)
    if not _difference(replace(config, sizes), "encoder", encoder):
        attention = {name: getattr(config.model, name) for name in attention}
    sizes |= {f"model.{name}": value for name, value in attention.items()}
    fields = {"tokenizer.vocab_size": main.embeddings.vocab_size, **sizes}
    # Mixers that do not use head_ratio reject other values than the default.
    fields["model.head_ratio"] = ModelSection().head_ratio
    for stage in reversed(stages):  # the first stage takes precedence
        fields |= {f"model.{name}": value for name, value in stage.items()}
    fields |= {"model.layers": encoder.depth, "model.stages": ()}
    fields |= {f"model.{name}s": () for name in SCHEDULED}
    if len(stages) > 1:
        parts = ({name: v for name, v in stage.items() if name in _STAGE} for stage in stages)
        fields["model.stages"] = tuple(StageSection(**part) for part in parts)
        fields["model.mixer_fields"] = ()  # stages without mixer_fields use the mixer's defaults
    if not _difference(replace(config, sizes), "encoder", encoder):
        own = ("stages", *sorted(_STAGE - {"layers"}), *(f"{name}s" for name in SCHEDULED))
        fields |= {f"model.{name}": getattr(config.model, name) for name in own}
    if "generator" not in config.spec.unread and "generator" in networks:
        fields |= _generator_fields(networks["generator"], main, replace(config, fields))
    derived = replace(config, fields)
    for name in places(derived):
        if name in networks:
            _check_same(networks[name], name, derived)
    return fields


def _stage_fields(encoder: EncoderConfig) -> list[dict[str, Any]]:
    """Returns the fields of config.model for each stage; a single stage if all layers are equal.

    Raises:
      ConversionError: stages differ in a field that config.model sets for all of them.
      ConfigError: no config describes a mixer.
    """
    found = []
    for layer, equal in itertools.groupby(encoder.layers, without_place):
        fields = {
            "layers": len(list(equal)),
            **mixers.describe(layer.mixer, layer.hidden_size),
        }
        fields |= {name: getattr(layer, name) for name in _LAYER}
        for before in found:
            for name in sorted(set(fields) & set(before) - _STAGE):
                if fields[name] != before[name]:
                    raise ConversionError(
                        f"No config describes this encoder: its layers differ in {name} "
                        f"({before[name]} and {fields[name]}), but config.model.{name} applies to "
                        "all layers.",
                        field=f"config.model.{name}",
                    )
        found.append(fields)
    return found


def replace(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns `config` with changed fields, given as `{"section.field": value}`."""
    for path, value in fields.items():
        section, _, field = path.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def for_any_machine(config: Config, path: str) -> Config:
    """Resets the hardware-specific fields of the config of the run at `path`."""
    changed = {field: v for field, v in _OF_THE_MACHINE.items() if value_of(config, field) != v}
    if changed:
        named = ", ".join(f"config.{field}={value_of(config, field)}" for field in changed)
        logging.info("%s was trained with %s; using auto on this machine.", path, named)
    return dataclasses.replace(replace(config, changed), platform="any")


def decisive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that affect parameter shapes or model outputs."""
    return {path: value for path, value in fields.items() if path not in _TRAINING}


def keep_given(
    fields: Mapping[str, Any], config: Config, given: Collection[str], source: str
) -> dict[str, Any]:
    """Returns the fields of a source that the user has not set.

    Args:
      fields: path -> value in the source.
      config: the config with the values that the user has set.
      given: paths of the fields that the user has set, for example "model.layers".
      source: path of the weights, for the error message.

    Raises:
      ConversionError: a field that the user has set contradicts the weights.
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
    """Returns the fields that the parameters depend on, except vocabulary fields."""
    fields = {f"model.{name}": getattr(config.model, name) for name in _MODEL}
    generator = dataclasses.asdict(config.generator)
    return fields | {f"generator.{name}": value for name, value in generator.items()}


def value_of(config: Config, path: str) -> Any:
    """Returns the value of the field "section.field"."""
    section, _, field = path.partition(".")
    return getattr(getattr(config, section), field)


def flags(fields: Mapping[str, Any]) -> str:
    """Returns the command-line flags that set fields, quoted for a shell."""
    return " ".join(f"--config.{path}={shlex.quote(to_text(v))}" for path, v in fields.items())


def differences(fields: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns field -> (value of the networks, value of the config) for decisive differences."""
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
        return fields  # several fractions round to the same sizes; keep the ones in the config
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
        f"config.generator cannot describe the generator ({layer.hidden_size} channels, mixer "
        f"{layer.mixer}, feed-forward size {layer.ffn_size}): {why.rstrip('.')}. Remove the "
        "generator from the source to import only the discriminator.",
        field="config.generator",
    )


def _depth_fraction(config: Config, depth: int) -> float:
    """Returns config.generator.layers for a generator with `depth` layers.

    The depth of each stage is that fraction of the discriminator's, rounded.
    """
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

    # Stage depths never decrease with the fraction, so the total determines each of them.
    first = next(fractions())
    return next((fraction for fraction in fractions() if layers(fraction) == depth), first)


def _difference(config: Config, name: str, encoder: EncoderConfig) -> str:
    """Returns how the encoder of `config` differs from `encoder`; "" if it does not.

    Args:
      name: "encoder" or "generator_encoder".
    """
    try:
        found = _shape(getattr(config, name))
    except ConfigError as error:  # for example a hidden size that is not divisible by the heads
        return str(error)
    return "" if found == _shape(encoder) else f"the nearest is {found}"


def _check_same(network: Network, name: str, config: Config) -> None:
    encoder = config.encoder
    if name == "generator" and config.generator.kind == "separate":
        encoder = config.generator_encoder
    if _shape(network.encoder) != _shape(encoder):
        raise ConversionError(
            f"No config.model describes the {name} network {_shape(network.encoder)}; the nearest "
            f"is {_shape(encoder)}."
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
    """Returns the properties of an encoder that decide its shapes and outputs."""
    layers = []
    for layer in encoder.with_mixers(**_ANY).layers:
        block = (getattr(layer, name) for name in ("ffn_size", "ffn_groups", "mixer_norm", *BLOCK))
        layers.append((layer.hidden_size, layer.mixer, *block))
    return encoder.embedding_size, tuple(layers)
