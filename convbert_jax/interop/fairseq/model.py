"""A checkpoint of fairseq as a model of ours: sections, parameters, dictionaries.

    found = read(Path("wmt16.en-de.joined-dict.dynamicconv-glu"))
    model = found.build()
    ids = found.dictionaries[0].encode("a tokeni@@ zed text .")

Of rows as fairseq makes them the model gives what fairseq's gives: a source is its ids with </s>
behind them, a target begins and ends with </s>. fairseq pads sources on the left and counts places
over what is no padding; here padding stands on the right, and neither reads it, so that all real
tokens have the same numbers.
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

MODEL = "model.pt"  # in a folder of a release
_ALONE = "dict.txt"  # dictionary of a language model


@dataclasses.dataclass(frozen=True)
class FairseqModel:
    """A model that was read.

    Attributes:
      model, sequence: the sections that describe it.
      config: the same with the sizes of the dictionaries, as the network's class takes it.
      params: its parameters, a nested dict of float32 arrays.
      dictionaries: of source and target, or the one of a language model; ids are fairseq's.
      special: ids of them all: [CLS] and [SEP] are both </s>, as fairseq's decoders begin with the
        token that they end with.
      left_out: arguments of training without a counterpart here, with their values.
    """

    model: ModelSection
    sequence: SequenceSection
    config: EncoderDecoderConfig | LanguageModelConfig
    params: dict
    dictionaries: tuple[Dictionary, ...]
    special: SpecialIds
    left_out: Mapping[str, Any]

    def build(self) -> EncoderDecoder | LanguageModel:
        """The model itself."""
        make = LanguageModel if isinstance(self.config, LanguageModelConfig) else EncoderDecoder
        outline = nnx.eval_shape(lambda: make(self.config, nnx.Rngs(0)))
        return nnx.merge(nnx.graphdef(outline), jax.tree.map(jnp.asarray, self.params))


def read(path: Path) -> FairseqModel:
    """A checkpoint of LightConv, DynamicConv or a Transformer, with the dictionaries beside it.

    fairseq is not needed, and nothing in the file is executed.

    Args:
      path: of the file, or of a folder with `model.pt`; `dict.LANGUAGE.txt` of both languages, of a
        language model `dict.txt`, are in the same folder.

    Raises:
      ConversionError: a file is absent, damaged or not fairseq's; an argument of the model has no
        counterpart; a parameter is missing, left or of another shape; a number is none.
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
    check_finite(tensors, "it")
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
    """Those beside a model, each as large as its table."""
    sides = ("decoder",) if outline.alone else ("encoder", "decoder")
    names = (_ALONE,)
    if not outline.alone:
        for language in outline.languages:
            if not language or Path(language).name != language or len(language) > 99:
                raise ConversionError(
                    f"its args name the language {shown(language)}, so its dictionaries cannot be "
                    "found; they must have source_lang and target_lang.",
                    value=language,
                )
        names = tuple(f"dict.{language}.txt" for language in outline.languages)
    found = []
    for side, name in zip(sides, names, strict=True):
        table = tensors.get(f"{side}.embed_tokens.weight")
        if table is None or not table.shape:
            raise ConversionError(
                f"its model lacks {side}.embed_tokens.weight; it is damaged.",
                field=f"{side}.embed_tokens.weight",
            )
        found.append(read_dictionary(folder / name, table.shape[0]))
    if outline.sequence.shared_vocabulary and found[0].entries != found[-1].entries:
        raise ConversionError(
            f"{folder / names[0]} and {folder / names[1]} differ, but its args say that they are "
            "one; they belong to another model.",
            path=folder / names[0],
        )
    return tuple(found)
