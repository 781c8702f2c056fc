"""Reader and writer of folders for Hugging Face's `from_pretrained`.

FOLDER/              config.json, model.safetensors, tokenizer files, README.md
FOLDER/generator/    the same for the generator, if the model has one
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.config import LayerConfig
from convbert_jax.interop import mark
from convbert_jax.interop.claims import LEAST_PARAMETERS, check_finite, shown
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import weight_files
from convbert_jax.interop.modules import HEADS, shapes
from convbert_jax.interop.networks import ConversionError, Network, check_same_layers
from convbert_jax.interop.tables import TIED, huggingface_places

GENERATOR = "generator"  # subfolder of the generator


@dataclasses.dataclass(frozen=True)
class Source:
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
    folder: Path, network: Network, *, pad_id: int, extra: Mapping[str, Any] | None = None
) -> None:
    """Writes config.json and model.safetensors.

    Args:
      pad_id: id of the padding token.
      extra: JSON values, stored in config.json for `read_folder`.

    Raises:
      ConversionError: no transformers class can compute this network; nothing is written.
    """
    content = huggingface_config.to_json(network, pad_id=pad_id, extra=dict(extra or {}))
    folder.mkdir(parents=True, exist_ok=True)
    weight_files.write_weights(folder, to_tensors(network))
    (folder / huggingface_config.FILE).write_text(json.dumps(content, indent=2) + "\n")


def to_tensors(network: Network) -> dict[str, np.ndarray]:
    """Returns the tensors that the class of a network saves, without tied copies."""
    huggingface_config.check_expressible(network)
    name = huggingface_config.architecture(network)
    try:
        places = huggingface_places(
            network.parameters,
            network.family,
            network.layer,
            prefix="" if name.endswith("Model") else f"{network.family}.",
        )
    except KeyError as error:
        raise ConversionError(
            f"{name} has no parameter for {error.args[0]}. Fine-tune with "
            "--config.finetune.head=auto, which selects a head that transformers supports.",
            field=error.args[0],
        ) from None
    return {
        place.name: place.layout.write(np.asarray(network.parameters[path]))
        for path, place in places.items()
    }


def read_folder(folder: Path) -> Source:
    """Reads a Hugging Face folder, with the generator if it is an export of this package.

    Raises:
      ConversionError: a file is damaged, incomplete, or contradicts another one.
    """
    folder = Path(folder)
    mark.read(folder)
    names = {"main": folder}
    if (folder / GENERATOR).is_dir():
        names["generator"] = folder / GENERATOR
        if not (folder / GENERATOR / huggingface_config.FILE).exists():
            raise ConversionError(
                f"{folder / GENERATOR} has no {huggingface_config.FILE}. Copy it again, or remove "
                "the folder to read the model without its generator.",
                path=folder / GENERATOR,
            )
    networks, ignored, extra = {}, [], {}
    for name, place in names.items():
        networks[name], left, extra[name] = _read_network(place)
        ignored += [f"{name}:{tensor}" for tensor in left]
    return Source(networks, tuple(ignored), extra)


def _read_network(folder: Path) -> tuple[Network, list[str], dict[str, Any]]:
    content = huggingface_config.read(folder)
    family, embeddings, encoder = huggingface_config.sizes(content)
    tensors = {_modern_name(name): leaf for name, leaf in weight_files.read_weights(folder).items()}
    network, left = from_tensors(tensors, family, embeddings, encoder, content=content)
    check_finite(network.parameters, str(folder))
    ours = content.get(huggingface_config.OURS)
    return network, left, dict(ours) if isinstance(ours, dict) else {}


def from_tensors(
    tensors: Mapping[str, np.ndarray], family: str, embeddings, encoder, *, content: Mapping
) -> tuple[Network, list[str]]:
    """Builds a network from PyTorch tensors.

    Args:
      content: content of config.json, which distinguishes heads with the same tensors.

    Returns:
      the network and the names of unused tensors.

    Raises:
      ConversionError: a tensor is missing or of another shape, or tied tensors differ.
    """
    layer = check_same_layers(encoder)
    if encoder.depth * LEAST_PARAMETERS > len(tensors):  # before allocating anything per layer
        raise ConversionError(
            f"config.json has num_hidden_layers={encoder.depth}, but the weights have only "
            f"{len(tensors)} tensors. Copy both files from the same model.",
            field="num_hidden_layers",
            value=encoder.depth,
        )
    prefix = f"{family}." if any(name.startswith(f"{family}.") for name in tensors) else ""
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
    use = huggingface_config.read_use(content) if huggingface_config.TUNED & set(heads) else {}
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
