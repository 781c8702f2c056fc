"""Reader of fairseq checkpoints: config sections, parameters and dictionaries.

    found = read(Path("wmt16.en-de.joined-dict.dynamicconv-glu"))
    model = found.build()
    ids = found.dictionaries[0].encode("a tokeni@@ zed text .")

The model computes the outputs of fairseq's model for rows in fairseq's format: a source ends with
</s>, a target begins and ends with </s>. fairseq pads sources on the left and numbers positions
without padding; this package pads on the right. Neither reads padding, so outputs at real tokens
agree.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import ConfigError, ModelSection
from convbert_jax.config.network import (
    EncoderDecoderConfig,
    LanguageModelConfig,
    derive_encoder_decoder,
    derive_language_model,
)
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interfaces import SpecialIds
from convbert_jax.interop import weight_files
from convbert_jax.interop.fairseq_arguments import Outline, derive_outline, find_arguments
from convbert_jax.interop.networks import ConversionError, to_tree
from convbert_jax.interop.weight_files import check_finite, shown
from convbert_jax.models.networks import EncoderDecoder, LanguageModel
from convbert_jax.training.partitioning import flatten_params

BEGIN, PAD, END, UNKNOWN = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
# Decoders begin and end with </s>, so it is both [CLS] and [SEP]. fairseq does not use <s>.
SPECIAL_IDS = SpecialIds(
    pad=SPECIAL.index(PAD),
    unknown=SPECIAL.index(UNKNOWN),
    cls=SPECIAL.index(END),
    sep=SPECIAL.index(END),
    mask=SPECIAL.index(BEGIN),
)
_OVERWRITES = "#fairseq:overwrite"
_LARGEST = 1 << 28  # bytes
_CONTINUES = "@@"  # ends a piece whose word continues in the next piece (subword-nmt, fastBPE)
_FACTORS = [1 << power for power in range(11)]  # sizes are padded to a multiple; usually of 8


@dataclasses.dataclass(frozen=True)
class Dictionary:
    """Words by id.

    Attributes:
      entries: <s>, <pad>, </s> and <unk>, then the words of the file. If a later line overwrites a
        word, both entries are kept and the word is encoded as the later id.
    """

    entries: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text, with </s> at the end.

        Args:
          text: pieces separated by spaces, tokenized as the training texts. Special words in the
            text are encoded as <unk>.
        """
        words = text.split()
        return [*(self._ids.get(word, SPECIAL_IDS.unknown) for word in words), SPECIAL_IDS.sep]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to </s>, with pieces joined; omits <s>, <pad> and </s>."""
        words = []
        for index in ids:
            if index == SPECIAL_IDS.sep and words:
                break
            if self.entries[index] not in (BEGIN, PAD, END):
                words.append(self.entries[index])
        return f"{' '.join(words)} ".replace(f"{_CONTINUES} ", "").rstrip()

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        ids = {word: index for index, word in enumerate(self.entries)}
        return {word: index for word, index in ids.items() if word not in SPECIAL}


def read_dictionary(path: Path, rows: int) -> Dictionary:
    """Reads a dictionary and pads it with made-up words as fairseq does.

    Args:
      rows: rows of the embedding table: the number of words, or this number rounded up to a
        multiple of a power of 2.

    Raises:
      ConversionError: the file is missing, not UTF-8 or of another size, a line is not `word
        count`, or a word is repeated without `#fairseq:overwrite`.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
            raise ConversionError(
                f"{path} is not a regular file or is too large for a dictionary. Copy it again.",
                path=path,
            )
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(
            f"Cannot read {path}: {error.strerror}. Copy the dictionaries into the folder of the "
            "fairseq model.",
            path=path,
        ) from None
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"{path} is not UTF-8: first invalid byte at {error.start}. Copy it again.", path=path
        ) from None
    entries = list(SPECIAL)
    known = set(entries)
    lines = re.split(r"\r\n|\r|\n", text)
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        found = _parse(line)
        if found is None:
            raise ConversionError(
                f"{path}, line {number}: {shown(line)} is not `word count`. The file is damaged or "
                "not a fairseq dictionary; copy it again.",
                value=line,
                path=path,
                line=number,
            )
        word, overwrites = found
        if word in known and not overwrites:
            raise ConversionError(
                f"{path}, line {number}: {shown(word)} repeats an earlier word without "
                f"{_OVERWRITES} at the end of the line. Copy the file again.",
                value=word,
                path=path,
                line=number,
            )
        known.add(word)
        entries.append(word)
    if rows not in {-(-len(entries) // factor) * factor for factor in _FACTORS}:
        raise ConversionError(
            f"{path} has {len(entries):,} words, including four special ones, but the embedding "
            f"table of the model has {rows:,} rows. Use the dictionary of this model.",
            path=path,
        )
    number = 0
    while len(entries) < rows:
        word = f"madeupword{number:04d}"
        if word not in known:
            entries.append(word)
        number += 1
    return Dictionary(tuple(entries))


def _parse(line: str) -> tuple[str, bool] | None:
    """Returns (word, whether it overwrites an earlier one), or None if malformed."""
    word, _, count = line.rstrip().rpartition(" ")
    overwrites = count == _OVERWRITES
    if overwrites:
        word, _, count = word.rpartition(" ")
    return (word, overwrites) if word and re.fullmatch(r"[+-]?[0-9]+", count) else None


PADDING = 1  # id of <pad>; the first position has row PADDING + 1 of a position table
# Buffers, not parameters: a version, sinusoids and their dtype. Also fused copies of weights for a
# faster path, which fairseq since 0.12 recomputes when it loads an encoder.
_NONE = re.compile(
    r"(encoder|decoder)\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
# Transformers only: LightConv's encoder still numbers its norms.
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
# Module path in a layer -> fairseq name, for convolution and attention layers.
_CONVOLVES = {
    "mixer": "conv",  # parameters of the convolution
    "mixer/value": "linear1",  # the second half of fairseq's linear1 is the gate
    "mixer/gate": "linear1.gate",
    "mixer/output": "linear2",
    "feed_forward/intermediate": "fc1",
    "feed_forward/output": "fc2",
}
_ATTENDS = {
    **{f"mixer/{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "mixer_norm": "self_attn_layer_norm",
    "feed_forward/intermediate": "fc1",
    "feed_forward/output": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_READS = {
    **{f"source/{ours}": f"encoder_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "source_norm": "encoder_attn_layer_norm",
}
_LAYERS = {
    ("encoder", False): _CONVOLVES
    | {"mixer_norm": "layer_norms.0", "feed_forward_norm": "layer_norms.1"},
    ("decoder", False): _CONVOLVES
    | _READS
    | {"mixer_norm": "conv_layer_norm", "feed_forward_norm": "final_layer_norm"},
    ("encoder", True): _ATTENDS,
    ("decoder", True): _ATTENDS | _READS,
}
# Modules outside of the layers.
_OUTSIDE = {
    "source/word": "encoder.embed_tokens",
    "source/position": "encoder.embed_positions",
    "encoder/norm": "encoder.layer_norm",
    "target/word": "decoder.embed_tokens",
    "target/position": "decoder.embed_positions",
    "decoder/norm": "decoder.layer_norm",
    "output": "decoder.output_projection",
}
_LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "scale": "weight",
    "embedding": "weight",
    "filters": "weight",
    "conv_kernel": "weight_linear.weight",
}


def to_parameters(
    tensors: Mapping[str, np.ndarray], config: EncoderDecoderConfig | LanguageModelConfig
) -> dict:
    """Converts fairseq tensors to parameters of a model of `config`.

    Every tensor is used exactly once, except copies of tied ones, which must be equal.

    Args:
      tensors: the tensors of fairseq's `model` by name.

    Returns:
      a nested dict of float32 arrays.

    Raises:
      ConversionError: tensors are missing, unknown or of another shape, or tied tensors differ.
    """
    shapes = _shapes(config)
    places = _tensor_names(shapes)
    wanted = {name for names in places.values() for name in names}
    theirs = _without_copies(_modern(tensors, wanted), wanted)
    _check_all(wanted - theirs.keys(), "lacks")
    _check_all(theirs.keys() - wanted, "has the unknown tensors")
    flat = {}
    for path, names in places.items():
        leaf = path.rpartition("/")[2]
        arrays = [_turned(path, leaf, theirs[name]) for name in names]
        stacked = "/stages/" in path
        shape = shapes[path][1:] if stacked else shapes[path]
        for name, array in zip(names, arrays, strict=True):
            if array.shape != shape:
                raise ConversionError(
                    f"Tensor {name} gives {path} the shape {list(array.shape)}, but the args "
                    f"require {list(shape)}. The checkpoint is damaged or from a fork of fairseq.",
                    field=name,
                )
        flat[path] = np.stack(arrays) if stacked else arrays[0]
    return to_tree(flat)


def _shapes(config: EncoderDecoderConfig | LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by path."""
    make = LanguageModel if isinstance(config, LanguageModelConfig) else EncoderDecoder
    model = nnx.eval_shape(lambda: make(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: leaf.shape for path, leaf in flatten_params(params).items()}


def _tensor_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Returns path -> fairseq names: a single name, or one for each layer of a stage."""
    depths = {
        tuple(path.split("/")[:3:2]): shape[0]
        for path, shape in shapes.items()
        if "/stages/" in path
    }
    places = {}
    for path, shape in shapes.items():
        module, _, leaf = path.rpartition("/")
        if "/stages/" not in path:
            places[path] = [f"{_OUTSIDE[module]}.{_LEAVES[leaf]}"]
            continue
        side, _, stage, inner = module.split("/", 3)
        table = _LAYERS[side, f"{side}/stages/{stage}/mixer/query/kernel" in shapes]
        first = sum(depths[side, str(before)] for before in range(int(stage)))
        places[path] = [
            f"{side}.layers.{layer}.{table[inner]}.{_LEAVES[leaf]}"
            for layer in range(first, first + shape[0])
        ]
    return places


def _modern(tensors: Mapping[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """Renames tensors to current fairseq names and splits fused ones."""
    modern: dict[str, np.ndarray] = {}
    for old, array in tensors.items():
        if _NONE.fullmatch(old):
            continue
        name = "decoder.output_projection.weight" if old == "decoder.embed_out" else old
        match = re.fullmatch(r"(encoder|decoder)(\.layers\.\d+\.)layer_norms\.(\d)(\.\w+)", name)
        if match and name not in wanted:
            side, layer, number, leaf = match.groups()
            norms = _OLD_NORMS[side]
            name = f"{side}{layer}{norms[int(number) % len(norms)]}{leaf}"
        parts = {name: array}
        for whole, inside in (
            (r"(.*_attn\.)in_proj_(weight|bias)", ("q_proj", "k_proj", "v_proj")),
            (r"(.*\.)linear1\.(weight|bias)", ("linear1", "linear1.gate")),
        ):
            match = re.fullmatch(whole, name)
            named = match and [f"{match[1]}{part}.{match[2]}" for part in inside]
            if named and wanted.issuperset(named) and array.ndim and len(array) % len(named) == 0:
                parts = dict(zip(named, np.split(array, len(named)), strict=True))
        for part, value in parts.items():
            if part in modern:
                raise ConversionError(
                    f"The model contains {shown(part)} under two names; the checkpoint is damaged.",
                    field=part,
                )
            modern[part] = value
    return modern


def _without_copies(tensors: Mapping[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """Returns the tensors without copies of tied ones."""
    table = "decoder.embed_tokens.weight"
    kept = dict(tensors)
    for copy in ("encoder.embed_tokens.weight", "decoder.output_projection.weight"):
        if copy in wanted or copy not in kept or table not in kept:
            continue
        if not np.array_equal(kept.pop(copy), kept[table]):
            raise ConversionError(
                f"The args tie {copy} to {table}, but the two differ; the checkpoint is damaged.",
                field=copy,
            )
    return kept


def _check_all(names: set[str], what: str) -> None:
    if names:
        some = ", ".join(shown(name) for name in sorted(names)[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConversionError(
            f"The model {what} {some}{more}. Its args describe another model, or it is from a fork "
            "of fairseq.",
            field=min(names),
        )


def _turned(path: str, leaf: str, array: np.ndarray) -> np.ndarray:
    """Converts an array from fairseq's layout to the layout of this package."""
    if leaf in ("kernel", "conv_kernel"):
        return np.ascontiguousarray(array.T)
    if leaf == "filters" and array.ndim == 3 and array.shape[1] == 1:
        return array[:, 0]  # [H, 1, K]; fairseq's GPU kernels store [H, K]
    if path.endswith("position/embedding"):
        return array[PADDING + 1 :]
    return array


MODEL = "model.pt"  # file name in released folders
_ALONE = "dict.txt"  # dictionary of a language model


@dataclasses.dataclass(frozen=True)
class FairseqModel:
    """A fairseq model in the format of this package.

    Attributes:
      model, sequence: config sections that describe the model.
      config: network config from these sections and the sizes of the dictionaries.
      params: parameters, a nested dict of float32 arrays.
      dictionaries: of source and target, or the one of a language model, with fairseq's ids.
      special: special ids of all dictionaries. [CLS] and [SEP] are both </s>, because fairseq's
        decoders begin with the token that they end with.
      left_out: training arguments without an equivalent here, with their values.
    """

    model: ModelSection
    sequence: SequenceSection
    config: EncoderDecoderConfig | LanguageModelConfig
    params: dict
    dictionaries: tuple[Dictionary, ...]
    special: SpecialIds
    left_out: Mapping[str, Any]

    def build(self) -> EncoderDecoder | LanguageModel:
        """Builds the model with its parameters."""
        make = LanguageModel if isinstance(self.config, LanguageModelConfig) else EncoderDecoder
        outline = nnx.eval_shape(lambda: make(self.config, nnx.Rngs(0)))
        return nnx.merge(nnx.graphdef(outline), jax.tree.map(jnp.asarray, self.params))


def read(path: Path) -> FairseqModel:
    """Reads a LightConv, DynamicConv or Transformer checkpoint with its dictionaries.

    Does not need fairseq and executes nothing in the file.

    Args:
      path: the file, or a folder with `model.pt`. The same folder contains `dict.LANGUAGE.txt` of
        both languages, or `dict.txt` of a language model.

    Raises:
      ConversionError: a file is missing, damaged or not from fairseq; an argument of the model is
        not supported; a parameter is missing, unknown, of another shape, NaN or infinite.
    """
    path = path / MODEL if path.is_dir() else path
    content = weight_files.read_pytorch(path)
    try:
        return _convert(path, content)
    except (ConversionError, ConfigError) as error:
        text = str(error)
        raise ConversionError(
            text if str(path.parent) in text else f"{path}: {text}",
            field=error.field,
            value=error.value,
            path=error.path or path,
            line=error.line,
        ) from None


def _convert(path: Path, content: Any) -> FairseqModel:
    arguments = find_arguments(content)
    tensors = weight_files.to_arrays(path, content.get("model"))
    outline = derive_outline(arguments, tensors)
    dictionaries = _read_dictionaries(path.parent, outline, tensors)
    sizes = [len(dictionary.entries) for dictionary in dictionaries]
    derive = derive_language_model if outline.alone else derive_encoder_decoder
    config = derive(outline.model, outline.sequence, *sizes)
    check_finite(tensors, "The model")
    return FairseqModel(
        model=outline.model,
        sequence=outline.sequence,
        config=config,
        params=to_parameters(tensors, config),
        dictionaries=dictionaries,
        special=SPECIAL_IDS,
        left_out=outline.left_out,
    )


def _read_dictionaries(
    folder: Path, outline: Outline, tensors: Mapping[str, np.ndarray]
) -> tuple[Dictionary, ...]:
    """Reads the dictionaries next to a model; each has as many words as its table has rows."""
    sides = ("decoder",) if outline.alone else ("encoder", "decoder")
    names = (_ALONE,)
    if not outline.alone:
        for language in outline.languages:
            if not language or Path(language).name != language or len(language) > 99:
                raise ConversionError(
                    f"Cannot find the dictionaries: the args name the language {shown(language)}. "
                    "Set source_lang and target_lang in the checkpoint.",
                    value=language,
                )
        names = tuple(f"dict.{language}.txt" for language in outline.languages)
    found = []
    for side, name in zip(sides, names, strict=True):
        table = tensors.get(f"{side}.embed_tokens.weight")
        if table is None or not table.shape:
            raise ConversionError(
                f"The model lacks {side}.embed_tokens.weight; the checkpoint is damaged.",
                field=f"{side}.embed_tokens.weight",
            )
        found.append(read_dictionary(folder / name, table.shape[0]))
    if outline.sequence.shared_vocabulary and found[0].entries != found[-1].entries:
        raise ConversionError(
            f"{folder / names[0]} and {folder / names[1]} differ, but the args of the model "
            "require a shared dictionary. Use the dictionaries of this model.",
            path=folder / names[0],
        )
    return tuple(found)
