"""config.json and tensors of the ModernBert classes of transformers.

They compute config.model with norm=pre, activation=geglu, position_embedding=rotary and
embedding_norm (Warner et al. 2024, arXiv:2412.13663). Query, key and value are one tensor in files,
and so are the two inputs of the gated feed-forward block.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convbert_jax.config import EmbeddingsConfig, EncoderConfig, ModelSection
from convbert_jax.config.network import derive_embeddings, derive_encoder
from convbert_jax.interop.blocks import attention_fields
from convbert_jax.interop.networks import ConversionError, Network
from convbert_jax.interop.weight_files import read_count, read_fraction, shown

# Fused module -> its parts, in the order of rows in files; tables.py names each part.
FUSED = {"attn.Wqkv": ("query", "key", "value"), "mlp.Wi": ("input", "gate")}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # values of layer_types
_BASES = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_WINDOW = 128  # default of local_attention, the width of the window
_EVERY = 3  # default of global_attn_every_n_layers
_GELU = ("gelu", "gelu_python")
# Fields with the value of config.model.biases
_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
# Field -> supported values, the default of transformers first.
CHECKS = {
    "hidden_activation": _GELU,
    "classifier_activation": _GELU,
    "decoder_bias": (True,),
    "rope_scaling": (None,),
}


def write_fields(network: Network, ids: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of config.json that other families do not have.

    The pattern of local layers and the rotary bases are written twice: for transformers from
    version 5 on (layer_types, rope_parameters) and for older software.

    Args:
      ids: "cls" and "sep" -> id of the token.
    """
    layer, embeddings = network.layer, network.embeddings
    fields = attention_fields(network.encoder)
    names = {_GLOBAL: "rotary_base", _LOCAL: "local_rotary_base"}
    bases = {kind: fields.get(names[kind], default) for kind, (_, default) in _BASES.items()}
    return {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "decoder_bias": True,
        **dict.fromkeys(_BIASES, layer.biases),
        "norm_eps": layer.layer_norm_epsilon,
        "layer_norm_eps": layer.layer_norm_epsilon,  # vLLM reads this one too
        "embedding_dropout": embeddings.dropout,
        "attention_dropout": layer.mixer.attention_dropout,
        "mlp_dropout": layer.activation_dropout,
        "initializer_range": layer.initializer_range,
        "initializer_cutoff_factor": 2.0,
        "local_attention": 2 * fields["window"] or _WINDOW,
        "global_attn_every_n_layers": fields.get("global_every", 1),
        "layer_types": [
            _LOCAL if layer.mixer.options.window else _GLOBAL for layer in network.encoder.layers
        ],
        **{name: bases[kind] for kind, (name, _) in _BASES.items()},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
        "bos_token_id": ids.get("cls"),
        "cls_token_id": ids.get("cls"),
        "eos_token_id": ids.get("sep"),
        "sep_token_id": ids.get("sep"),
    }


def read_sizes(content: Mapping[str, Any]) -> tuple[EmbeddingsConfig, EncoderConfig]:
    """Returns the embeddings and the encoder of a config.json, with the defaults of transformers.

    Dropout of the embeddings is read as config.model.dropout; it does not affect weights.

    Raises:
      ConversionError: a field is missing or out of range, or config.model cannot express it.
    """
    hidden, heads = read_count(content, "hidden_size"), read_count(content, "num_attention_heads")
    if hidden % (2 * heads):
        raise ConversionError(
            f"config.json has hidden_size={hidden}, but rotary positions need an even number of "
            f"channels in each of {heads} heads.",
            field="hidden_size",
            value=hidden,
        )
    window, every = _read_pattern(content)
    model = ModelSection(
        layers=read_count(content, "num_hidden_layers"),
        hidden_size=hidden,
        embedding_size=hidden,
        heads=heads,
        mixer="attention",
        ffn_size=read_count(content, "intermediate_size"),
        activation="geglu",
        norm="pre",
        biases=_read_biases(content),
        window=window,
        global_every=every,
        position_embedding="rotary",
        rotary_base=_read_base(content, _GLOBAL),
        local_rotary_base=_read_base(content, _LOCAL),
        positions=read_count(content, "max_position_embeddings", 8_192),
        types=0,
        dropout=read_fraction(content, "embedding_dropout", 0.0),
        attention_dropout=read_fraction(content, "attention_dropout", 0.0),
        activation_dropout=read_fraction(content, "mlp_dropout", 0.0),
        layer_norm_epsilon=read_fraction(content, "norm_eps", 1e-5),
        initializer_range=read_fraction(content, "initializer_range", 0.02),
    )
    vocab_size = read_count(content, "vocab_size")
    return derive_embeddings(model, vocab_size, hidden), derive_encoder(model)


def _read_biases(content: Mapping[str, Any]) -> bool:
    values = {name: content.get(name, False) for name in _BIASES}
    biases = values["norm_bias"]
    for name, value in values.items():
        if value is not biases or not isinstance(value, bool):
            raise ConversionError(
                f"config.json has {name}={shown(value)} and norm_bias={shown(biases)}; "
                f"config.model.biases needs one value for {', '.join(_BIASES)}.",
                field=name,
                value=value,
            )
    return biases


def _read_pattern(content: Mapping[str, Any]) -> tuple[int, int]:
    """Returns config.model.window and config.model.global_every."""
    depth = read_count(content, "num_hidden_layers")
    window = read_count(content, "local_attention", _WINDOW) // 2
    kinds = content.get("layer_types")
    if kinds is None:
        every = read_count(content, "global_attn_every_n_layers", _EVERY)
    else:
        # The period ends at the second global layer.
        first_two = [i for i in range(depth) if kinds[i : i + 1] == [_GLOBAL]][:2]
        every = first_two[1] if len(first_two) > 1 else depth * len(first_two)
        pattern = [_GLOBAL if every and i % every == 0 else _LOCAL for i in range(depth)]
        if kinds != pattern:
            raise ConversionError(
                f"config.json has layer_types={shown(kinds)}; expected {depth} layers of which "
                f"every n-th is {_GLOBAL!r}, the first included, and all others {_LOCAL!r}.",
                field="layer_types",
                value=kinds,
            )
    if every == 1:
        return 0, _EVERY
    if not window:
        raise ConversionError(
            f"config.json has local_attention={shown(content['local_attention'])}, expected at "
            "least 2.",
            field="local_attention",
            value=content["local_attention"],
        )
    return window, every


def _read_base(content: Mapping[str, Any], kind: str) -> float:
    """Returns the rotary base of a kind of layers; rope_parameters take precedence."""
    name, default = _BASES[kind]
    by_kind = content.get("rope_parameters") or {}
    known = isinstance(by_kind, dict) and not set(by_kind) - set(_BASES)
    if not known:
        raise _unsupported_rotary(by_kind, kind)
    return read_base(by_kind.get(kind) or {}, content, name, default, kind)


def read_base(
    rotary: Any, content: Mapping[str, Any], name: str, default: float, kind: str = _GLOBAL
) -> float:
    """Returns the rotary base of rope_parameters, else the one of older files.

    Args:
      rotary: rope_parameters of this kind of layers; {} if there are none.
      name: field of older files.
      default: base of files without either.

    Raises:
      ConversionError: the positions are of another type, or the base is out of range.
    """
    known = isinstance(rotary, dict) and not set(rotary) - {"rope_type", "rope_theta"}
    if not known or rotary.get("rope_type", "default") != "default":
        raise _unsupported_rotary(rotary, kind)
    base = rotary.get("rope_theta", content.get(name, default))
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base <= 1e9:
        raise ConversionError(
            f"config.json has the rotary base {shown(base)} for {kind}, expected a number "
            "greater than 1 and at most 1e9.",
            field=name,
            value=base,
        )
    return float(base)


def _unsupported_rotary(rotary: Any, kind: str) -> ConversionError:
    return ConversionError(
        f"config.json has rope_parameters={shown(rotary)}, which is not supported; expected "
        f'{{"rope_type": "default", "rope_theta": BASE}} for {kind!r}.',
        field="rope_parameters",
        value=rotary,
    )


def write_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fuses the parts of FUSED."""
    fused = dict(tensors)
    for name in tensors:
        for module, (first, *_) in FUSED.items():
            folder, found, leaf = name.partition(f"{module}.{first}.")
            if found:
                parts = (fused.pop(f"{folder}{module}.{part}.{leaf}") for part in FUSED[module])
                fused[f"{folder}{module}.{leaf}"] = np.concatenate([*parts])
    return fused


def read_tensors(
    tensors: Mapping[str, np.ndarray], content: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Splits fused tensors; the inverse of `write_tensors`.

    Raises:
      ConversionError: the tensors have the head of a fine-tuned model.
    """
    if "classifier.weight" in tensors:
        raise ConversionError(
            f"config.json has architectures={shown(content.get('architectures'))}, whose head has "
            "a norm that heads of convbert_jax lack. Keep only the encoder, in PyTorch with "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER).",
            field="architectures",
            value=content.get("architectures"),
        )
    parts = {}
    for name, array in tensors.items():
        module = next((module for module in FUSED if f"{module}." in name), None)
        if module is None:
            parts[name] = array
            continue
        folder, _, leaf = name.partition(f"{module}.")
        pieces = np.array_split(np.atleast_1d(array), len(FUSED[module]))
        for part, piece in zip(FUSED[module], pieces, strict=True):
            parts[f"{folder}{module}.{part}.{leaf}"] = piece
    return parts
