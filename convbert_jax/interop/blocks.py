"""The block of an encoder as fields of config.model, and the blocks that other software has."""

import dataclasses
from collections.abc import Collection
from typing import Any

from convbert_jax.config import EmbeddingsConfig, EncoderConfig, LayerConfig, ModelSection
from convbert_jax.config.network import DecoderConfig, global_layer

# Fields of config.model for the form of all layers, with the same names in LayerConfig; their
# defaults in LayerConfig are the form of BERT. Dropout and implementations change no outputs.
_CHANGES_NO_OUTPUTS = ("activation_dropout", "convolution")
BLOCK = tuple(
    field.name
    for field in dataclasses.fields(LayerConfig)
    if field.default is not dataclasses.MISSING
    and hasattr(ModelSection, field.name)
    and field.name not in _CHANGES_NO_OUTPUTS
)
_BERT: dict[str, Collection[Any]] = {
    **{name: (getattr(LayerConfig, name),) for name in BLOCK},
    "position_embedding": ("learned",),
    "embedding_norm": (True,),
    "types": range(1, 1_025),
    "window": (0,),
    "qk_norm": (False,),
    "key_value_heads": (0,),
}
# family of tables.FAMILIES, or lfm2 -> field of config.model -> values that its classes support
BLOCKS = {
    "convbert": _BERT,
    "electra": _BERT,
    "bert": _BERT,
    "modernbert": _BERT
    | {
        "norm": ("pre",),
        "activation": ("geglu",),
        "biases": (False, True),
        "position_embedding": ("rotary",),
        "types": (0,),
        "window": range(2**20),
    },
    "lfm2": _BERT
    | {
        "norm": ("pre",),
        "normalization": ("rms",),
        "activation": ("swiglu",),
        "biases": (False,),
        "position_embedding": ("rotary",),
        "embedding_norm": (False,),
        "types": (0,),
        "qk_norm": (True,),
        "key_value_heads": range(1_025),
    },
}
# families whose embeddings have the hidden size
_WITHOUT_PROJECTION = ("bert", "modernbert", "lfm2")


def without_place(layer: LayerConfig) -> LayerConfig:
    """Returns a layer without the properties that its place in the encoder decides."""
    return dataclasses.replace(global_layer(layer), mixer_norm=True)


def attention_fields(encoder: EncoderConfig | DecoderConfig) -> dict[str, Any]:
    """Returns the fields of config.model for the options of attention; {} without heads."""
    options = [getattr(layer.mixer, "options", None) for layer in encoder.layers]
    of_local = next((one for one in options if one and one.window), None)
    of_global = next((one for one in options if one and not one.window), None)
    some = of_global or of_local
    if some is None:
        return {}

    def fits(every: int) -> bool:
        wanted = ((number, one) for number, one in enumerate(options) if one)
        return all((not one.window) == bool(every and n % every == 0) for n, one in wanted)

    fields: dict[str, Any] = {
        "window": of_local.window if of_local else 0,
        "qk_norm": some.qk_norm_epsilon > 0,
        "key_value_heads": some.key_value_heads,
    }
    if of_global and some.rotary_base:
        fields["rotary_base"] = some.rotary_base
    if of_local:
        fields["global_every"] = next(filter(fits, range(len(options) + 1)), 0)
        if of_local.rotary_base:
            fields["local_rotary_base"] = of_local.rotary_base
    return fields


def unsupported_fields(
    family: str, encoder: EncoderConfig | DecoderConfig, embeddings: EmbeddingsConfig
) -> dict[str, tuple[Any, Any]]:
    """Returns the fields of config.model whose values the classes of a family do not support.

    Args:
      encoder: its layers differ only by their place and, in lfm2, by their mixers.

    Returns:
      field -> (value, a value that is supported).
    """
    layer = encoder.stages[0].layer
    fields = {
        **{name: getattr(layer, name) for name in BLOCK},
        "position_embedding": embeddings.position_embedding,
        "embedding_norm": embeddings.norm,
        "types": embeddings.types,
        "embedding_size": embeddings.size,
        **attention_fields(encoder),
    }
    wanted = dict(BLOCKS[family])
    if family in _WITHOUT_PROJECTION:
        wanted["embedding_size"] = (encoder.hidden_size,)
    return {
        name: (fields[name], values[0])
        for name, values in wanted.items()
        if name in fields and fields[name] not in values
    }
