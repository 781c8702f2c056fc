"""A checkpoint of the pre-trained convolutions (Tay et al. 2021) as a model of ours.

    found = read(Path("model.ckpt-524288"))
    model = found.build()

Of rows as T5 makes them, a source and a target that end with </s> (1), a decoder that begins with
the id of padding (0), the model gives what Mesh TensorFlow gives in training without dropout. There
a row may hold several texts, over whose bounds its convolutions read; here they do not. When it
writes, its convolutions read what the decoder begins with, which in training they did not; here
they do as in training, or as there by `forms`.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import ConfigError, ModelSection
from convbert_jax.config.sequences import (
    EncoderDecoderConfig,
    SequenceSection,
    derive_encoder_decoder,
)
from convbert_jax.interop.claims import check_finite
from convbert_jax.interop.mesh_tensorflow.names import check_all, to_parameters
from convbert_jax.interop.mesh_tensorflow.outline import (
    GIN,
    derive_outline,
    read_gin,
    weights_of,
)
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.tensorflow1.checkpoint import (
    STEP,
    check_type,
    find_prefix,
    read_step,
)
from convbert_jax.interop.tensorflow1.tensor_bundle import Bundle
from convbert_jax.models.sequences.networks import EncoderDecoder

PAD, END, UNKNOWN = 0, 1, 2  # in every vocabulary of T5's


@dataclasses.dataclass(frozen=True)
class MeshModel:
    """A model that was read.

    Attributes:
      model, sequence: the sections that describe it.
      config: the same with the size of the vocabulary, as the network's class takes it.
      params: its parameters, a nested dict of float32 arrays.
      words: rows of its table, which are filled up to a multiple of 128.
      step: of its training; 0 if it does not say.
    """

    model: ModelSection
    sequence: SequenceSection
    config: EncoderDecoderConfig
    params: dict
    words: int
    step: int

    def build(self) -> EncoderDecoder:
        """The model itself."""
        outline = nnx.eval_shape(lambda: EncoderDecoder(self.config, nnx.Rngs(0)))
        return nnx.merge(nnx.graphdef(outline), jax.tree.map(jnp.asarray, self.params))


def forms(sequence: SequenceSection) -> tuple[tuple[str, ...], ...]:
    """config.sequence.decoder_mixer_fields of a model as it was trained, the first, and as Mesh
    TensorFlow's search computes it, whose convolutions read what the decoder begins with.
    """
    others = tuple(f for f in sequence.decoder_mixer_fields if not f.startswith("reads_begin"))
    return (*others, "reads_begin=false"), (*others, "reads_begin=true")


def read(path: Path) -> MeshModel:
    """A checkpoint of LightConv or DynamicConv as they were pre-trained; no TensorFlow is needed.

    Args:
      path: its prefix, as model.ckpt-524288, one of its files or its folder.

    Raises:
      ConversionError: a file is absent or damaged; a variable is missing, left, of another shape or
        type; a number is none; or it is another model, T5's Transformer for one.
    """
    prefix = find_prefix(path)
    if prefix is None:
        raise ConversionError(f"{path} is no TensorFlow checkpoint (FILE.index, FILE.data-*).")
    bundle = Bundle(prefix)
    try:
        return _convert(bundle, read_gin(prefix.with_name(GIN)))
    except (ConversionError, ConfigError) as error:
        text = str(error)
        raise ConversionError(text if str(prefix) in text else f"{prefix}: {text}") from None


def _convert(bundle: Bundle, gin: dict[str, str]) -> MeshModel:
    names = weights_of(set(bundle.names()))
    outline = derive_outline({name: bundle.entry(name).shape for name in names}, gin)
    check_all(names, outline)
    config = derive_encoder_decoder(outline.model, outline.sequence, outline.words, outline.words)

    def variable(name: str, shape: tuple[int, ...]) -> np.ndarray:
        entry = bundle.entry(name)
        if entry.shape != shape:
            raise ConversionError(
                f"its {name} has the shape {entry.shape}; the others make it {shape}."
            )
        check_type(bundle, name)
        array = np.asarray(bundle.read(name), np.float32)
        check_finite({name: array}, "it")
        return array

    return MeshModel(
        model=outline.model,
        sequence=outline.sequence,
        config=config,
        params=to_parameters(variable, outline, config),
        words=outline.words,
        step=read_step(bundle) if STEP in bundle else 0,
    )
