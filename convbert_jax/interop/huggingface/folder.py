"""Folders that Hugging Face's `from_pretrained` loads: written from a network, and read.

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

GENERATOR = "generator"  # the folder of the generator inside of the main one


@dataclasses.dataclass(frozen=True)
class Source:
    """What was read.

    Attributes:
      networks: "main" and, if there is one, "generator".
      ignored: tensors without a place in our networks.
      extra: what the writer kept for us in config.json, by network.
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
      extra: JSON, kept in config.json for `read_folder`.

    Raises:
      ConversionError: their classes cannot compute this network; nothing is written.
    """
    content = huggingface_config.to_json(network, pad_id=pad_id, extra=dict(extra or {}))
    folder.mkdir(parents=True, exist_ok=True)
    weight_files.write_weights(folder, to_tensors(network))
    (folder / huggingface_config.FILE).write_text(json.dumps(content, indent=2) + "\n")


def to_tensors(network: Network) -> dict[str, np.ndarray]:
    """The tensors of a network as their class saves them: tied copies are left out."""
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
            f"{name} has no name for {error.args[0]}; fine-tune with --config.finetune.head=auto, "
            "which with an encoder that Hugging Face has takes heads that it has.",
            field=error.args[0],
        ) from None
    return {
        place.name: place.layout.write(np.asarray(network.parameters[path]))
        for path, place in places.items()
    }


def read_folder(folder: Path) -> Source:
    """Reads a folder of theirs, or of ours with its generator.

    Raises:
      ConversionError: what is there cannot be read, is not complete, or contradicts itself.
    """
    folder = Path(folder)
    mark.read(folder)
    names = {"main": folder}
    if (folder / GENERATOR).is_dir():
        names["generator"] = folder / GENERATOR
        if not (folder / GENERATOR / huggingface_config.FILE).exists():
            raise ConversionError(
                f"{folder / GENERATOR} has no {huggingface_config.FILE}, without which the "
                "generator cannot be read; copy it again, or take that folder away to read the "
                "model without a generator.",
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
    """(network, names of the tensors that it has no place for).

    Args:
      content: of config.json; tells heads apart that have the same tensors.

    Raises:
      ConversionError: a tensor is missing or of another shape, or a tied one is not tied.
    """
    layer = check_same_layers(encoder)
    if encoder.depth * LEAST_PARAMETERS > len(tensors):  # before anything is made for each layer
        raise ConversionError(
            f"config.json has num_hidden_layers={encoder.depth}, but the weights are "
            f"{len(tensors)} tensors; the two do not belong together.",
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
            f"the weights lack {len(missing)} tensors that config.json asks for, first "
            f"{missing[0]}; the two do not belong together, or the file is cut off.",
            field=missing[0],
        )
    parameters = {}
    for path, place in places.items():
        if tensors[place.name].dtype != np.float32:
            raise ConversionError(
                f"tensor {place.name} holds {tensors[place.name].dtype}, but weights are floating "
                "numbers; save the model again without quantization.",
                field=place.name,
            )
        array = _read_array(place, tensors[place.name])
        if array is None or array.shape != expected[path]:
            theirs = place.layout.write(np.broadcast_to(0.0, expected[path])).shape
            raise ConversionError(
                f"tensor {place.name} has shape {tensors[place.name].shape}, but config.json "
                f"makes it {theirs}; the two do not belong together.",
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
                f"{copy} differs from {original}, but here the output layer is the embedding "
                "table; such a model cannot be read.",
                field=copy,
            )
    used = {place.name for place in places.values()} | set(copies)
    labels = _label_names(content.get("id2label"), heads)
    use = huggingface_config.read_use(content) if huggingface_config.TUNED & set(heads) else {}
    network = Network(family, embeddings, encoder, parameters, labels, use)
    return network, sorted(set(tensors) - used)


def _read_array(place, array: np.ndarray) -> np.ndarray | None:
    """Our form of a tensor, None if it does not have the dimensions for it."""
    try:
        return np.ascontiguousarray(place.layout.read(array))
    except (ValueError, IndexError):
        return None


def _find_heads(
    tensors: Mapping[str, np.ndarray], family: str, layer: LayerConfig, content
) -> dict[str, int]:
    """Head -> number of its logits, for those whose first tensor is there."""
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
        # A `classifier` too: BertForSequenceClassification's, behind a pooler that we lack, and the
        # one of ForMultipleChoice, of a whole text.
        tags = family != "bert" or name.endswith("ForTokenClassification")
        tags = tags and not name.endswith("ForMultipleChoice")
        if tensor in tensors and tensors[tensor].ndim == 1 and (head != "token_head" or tags):
            found[head] = len(tensors[tensor])
    return found


def _label_names(id2label, heads: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the logits; theirs leaves out LABEL_0 and LABEL_1, and a list is as good.

    Raises:
      ConversionError: names that are not those of so many logits, each its own.
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
            f"config.json has id2label={shown(id2label)}, but the head gives {count} logits; name "
            "as many.",
            field="id2label",
            value=id2label,
        )
    found: dict[str, str] = {}  # name -> its first place
    for place in places:
        name = listed.get(place, f"LABEL_{place}")
        if name is None or isinstance(name, list | dict):
            raise ConversionError(
                f"config.json has {shown(name)} as label {place} in id2label; write its name.",
                field="id2label",
                value=name,
            )
        first = found.setdefault(str(name), place)
        if first != place:
            raise ConversionError(
                f"config.json calls the labels {first} and {place} both {shown(name)} in id2label; "
                "give each a name of its own.",
                field="id2label",
                value=name,
            )
    return tuple(found)


def _modern_name(name: str) -> str:
    """Files of before 2020 call the parameters of a layer norm gamma and beta."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
