"""Files that tell sentence-transformers how vectors are computed from an encoder.

They are next to the encoder, in the root of a Hugging Face folder:

modules.json                        the modules: encoder, pooling and, optionally, normalization
1_Pooling/config.json               the kind of pooling
2_Normalize/                        without content
config_sentence_transformers.json   prompts
sentence_bert_config.json           the maximum number of tokens
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.config import Config
from convbert_jax.config.training import POOLINGS
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import read_count, read_json, shown

MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_LENGTH = "sentence_bert_config.json"
_POOLING = "1_Pooling"
_MODES = {"cls": "cls_token", "mean": "mean_tokens"}  # mode -> its name before version 6
_SUPPORTED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_CLASSES = "sentence_transformers.models."  # a name that all versions import


@dataclasses.dataclass(frozen=True)
class VectorConfig:
    """How the vector of a text is computed.

    Attributes:
      pooling: a key of `POOLINGS`.
      normalize: whether vectors are divided by their L2 norm.
      prompts: name -> text that is put before the text.
      default_prompt: name of the prompt that is used if none is named; "" uses none.
      length: maximum tokens of a text, including special tokens; None for the positions of the
        model.
    """

    pooling: str = "mean"
    normalize: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str = ""
    length: int | None = None


def of_run(config: Config) -> VectorConfig | None:
    """Returns how a run trained vectors; None for a run of another recipe.

    Vectors are normalized because the loss compares them by their cosine. The prompts, which the
    run separates from texts by a space, have the names that `SentenceTransformer.encode_query` and
    `encode_document` use.
    """
    if config.recipe != "embedding":
        return None
    texts = (text and f"{text} " for text in config.parallel.prompts)
    prompts = dict(zip(("query", "document"), texts, strict=False))
    length = config.parallel.max_length
    return VectorConfig(config.objective.pooling, True, prompts, length=length)


def read(folder: Path) -> VectorConfig | None:
    """Reads the files of a folder; None if it is not a folder of a SentenceTransformer.

    Raises:
      ConversionError: a file is damaged, or a module, pooling or option is not supported.
    """
    if not (folder / MODULES).is_file():
        return None
    settings = _read(folder / _PROMPTS)
    if settings.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return None
    names = _module_names(folder / MODULES)
    if names not in _SUPPORTED:
        raise ConversionError(
            f"{folder / MODULES} has the modules {', '.join(names)}; supported are "
            f"{' and '.join(', '.join(each) for each in _SUPPORTED)}. Remove {MODULES} to load the "
            "encoder alone.",
            field=MODULES,
            value=names,
            path=folder / MODULES,
        )
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name") or ""
    told = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not told or default not in ("", *prompts):
        raise ConversionError(
            f"{folder / _PROMPTS} has prompts={shown(prompts)} and default_prompt_name="
            f"{shown(default)}, expected texts by name and one of the names. Copy it again.",
            field="prompts",
            value=prompts,
            path=folder / _PROMPTS,
        )
    return VectorConfig(
        _read_pooling(folder / _POOLING / "config.json", prompts),
        "Normalize" in names,
        prompts,
        default,
        _read_length(folder),
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _module_names(path: Path) -> list[str]:
    """Returns the classes of the modules; a class outside of sentence-transformers as its path."""
    modules = read_json(path, list)
    if not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in modules):
        raise ConversionError(f"{path} is damaged: a module has no type. Copy it again.", path=path)
    types = [module["type"] for module in modules]
    own = "sentence_transformers."
    return [name.rpartition(".")[2] if name.startswith(own) else name for name in types]


def _read_pooling(path: Path, prompts: Mapping[str, str]) -> str:
    content = read_json(path)
    modes = content.get("pooling_mode")
    if modes is None:  # before version 6
        start = "pooling_mode_"
        ends = {start + end: mode for mode, end in _MODES.items()}
        modes = [ends.get(name, name) for name, on in content.items() if start in name and on]
    modes = modes if isinstance(modes, list) else [modes]
    found = [name for name, parts in POOLINGS.items() if [*parts] == modes]
    if not found:
        raise ConversionError(
            f"{path} has the pooling {', '.join(map(str, modes)) or 'none'}; supported are "
            f"{', '.join(_MODES)} and both. Remove {MODULES} to load the encoder alone.",
            field="pooling_mode",
            value=modes,
            path=path,
        )
    if content.get("include_prompt") is False and any(prompts.values()):
        raise ConversionError(
            f"{path} has include_prompt=false, which is not supported. Remove {MODULES} to load "
            "the encoder alone.",
            field="include_prompt",
            value=False,
            path=path,
        )
    return found[0]


def _read_length(folder: Path) -> int | None:
    content = _read(folder / _LENGTH)
    if content.get("do_lower_case"):
        raise ConversionError(
            f"{folder / _LENGTH} has do_lower_case={shown(content['do_lower_case'])}, which is not "
            "supported. If the vocabulary is lowercase, set it to false.",
            field="do_lower_case",
            value=content["do_lower_case"],
            path=folder / _LENGTH,
        )
    if content.get("max_seq_length") is not None:
        return read_count(content, "max_seq_length", file=_LENGTH)
    tokenizer = _read(folder / "tokenizer_config.json")
    length = tokenizer.get("model_max_length")  # a float of 1e30 means no limit
    return length if type(length) is int and 0 < length < 1 << 20 else None


def write(folder: Path, vectors: VectorConfig, *, hidden_size: int, positions: int) -> None:
    """Writes the files into a Hugging Face folder, readable by all versions since 2.

    Args:
      hidden_size: size of the hidden states.
      positions: positions of the model, the maximum tokens if `vectors` has none.
    """
    names = [("", "Transformer"), (_POOLING, "Pooling")]
    if vectors.normalize:
        names.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": _CLASSES + name}
        for index, (path, name) in enumerate(names)
    ]
    parts = POOLINGS[vectors.pooling]
    modes = {f"pooling_mode_{end}": mode in parts for mode, end in _MODES.items()}
    contents = {
        MODULES: modules,
        f"{_POOLING}/config.json": {"word_embedding_dimension": hidden_size, **modes},
        _PROMPTS: {
            "model_type": "SentenceTransformer",
            "prompts": dict(vectors.prompts),
            "default_prompt_name": vectors.default_prompt or None,
            "similarity_fn_name": "cosine",
        },
        _LENGTH: {
            "max_seq_length": min(vectors.length or positions, positions),
            "do_lower_case": False,
        },
    }
    for path, content in contents.items():
        (folder / path).parent.mkdir(exist_ok=True)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / path).write_text(text, encoding="utf-8")


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Divides vectors [..., C] by their L2 norm; vectors of zeros are unchanged."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
