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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import ConfigError, ModelSection
from convbert_jax.config.sequences import (
    EncoderDecoderConfig,
    LanguageModelConfig,
    SequenceSection,
    derive_encoder_decoder,
    derive_language_model,
)
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop import pytorch
from convbert_jax.interop.claims import check_finite, shown
from convbert_jax.interop.fairseq.arguments import Outline, derive_outline, find_arguments
from convbert_jax.interop.fairseq.dictionaries import SPECIAL_IDS, Dictionary, read_dictionary
from convbert_jax.interop.fairseq.names import to_parameters
from convbert_jax.interop.networks import ConversionError
from convbert_jax.models.sequences.networks import EncoderDecoder, LanguageModel

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
    content = pytorch.read(path)
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
    tensors = pytorch.to_arrays(path, content.get("model"))
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
