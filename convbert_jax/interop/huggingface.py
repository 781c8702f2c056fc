"""Folders for `from_pretrained` of ConvBert, Electra, Bert and ModernBert in transformers.

FOLDER/              config.json, model.safetensors, tokenizer files, README.md; for a ConvBERT that
                     ignores padding also modeling_masked_convbert.py
FOLDER/generator/    the same for the generator, if the model has one
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import (
    ConfigError,
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    from_config_dict,
)
from convbert_jax.config.mixers import AttentionOptions
from convbert_jax.interop import modernbert, weight_files
from convbert_jax.interop.networks import (
    HEADS,
    USE,
    ConversionError,
    Network,
    check_block,
    check_same_layers,
    describe_sizes,
    shapes,
    use_of,
)
from convbert_jax.interop.tables import (
    FAMILIES,
    PREFIXES,
    TIED,
    export_error,
    huggingface_places,
)
from convbert_jax.interop.weight_files import (
    LEAST_PARAMETERS,
    check_finite,
    read_count,
    read_fraction,
    read_json,
    shown,
)
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.mixed import Mixed

CONFIG = "config.json"
OURS = "convbert_jax"  # key in config.json that other software ignores
MASKED = "modeling_masked_convbert"  # module of this package, copied into folders
_USE = "use"  # key in OURS for Network.use
TUNED = {"sequence_head", "token_head", "span_head"}  # heads of fine-tuned models
# Kind of task -> problem_type. Without it, pipelines apply a sigmoid to a regression output.
_PROBLEMS = {
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regression": "regression",
}
_MODEL_TYPES = {"convbert": "convbert", "conv_bert": "convbert", "electra": "electra"}
_MODEL_TYPES |= {"bert": "bert", "modernbert": "modernbert"}
_CLASS_NAMES = {"convbert": "ConvBert", "electra": "Electra", "bert": "Bert"}
_CLASS_NAMES |= {"modernbert": "ModernBert"}
# Field of config.json -> supported values, the default of transformers first.
_CHECKS = {"is_decoder": (False,), "add_cross_attention": (False,)}
_BERT_CHECKS = {
    "hidden_act": ("gelu", "gelu_python"),
    "position_embedding_type": ("absolute", None),
}
# Head -> suffix of the class. A network without heads is the bare encoder; BERT with both heads of
# pre-training is BertForPreTraining.
CLASSES = {
    "mlm_head": "ForMaskedLM",
    "sequence_head": "ForSequenceClassification",
    "token_head": "ForTokenClassification",
    "span_head": "ForQuestionAnswering",
    "rtd_head": "ForPreTraining",
    "pair_head": "ForNextSentencePrediction",
}


def architecture(network: Network) -> str:
    """Returns the name of the transformers class that loads a network.

    ConvBertForPreTraining does not exist, so a ConvBERT discriminator is exported as the bare
    encoder, and its head as extra tensors that the class ignores. The same holds for the head for
    sentence pairs, which only BERT classes have.
    """
    name = _CLASS_NAMES[network.family]
    if network.family == "bert" and network.has("mlm_head") and network.has("pair_head"):
        return f"{name}ForPreTraining"
    for head, suffix in CLASSES.items():
        if network.has(head) and head not in unclassed_heads(network):
            return name + suffix
    return f"{name}Model"


def auto_class(name: str) -> str:
    """Returns the class of transformers that loads the class `name` from a folder."""
    suffix = next((suffix for suffix in CLASSES.values() if name.endswith(suffix)), "")
    return f"AutoModel{suffix}"


def unclassed_heads(network: Network) -> tuple[str, ...]:
    """Returns the heads of a network that no class of its family has."""
    both = ("rtd_head", "pair_head")
    lacking = {"convbert": both, "electra": ("pair_head",), "modernbert": both}
    return tuple(head for head in lacking.get(network.family, ()) if network.has(head))


def check_expressible(network: Network) -> None:
    """Checks that a transformers class can compute a network.

    Raises:
      ConversionError: no class can; the message has the reason and a fix.
    """
    layer, family = network.layer, network.family
    why = export_error(layer.mixer, "huggingface", layer.hidden_size)
    if why:
        raise ConversionError(why)
    check_block(network, FAMILIES, "transformers")
    if family == "convbert":
        return
    if layer.ffn_groups > 1:
        raise ConversionError(
            f"config.model.ffn_groups={layer.ffn_groups} without convolution is not supported by "
            "transformers. Train with 1 group, or export with --format=stablehlo.",
            field="config.model.ffn_groups",
            value=layer.ffn_groups,
        )
    if network.has("rtd_head") and family == "bert":
        raise ConversionError(
            "BERT classes have no head for replaced-token detection. Export as ELECTRA."
        )
    if family == "modernbert" and any(network.has(head) for head in TUNED):
        raise ConversionError(
            "The classification heads of ModernBERT classes have a norm, which the head of this "
            "fine-tuned model lacks. Predict with convbert_jax.load, or export the encoder with "
            "--format=stablehlo."
        )


def to_json(
    network: Network, *, pad_id: int, ids: Mapping[str, int], extra: dict[str, Any]
) -> dict[str, Any]:
    """Returns the content of config.json.

    Args:
      pad_id: id of the padding token. Always written, because ConvBertConfig defaults to 1 and
        transformers does not train the embedding of the padding token.
      ids: as in `write_network`.
      extra: JSON values stored under the key `convbert_jax`.
    """
    check_expressible(network)
    layer, embeddings, encoder = network.layer, network.embeddings, network.encoder
    mixer = layer.mixer
    content: dict[str, Any] = {
        "architectures": [architecture(network)],
        "model_type": network.family,
        "vocab_size": embeddings.vocab_size,
        "hidden_size": encoder.hidden_size,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": mixer.attention_heads * (2 if network.family == "convbert" else 1),
        "intermediate_size": layer.ffn_size,
        "max_position_embeddings": embeddings.positions,
        "pad_token_id": pad_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if network.family == "modernbert":
        content |= modernbert.write_fields(network, ids)
    else:
        content |= _bert_fields(network)
    if network.labels:
        content["id2label"] = {str(i): label for i, label in enumerate(network.labels)}
        content["label2id"] = {label: i for i, label in enumerate(network.labels)}
    kind = network.use.get("outputs.kind")
    if kind and network.has("sequence_head"):
        content["problem_type"] = _PROBLEMS.get(kind, kind)
    if network.masked:
        content["auto_map"] = {
            auto_class(name): f"{MASKED}.Masked{name}"
            for name in (f"{_CLASS_NAMES[network.family]}Model", architecture(network))
        }
    ours: dict[str, Any] = {"mask_convolution": not encoder.reads_padding}
    if network.use:
        ours[_USE] = dict(network.use)
    return content | {OURS: ours | extra}


def _bert_fields(network: Network) -> dict[str, Any]:
    layer, embeddings = network.layer, network.embeddings
    fields: dict[str, Any] = {
        "hidden_act": "gelu",
        "hidden_dropout_prob": layer.dropout,
        "attention_probs_dropout_prob": layer.mixer.attention_dropout,
        "type_vocab_size": embeddings.types,
        "initializer_range": layer.initializer_range,
        "layer_norm_eps": layer.layer_norm_epsilon,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if network.family != "bert":
        fields["embedding_size"] = embeddings.size
    if network.family == "convbert":
        fields |= {
            "head_ratio": 2,
            "conv_kernel_size": layer.mixer.kernel_size,
            "num_groups": layer.ffn_groups,
        }
    return fields


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a folder.

    Raises:
      ConversionError: the file is missing, damaged, or describes an unsupported model.
    """
    path = folder / CONFIG
    content = read_json(path)
    kind = content.get("model_type")
    if kind is None:
        content["model_type"] = kind = _guess_model_type(content, path)
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise ConversionError(
            f"{path} has the unsupported model_type {shown(kind)}; expected a ConvBERT, ELECTRA, "
            "BERT or ModernBERT model.",
            field="model_type",
            value=kind,
            path=path,
        )
    checks = modernbert.CHECKS if kind == "modernbert" else _BERT_CHECKS
    for field, wanted in (_CHECKS | checks).items():
        if content.get(field, wanted[0]) not in wanted:
            raise ConversionError(
                f"{path} has {field}={shown(content[field])}, which is not supported; expected "
                f"{wanted[0]!r}.",
                field=field,
                value=content[field],
                path=path,
            )
    return content


def _guess_model_type(content: dict[str, Any], path: Path) -> str:
    """Derives the model type from the class name; folders from before 2020 have no model_type."""
    architectures = content.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for family, start in _CLASS_NAMES.items():
        if name.startswith(start):
            logging.info("%s has no model_type; class %s implies %s.", path, shown(name), family)
            return family
    raise ConversionError(
        f'{path} has no model_type. Add "model_type": "bert", "electra", "convbert" or '
        '"modernbert", according to the weights.',
        field="model_type",
        path=path,
    )


def read_sizes(content: dict[str, Any]) -> tuple[str, EmbeddingsConfig, EncoderConfig]:
    """Returns (family, embeddings, encoder) of a config.json, with the defaults of transformers.

    Raises:
      ConversionError: a field without a default is missing, a value is out of range, or the hidden
        size is not divisible by the number of heads.
    """
    family = _MODEL_TYPES[content["model_type"]]
    if family == "modernbert":
        return family, *modernbert.read_sizes(content)
    hidden, heads = read_count(content, "hidden_size"), read_count(content, "num_attention_heads")
    embedding_size = hidden if family == "bert" else read_count(content, "embedding_size")
    attention_heads = heads
    if family == "convbert":  # the rounding of transformers
        attention_heads = max(1, heads // read_count(content, "head_ratio", 2))
    parts = attention_heads * (2 if family == "convbert" else 1)
    if hidden % parts:
        raise ConversionError(
            f"config.json has hidden_size={hidden}, which is not divisible by {parts} heads.",
            field="hidden_size",
            value=hidden,
        )
    attention = {
        "attention_heads": attention_heads,
        "head_size": hidden // parts,
        "attention_dropout": read_fraction(content, "attention_probs_dropout_prob", 0.1),
        "attention": "auto",
        "options": AttentionOptions(),
    }
    ours = content.get(OURS)
    mixer = Attention(**attention)
    if family == "convbert":
        mixer = Mixed(
            **attention,
            convolution_heads=attention_heads,
            kernel_size=read_count(content, "conv_kernel_size", 9),
            convolution="auto",
            # Other software trains with convolutions that read padding.
            mask_convolution=bool(isinstance(ours, dict) and ours.get("mask_convolution")),
        )
    embeddings, encoder = describe_sizes(
        vocab_size=read_count(content, "vocab_size"),
        embedding_size=embedding_size,
        positions=read_count(content, "max_position_embeddings", 512),
        types=read_count(content, "type_vocab_size", 2),
        depth=read_count(content, "num_hidden_layers"),
        dropout=read_fraction(content, "hidden_dropout_prob", 0.1),
        epsilon=read_fraction(content, "layer_norm_eps", 1e-12),
        spread=read_fraction(content, "initializer_range", 0.02),
        hidden_size=hidden,
        mixer=mixer,
        ffn_size=read_count(content, "intermediate_size"),
        ffn_groups=read_count(content, "num_groups", 1) if family == "convbert" else 1,
    )
    return family, embeddings, encoder


def read_use(content: dict[str, Any]) -> dict[str, Any]:
    """Returns `Network.use` of a config.json, with the kind of task from problem_type if missing.

    Raises:
      ConversionError: a field is unknown or has an invalid value.
    """
    ours = content.get(OURS)
    told = ours.get(_USE, {}) if isinstance(ours, dict) else {}
    if not isinstance(told, dict):
        raise ConversionError(
            f"config.json has {OURS}.{_USE}={shown(told)}, expected an object.",
            field=f"{OURS}.{_USE}",
            value=told,
        )
    sections: dict[str, dict[str, Any]] = {}
    for path, value in told.items():
        if path not in USE:
            raise ConversionError(
                f"config.json has the unknown field {shown(path)} in {OURS}.{_USE}; this version "
                f"supports {', '.join(USE)}.",
                field=path,
            )
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    try:
        config = from_config_dict({"recipe": "finetune", **sections})
    except ConfigError as error:
        raise ConversionError(
            f"config.json, {OURS}.{_USE}: {error}", field=error.field, value=error.value
        ) from None
    use = {path: value for path, value in use_of(config).items() if path in told}
    problem = content.get("problem_type")
    if problem is not None and "outputs.kind" not in use:
        kinds = {theirs: ours for ours, theirs in _PROBLEMS.items()}
        if problem not in tuple(kinds):
            raise ConversionError(
                f"config.json has the unknown problem_type={shown(problem)}; choose one of "
                f"{', '.join(kinds)}.",
                field="problem_type",
                value=problem,
            )
        use["outputs.kind"] = kinds[problem]
    return use


GENERATOR = "generator"  # subfolder of the generator


@dataclasses.dataclass(frozen=True)
class Folder:
    """Content of a Hugging Face folder.

    Attributes:
      networks: "main" and, optionally, "generator".
      ignored: names of tensors that the networks lack, as "NETWORK:TENSOR".
      extra: values under the key `convbert_jax` in config.json, by network.
    """

    networks: Mapping[str, Network]
    ignored: tuple[str, ...]
    extra: Mapping[str, Mapping[str, Any]]


def write_network(
    folder: Path,
    network: Network,
    *,
    pad_id: int,
    ids: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json, model.safetensors and, for a masked ConvBERT, its Python classes.

    Args:
      pad_id: id of the padding token.
      ids: "cls" and "sep" -> id of the token, which config.json of ModernBERT has.
      extra: JSON values, stored in config.json for `read_folder`.

    Raises:
      ConversionError: no transformers class can compute this network; nothing is written.
    """
    content = to_json(network, pad_id=pad_id, ids=ids or {}, extra=dict(extra or {}))
    folder.mkdir(parents=True, exist_ok=True)
    weight_files.write_weights(folder, to_tensors(network))
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    if network.masked:
        shutil.copyfile(Path(__file__).with_name(f"{MASKED}.py"), folder / f"{MASKED}.py")


def to_tensors(network: Network) -> dict[str, np.ndarray]:
    """Returns the tensors that the class of a network saves, without tied copies."""
    check_expressible(network)
    name = architecture(network)
    try:
        places = huggingface_places(
            network.parameters,
            network.family,
            network.layer,
            prefix="" if name.endswith("Model") else PREFIXES[network.family],
        )
    except KeyError as error:
        raise ConversionError(
            f"{name} has no parameter for {error.args[0]}. Fine-tune with "
            "--config.finetune.head=auto, which selects a head that transformers supports.",
            field=error.args[0],
        ) from None
    tensors = {
        place.name: place.layout.write(np.asarray(network.parameters[path]))
        for path, place in places.items()
    }
    return modernbert.write_tensors(tensors) if network.family == "modernbert" else tensors


def read_folder(folder: Path) -> Folder:
    """Reads a Hugging Face folder, with the generator if it is an export of this package.

    Raises:
      ConversionError: a file is damaged, incomplete, or contradicts another one.
    """
    folder = Path(folder)
    weight_files.read_manifest(folder)
    names = {"main": folder}
    if (folder / GENERATOR).is_dir():
        names["generator"] = folder / GENERATOR
        if not (folder / GENERATOR / CONFIG).exists():
            raise ConversionError(
                f"{folder / GENERATOR} has no {CONFIG}. Copy it again, or remove "
                "the folder to read the model without its generator.",
                path=folder / GENERATOR,
            )
    networks, ignored, extra = {}, [], {}
    for name, place in names.items():
        networks[name], left, extra[name] = _read_network(place)
        ignored += [f"{name}:{tensor}" for tensor in left]
    return Folder(networks, tuple(ignored), extra)


def _read_network(folder: Path) -> tuple[Network, list[str], dict[str, Any]]:
    content = read_config(folder)
    tensors = {_modern_name(name): leaf for name, leaf in weight_files.read_weights(folder).items()}
    network, left = from_tensors(tensors, content)
    check_finite(network.parameters, str(folder))
    ours = content.get(OURS)
    return network, left, dict(ours) if isinstance(ours, dict) else {}


def from_tensors(
    tensors: Mapping[str, np.ndarray], content: dict[str, Any]
) -> tuple[Network, list[str]]:
    """Builds a network from PyTorch tensors.

    Args:
      content: content of config.json.

    Returns:
      the network and the names of unused tensors.

    Raises:
      ConversionError: a tensor is missing or of another shape, or tied tensors differ.
    """
    if content["model_type"] == "modernbert":
        tensors = modernbert.read_tensors(tensors, content)
    depth = read_count(content, "num_hidden_layers")
    if depth * LEAST_PARAMETERS > len(tensors):  # before allocating anything per layer
        raise ConversionError(
            f"config.json has num_hidden_layers={depth}, but the weights have only {len(tensors)} "
            "tensors. Copy both files from the same model.",
            field="num_hidden_layers",
            value=depth,
        )
    family, embeddings, encoder = read_sizes(content)
    layer = check_same_layers(encoder)
    prefix = PREFIXES[family]
    prefix = prefix if any(name.startswith(prefix) for name in tensors) else ""
    heads = _find_heads(tensors, family, layer, content)
    expected = shapes(embeddings, encoder, heads)
    places = huggingface_places(expected, family, layer, prefix=prefix)
    missing = [place.name for place in places.values() if place.name not in tensors]
    if missing:
        raise ConversionError(
            f"The weights lack {len(missing)} tensors that config.json requires, first "
            f"{missing[0]}. Copy both files again from the same model.",
            field=missing[0],
        )
    parameters = {}
    for path, place in places.items():
        if tensors[place.name].dtype != np.float32:
            raise ConversionError(
                f"Tensor {place.name} has dtype {tensors[place.name].dtype}, expected floating "
                "point. Save the model again without quantization.",
                field=place.name,
            )
        array = _read_array(place, tensors[place.name])
        if array is None or array.shape != expected[path]:
            theirs = place.layout.write(np.broadcast_to(0.0, expected[path])).shape
            raise ConversionError(
                f"Tensor {place.name} has shape {tensors[place.name].shape}, but config.json "
                f"requires {theirs}. Copy both files from the same model.",
                field=place.name,
            )
        parameters[path] = array
    copies = {
        copy: original if original.startswith("cls.") else prefix + original
        for copy, original in TIED[family].items()
        if copy in tensors and "mlm_head" in heads
    }
    for copy, original in copies.items():
        if not np.array_equal(tensors[copy], tensors[original]):
            raise ConversionError(
                f"{copy} differs from {original}. Models with an untied output layer are not "
                "supported.",
                field=copy,
            )
    used = {place.name for place in places.values()} | set(copies)
    labels = _label_names(content.get("id2label"), heads)
    use = read_use(content) if TUNED & set(heads) else {}
    network = Network(family, embeddings, encoder, parameters, labels, use)
    return network, sorted(set(tensors) - used)


def _read_array(place, array: np.ndarray) -> np.ndarray | None:
    """Converts a tensor to the layout of this package; None if its rank does not fit."""
    try:
        return np.ascontiguousarray(place.layout.read(array))
    except (ValueError, IndexError):
        return None


def _find_heads(
    tensors: Mapping[str, np.ndarray], family: str, layer: LayerConfig, content
) -> dict[str, int]:
    """Returns head -> number of logits, for heads whose last bias exists."""
    found = {}
    architectures = content.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for head in HEADS:
        last = "output_bias" if head == "mlm_head" else "output/bias"
        try:
            places = huggingface_places([f"{head}/{last}"], family, layer, prefix="")
        except KeyError:
            continue
        tensor = places[f"{head}/{last}"].name
        # `classifier` is also the name in BertForSequenceClassification, which has a pooler, and in
        # ForMultipleChoice, which classifies whole texts. Neither is a token head.
        tags = family != "bert" or name.endswith("ForTokenClassification")
        tags = tags and not name.endswith("ForMultipleChoice")
        if tensor in tensors and tensors[tensor].ndim == 1 and (head != "token_head" or tags):
            found[head] = len(tensors[tensor])
    return found


def _label_names(id2label, heads: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of the logits; transformers omits default names, and may store a list.

    Raises:
      ConversionError: the number of names differs from the number of logits, or a name is invalid
        or repeated.
    """
    count = heads.get("sequence_head") or heads.get("token_head") or 0
    if not count or not id2label:
        return tuple(f"LABEL_{i}" for i in range(count))
    is_list = isinstance(id2label, list)
    listed = {str(i): name for i, name in enumerate(id2label)} if is_list else id2label
    places = [str(i) for i in range(count)]
    known = isinstance(listed, dict) and not set(listed) - set(places)
    if not known or (is_list and len(listed) < count):
        raise ConversionError(
            f"config.json has id2label={shown(id2label)}, but the head has {count} logits. Give "
            "every logit one name.",
            field="id2label",
            value=id2label,
        )
    found: dict[str, str] = {}  # name -> first index
    for place in places:
        name = listed.get(place, f"LABEL_{place}")
        if name is None or isinstance(name, list | dict):
            raise ConversionError(
                f"config.json has {shown(name)} as label {place} in id2label, expected a name.",
                field="id2label",
                value=name,
            )
        first = found.setdefault(str(name), place)
        if first != place:
            raise ConversionError(
                f"config.json gives the labels {first} and {place} the same name {shown(name)} in "
                "id2label. Give each label a different name.",
                field="id2label",
                value=name,
            )
    return tuple(found)


def _modern_name(name: str) -> str:
    """Renames gamma and beta of layer norms, as files from before 2020 call them."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
