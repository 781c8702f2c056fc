"""Which run a network fits into: its sizes as fields of a config, and what differs from one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convbert_jax.config import Config, EncoderConfig
from convbert_jax.interop.networks import ConversionError, Network, places

# Sizes that parameters have, and what an encoder computes with them.
_MODEL = (
    "layers",
    "hidden_size",
    "embedding_size",
    "heads",
    "head_ratio",
    "mixer",
    "kernel_size",
    "ffn_size",
    "ffn_groups",
    "positions",
    "types",
    "layer_norm_epsilon",
)
# How it was trained; another choice is no contradiction.
_TRAINING = ("dropout", "attention_dropout", "mask_convolution")


def derive_fields(networks: Mapping[str, Network], config: Config) -> dict[str, Any]:
    """Field of a config -> value, for a run whose model holds these networks.

    Args:
      config: keeps what the networks do not tell.

    Raises:
      ConversionError: no config describes them.
    """
    main = networks["main"]
    layer, encoder = main.layer, main.encoder
    mixed = layer.mixer == "mixed"
    if layer.hidden_size % layer.head_size:
        raise ConversionError(
            f"heads of {layer.head_size} channels do not divide a hidden size of "
            f"{layer.hidden_size}; such an encoder cannot be put into a run."
        )
    heads = layer.hidden_size // layer.head_size
    bottleneck = not mixed and layer.attention_heads < heads
    fields = {
        "tokenizer.vocab_size": main.embeddings.vocab_size,
        "model.layers": encoder.depth,
        "model.hidden_size": encoder.hidden_size,
        "model.embedding_size": main.embeddings.size,
        "model.heads": heads,
        "model.mixer": "bottleneck" if bottleneck else layer.mixer,
        "model.ffn_size": layer.ffn_size,
        "model.ffn_groups": layer.ffn_groups,
        "model.positions": main.embeddings.positions,
        "model.types": main.embeddings.types,
        "model.layer_norm_epsilon": layer.layer_norm_epsilon,
        "model.dropout": layer.dropout,
        "model.attention_dropout": layer.attention_dropout,
    }
    if mixed or bottleneck:
        fields["model.head_ratio"] = heads // layer.attention_heads
    if mixed:
        fields["model.kernel_size"] = layer.kernel_size
        fields["model.mask_convolution"] = layer.mask_convolution
    if config.recipe == "replaced_token" and "generator" in networks:
        fields |= _generator_fields(networks["generator"], main, replace(config, fields))
    derived = replace(config, fields)
    for name in places(derived):
        if name in networks:
            _check_same(networks[name], name, derived)
    return fields


def replace(config: Config, fields: Mapping[str, Any]) -> Config:
    """`config` with `{"section.field": value}` changed."""
    for path, value in fields.items():
        section, _, field = path.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def decisive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `fields` without which parameters would not fit or mean another thing."""
    training = {f"model.{field}" for field in _TRAINING}
    return {path: value for path, value in fields.items() if path not in training}


def sizes_of(config: Config) -> dict[str, Any]:
    """The fields of a config that its parameters depend on, but for those of its vocabulary."""
    fields = {f"model.{name}": getattr(config.model, name) for name in _MODEL}
    generator = dataclasses.asdict(config.generator)
    return fields | {f"generator.{name}": value for name, value in generator.items()}


def value_of(config: Config, path: str) -> Any:
    """The value of the field "section.field"."""
    section, _, field = path.partition(".")
    return getattr(getattr(config, section), field)


def differences(fields: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Field -> (of the networks, of the config), where parameters would not fit or mean another
    thing.
    """
    pairs = {path: (v, value_of(config, path)) for path, v in decisive(fields).items()}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _generator_fields(generator: Network, main: Network, config: Config) -> dict[str, Any]:
    tied = _same_arrays(generator, main, "embeddings/")
    if generator.encoder == main.encoder and tied and _same_arrays(generator, main, "layers/"):
        return {"generator.kind": "shared"}
    fields = {"generator.kind": "separate", "generator.tie_embeddings": tied}
    if _shape(replace(config, fields).generator_encoder) == _shape(generator.encoder):
        return fields  # several fractions round to the same sizes: those of the config do
    fields |= {
        "generator.size": generator.encoder.hidden_size / main.encoder.hidden_size,
        "generator.layers": generator.encoder.depth / main.encoder.depth,
    }
    for release_heads in (config.generator.release_heads, not config.generator.release_heads):
        tried = fields | {"generator.release_heads": release_heads}
        if _shape(replace(config, tried).generator_encoder) == _shape(generator.encoder):
            return tried
    layer = generator.layer
    raise ConversionError(
        f"the generator ({layer.hidden_size} channels, {layer.attention_heads} heads of "
        f"{layer.head_size}, feed-forward {layer.ffn_size}) is none that config.generator can "
        "describe; take it away from the source to import the discriminator alone."
    )


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
    layer = encoder.stages[0].layer
    taps = layer.kernel_size if layer.mixer == "mixed" else 0
    return (
        encoder.depth,
        encoder.embedding_size,
        layer.hidden_size,
        layer.mixer,
        layer.attention_heads,
        layer.head_size,
        taps,
        layer.ffn_size,
        layer.ffn_groups,
    )
