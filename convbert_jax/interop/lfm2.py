"""Lfm2 language models of transformers as models of this package, and back.

They compute config.model with norm=pre, normalization=rms, activation=swiglu, biases=false,
position_embedding=rotary and qk_norm, where each layer has the mixer short or attention (Amini et
al. 2025, arXiv:2511.23404).

Language models of this package multiply word embeddings by sqrt(C). Therefore the table is divided
by sqrt(C) when it is read, and the scale of the final norm is multiplied by it if the same table
computes the logits. Both are exact if sqrt(C) is a power of two.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from convbert_jax.config import ConfigError, LayerConfig, ModelSection, StageSection
from convbert_jax.config.network import LanguageModelConfig, derive_language_model
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop import weight_files
from convbert_jax.interop.blocks import unsupported_fields, without_place
from convbert_jax.interop.modernbert import read_base
from convbert_jax.interop.networks import ConversionError, stack, to_tree, unstack
from convbert_jax.interop.tables import KINDS, TAPS_LAST, Place
from convbert_jax.interop.weight_files import check_finite, read_count, read_fraction, shown
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.gated import Short
from convbert_jax.models.networks import LanguageModel
from convbert_jax.training.partitioning import flatten_params

CONFIG = "config.json"
FAMILY = "lfm2"  # model_type
_MIXERS = {"conv": "short", "full_attention": "attention"}  # value of layer_types -> mixer
_BASE = 1_000_000.0  # default of rope_theta
# Field -> supported values, the default of transformers first.
_CHECKS = {"conv_bias": (False,), "head_dim": (None,)}
# As in tables.LAYER: module of a layer -> (kind, name in files).
_LAYER = {
    "mixer_norm": ("norm", "operator_norm"),
    "feed_forward/intermediate": ("dense", "feed_forward.w1"),
    "feed_forward/gate": ("dense", "feed_forward.w3"),
    "feed_forward/output": ("dense", "feed_forward.w2"),
    "feed_forward_norm": ("norm", "ffn_norm"),
}
_OF_MIXER = {
    Attention: {
        "mixer/query": ("dense", "self_attn.q_proj"),
        "mixer/key": ("dense", "self_attn.k_proj"),
        "mixer/value": ("dense", "self_attn.v_proj"),
        "mixer/output": ("dense", "self_attn.out_proj"),
        "mixer/query_norm": ("norm", "self_attn.q_layernorm"),
        "mixer/key_norm": ("norm", "self_attn.k_layernorm"),
    },
    Short: {
        "mixer/input": ("dense", "conv.in_proj"),
        "mixer/output": ("dense", "conv.out_proj"),
    },
}
_OUTSIDE = {
    "embeddings/word": ("table", "model.embed_tokens"),
    "norm": ("norm", "model.embedding_norm"),
    "output": ("table", "lm_head"),
}
_TABLE, _NORM, _OUTPUT = (f"{name}.weight" for _, name in _OUTSIDE.values())


@dataclasses.dataclass(frozen=True)
class Lfm2:
    """A language model.

    Attributes:
      model, sequence: config sections that describe it.
      config: network config from these sections and the size of the vocabulary.
      params: parameters of `LanguageModel`, a nested dict of float32 arrays.
    """

    model: ModelSection
    sequence: SequenceSection
    config: LanguageModelConfig
    params: dict


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder with a config.json."""
    return (path / CONFIG).is_file()


def read_folder(folder: Path) -> Lfm2:
    """Reads the folder of an Lfm2ForCausalLM or Lfm2Model.

    Raises:
      ConversionError: a file is damaged, or this package cannot compute the model.
    """
    content = weight_files.read_json(folder / CONFIG)
    if content.get("model_type") != FAMILY:
        raise ConversionError(
            f"{folder / CONFIG} has model_type={shown(content.get('model_type'))}, but {FAMILY} is "
            "the only language model of transformers that can be imported.",
            field="model_type",
            value=content.get("model_type"),
            path=folder / CONFIG,
        )
    model, sequence = read_sections(content)
    tensors = weight_files.read_weights(folder)
    if model.layers * weight_files.LEAST_PARAMETERS > len(tensors):  # before allocating anything
        raise ConversionError(
            f"config.json has num_hidden_layers={model.layers}, but the weights have only "
            f"{len(tensors)} tensors. Copy both files from the same model.",
            field="num_hidden_layers",
            value=model.layers,
        )
    try:
        config = derive_language_model(model, sequence, read_count(content, "vocab_size"))
    except ConfigError as error:
        raise ConversionError(
            f"{folder / CONFIG}: {error}", field=error.field, value=error.value
        ) from None
    params = to_parameters(tensors, config)
    check_finite(flatten_params(params), str(folder))
    return Lfm2(model, sequence, config, params)


def read_sections(content: Mapping[str, Any]) -> tuple[ModelSection, SequenceSection]:
    """Returns the config sections for a config.json, with the defaults of transformers.

    Raises:
      ConversionError: a field is missing or out of range, or no config describes the model.
    """
    for field, wanted in _CHECKS.items():
        if content.get(field, wanted[0]) not in wanted:
            raise ConversionError(
                f"config.json has {field}={shown(content[field])}, which is not supported; "
                f"expected {wanted[0]!r}.",
                field=field,
                value=content[field],
            )
    hidden, heads = read_count(content, "hidden_size"), read_count(content, "num_attention_heads")
    if hidden % heads:
        raise ConversionError(
            f"config.json has hidden_size={hidden}, which is not divisible by {heads} heads.",
            field="hidden_size",
            value=hidden,
        )
    stages = tuple(
        StageSection(layers=len(list(equal)), mixer=mixer)
        for mixer, equal in itertools.groupby(_read_mixers(content))
    )
    rotary = content.get("rope_parameters") or {}
    model = ModelSection(
        layers=sum(stage.layers for stage in stages),
        hidden_size=hidden,
        embedding_size=hidden,
        heads=heads,
        key_value_heads=read_count(content, "num_key_value_heads", 8),
        mixer=stages[0].mixer,
        stages=stages if len(stages) > 1 else (),
        kernel_size=read_count(content, "conv_L_cache", 3),
        ffn_size=_read_units(content),
        activation="swiglu",
        norm="pre",
        normalization="rms",
        biases=False,
        embedding_norm=False,
        qk_norm=True,
        position_embedding="rotary",
        rotary_base=read_base(rotary, content, "rope_theta", _BASE),
        positions=read_count(content, "max_position_embeddings", 128_000),
        types=0,
        dropout=0.0,
        attention_dropout=0.0,
        layer_norm_epsilon=read_fraction(content, "norm_eps", 1e-5),
        initializer_range=read_fraction(content, "initializer_range", 0.02),
    )
    tied = content.get("tie_embedding", content.get("tie_word_embeddings", True))
    return model, SequenceSection(tied_output=bool(tied))


def _read_mixers(content: Mapping[str, Any]) -> list[str]:
    """Returns the mixer of each layer."""
    depth, kinds = read_count(content, "num_hidden_layers"), content.get("layer_types")
    if kinds is None:
        attends = content.get("full_attn_idxs")
        attends = range(depth) if attends is None else attends
        kinds = ["full_attention" if i in attends else "conv" for i in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth or not {*map(str, kinds)} <= {*_MIXERS}:
        raise ConversionError(
            f"config.json has layer_types={shown(kinds)}, expected {depth} layers of the types "
            f"{' and '.join(_MIXERS)}.",
            field="layer_types",
            value=kinds,
        )
    return [_MIXERS[kind] for kind in kinds]


def _read_units(content: Mapping[str, Any]) -> int:
    """Returns config.model.ffn_size, by the rounding of Lfm2MLP."""
    units = read_count(content, "intermediate_size", 12_288)
    units = read_count(content, "block_ff_dim", units)  # the name in older files
    if not content.get("block_auto_adjust_ff_dim", True):
        return units
    units, multiplier = int(2 * units / 3), content.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return units
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or multiplier <= 0:
        raise ConversionError(
            f"config.json has block_ffn_dim_multiplier={shown(multiplier)}, expected a number "
            "above 0.",
            field="block_ffn_dim_multiplier",
            value=multiplier,
        )
    multiple = read_count(content, "block_multiple_of", 256)
    return -(-int(multiplier * units) // multiple) * multiple


def write_folder(
    folder: Path, config: LanguageModelConfig, params: Any, ids: Mapping[str, int | None]
) -> None:
    """Writes config.json and model.safetensors of an Lfm2ForCausalLM.

    Args:
      ids: pad_token_id, bos_token_id and eos_token_id.

    Raises:
      ConversionError: the class cannot compute the model; nothing is written.
    """
    content = write_fields(config) | dict(ids)
    tensors = to_tensors(params, config)
    folder.mkdir(parents=True, exist_ok=True)
    weight_files.write_weights(folder, tensors)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def write_fields(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the content of config.json, without ids of tokens.

    Raises:
      ConversionError: the class cannot compute the model.
    """
    check_expressible(config)
    layers, tokens = config.decoder.layers, config.tokens
    attends = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    taps = [layer.mixer.kernel_size for layer in layers if isinstance(layer.mixer, Short)]
    base = attends[0].options.rotary_base if attends else _BASE
    heads = attends[0].attention_heads if attends else 1
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": FAMILY,
        "vocab_size": tokens.vocab_size,
        "hidden_size": tokens.size,
        "num_hidden_layers": len(layers),
        "layer_types": [
            "full_attention" if isinstance(layer.mixer, Attention) else "conv" for layer in layers
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": attends[0].key_value_heads if attends else heads,
        "conv_L_cache": taps[0] if taps else 3,
        "conv_bias": False,
        "intermediate_size": layers[0].ffn_size,
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": tokens.positions,
        "norm_eps": layers[0].layer_norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "rope_theta": base,  # read by versions of transformers before 5
        "initializer_range": layers[0].initializer_range,
        "tie_word_embeddings": config.tied_output,
        "dtype": "float32",
    }


def check_expressible(config: LanguageModelConfig) -> None:
    """Checks that Lfm2ForCausalLM can compute a language model.

    Raises:
      ConversionError: it cannot; the message names a field.
    """
    layers, hidden = config.decoder.layers, config.decoder.hidden_size
    for layer in layers:
        mixer = layer.mixer
        whole = isinstance(mixer, Attention) and mixer.attention_heads * mixer.head_size == hidden
        if type(mixer) not in _OF_MIXER or not (whole or isinstance(mixer, Short)):
            _refuse("mixer", type(mixer).__name__.lower(), "short and attention with all heads")
    different = unsupported_fields(FAMILY, config.decoder, config.tokens)
    for field, (value, wanted) in different.items():
        _refuse(field, value, wanted)
    if not config.decoder.last_norm:
        _refuse("last_norm", False, True, section="sequence")
    if layers[0].ffn_groups > 1:
        _refuse("ffn_groups", layers[0].ffn_groups, 1)

    def rest(layer: LayerConfig) -> LayerConfig:
        return dataclasses.replace(without_place(layer), mixer=layers[0].mixer)

    by_kind = [{layer.mixer for layer in layers if type(layer.mixer) is kind} for kind in _OF_MIXER]
    if len({rest(layer) for layer in layers}) > 1 or any(len(mixers) > 1 for mixers in by_kind):
        _refuse("stages", "layers of several sizes", "layers that differ only in their mixer")


def _refuse(field: str, value: Any, wanted: Any, section: str = "model") -> None:
    raise ConversionError(
        f"config.{section}.{field}={value} is not supported by Lfm2ForCausalLM, the only language "
        f"model of transformers that can be exported; expected {wanted}. Use --mode=predict or "
        "convbert_jax.load.",
        field=f"config.{section}.{field}",
        value=value,
    )


def to_tensors(params: Any, config: LanguageModelConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of an Lfm2ForCausalLM, without the copy of a tied table."""
    flat = _canonical({path: np.asarray(leaf) for path, leaf in flatten_params(params).items()})
    places = _places(flat, config)
    tensors = {place.name: place.layout.write(flat[path]) for path, place in places.items()}
    return _rescale(tensors, config, config.tokens.size**0.5)


def to_parameters(tensors: Mapping[str, np.ndarray], config: LanguageModelConfig) -> dict:
    """Converts tensors to parameters of `LanguageModel`; the inverse of `to_tensors`.

    Raises:
      ConversionError: tensors are missing, unknown or of another shape, or tied tensors differ.
    """
    bare = not any(name.startswith("model.") for name in tensors)  # Lfm2Model, without a head
    theirs = {f"model.{name}" if bare else name: leaf for name, leaf in tensors.items()}
    copy = theirs.pop(_OUTPUT, None) if config.tied_output else None
    if copy is not None and not np.array_equal(copy, theirs.get(_TABLE)):
        raise ConversionError(
            f"config.json ties {_OUTPUT} to {_TABLE}, but the two differ.", field=_OUTPUT
        )
    model = nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0)))
    abstract = flatten_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    wanted = _canonical({path: np.broadcast_to(0.0, leaf.shape) for path, leaf in abstract.items()})
    places = _places(wanted, config)
    names = {place.name for place in places.values()}
    _check_names(names - theirs.keys(), "lack")
    _check_names(theirs.keys() - names, "have the unknown")
    flat, theirs = {}, _rescale(theirs, config, config.tokens.size**-0.5)
    for path, place in places.items():
        shape = place.layout.write(wanted[path]).shape
        array = theirs[place.name]
        if array.shape != shape or array.dtype != np.float32:
            raise ConversionError(
                f"Tensor {place.name} has shape {array.shape} and dtype {array.dtype}, but "
                f"config.json requires {shape} and floating point. Copy both files from the same "
                "model.",
                field=place.name,
            )
        flat[path] = np.ascontiguousarray(place.layout.read(array))
    stacked = stack(flat, config.decoder)
    return to_tree({_own_path(path): leaf for path, leaf in stacked.items()})


def _rescale(
    tensors: Mapping[str, np.ndarray], config: LanguageModelConfig, factor: float
) -> dict[str, np.ndarray]:
    """Multiplies the word embeddings, and divides the last states if they compute the logits."""
    rescaled = {**tensors, _TABLE: tensors[_TABLE] * np.float32(factor)}
    if config.tied_output:
        rescaled[_NORM] = tensors[_NORM] * np.float32(1 / factor)
    return rescaled


def _canonical(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the parameters by the canonical paths of `interop.tables`, one entry per layer."""
    names = {"target": "embeddings", "decoder": "encoder"}
    parts = (path.partition("/") for path in flat)
    renamed = {f"{names.get(a, a)}/{c}": flat[f"{a}/{c}"] for a, _, c in parts}
    return unstack(renamed)


def _own_path(path: str) -> str:
    """Inverse of the renaming in `_canonical`."""
    names = {"embeddings": "target", "encoder": "decoder"}
    first, _, rest = path.partition("/")
    return f"{names.get(first, first)}/{rest}"


def _places(paths: Iterable[str], config: LanguageModelConfig) -> dict[str, Place]:
    """Returns name and layout in files by canonical path."""
    layers, found = config.decoder.layers, {}
    for path in paths:
        folder, inner, table = "", path, _OUTSIDE
        if path.startswith("layers/"):
            _, number, inner = path.split("/", 2)
            folder = f"model.layers.{number}."
            table = _LAYER | _OF_MIXER[type(layers[int(number)].mixer)]
        if inner == "mixer/depthwise":
            found[path] = Place(f"{folder}conv.conv.weight", TAPS_LAST)
            continue
        module, _, leaf = inner.rpartition("/")
        kind, name = table[module]
        suffix, layout, _, _ = KINDS[kind][leaf]
        found[path] = Place(f"{folder}{name}{suffix}", layout)
    return found


def _check_names(names: set[str], what: str) -> None:
    if names:
        raise ConversionError(
            f"The weights {what} tensor{'s' if len(names) > 1 else ''} "
            f"{', '.join(map(shown, sorted(names)[:3]))}{' …' if len(names) > 3 else ''}. Copy "
            "config.json and the weights from the same model.",
            field=min(names),
        )
