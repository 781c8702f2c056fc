"""A run of ours that starts from somebody else's model that writes text: fairseq's or Mesh
TensorFlow's.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import Config, ModelSection, from_config_dict, to_dict
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.data.parallel.vocabularies import SIDES
from convbert_jax.data.tokenizer.pieces_model import SUFFIX
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interop import matching
from convbert_jax.interop.fairseq import model as fairseq
from convbert_jax.interop.fairseq.dictionaries import Dictionary
from convbert_jax.interop.mesh_tensorflow import model as mesh_tensorflow
from convbert_jax.interop.mesh_tensorflow.vocabulary import fill_up
from convbert_jax.interop.networks import ConversionError, abstract_params
from convbert_jax.interop.tensorflow1.checkpoint import find_prefix
from convbert_jax.training import state
from convbert_jax.training.checkpoints.saving import Checkpoints
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.workdir import Workdir

_MODEL = "words.model"
# What no checkpoint states: how parameters are initialized and how the model is computed.
_UNSTATED = tuple(
    f"model.{name}"
    for name in (
        *("attention", "convolution", "initializers", "initializer_range"),
        *("remat", "scan_unroll"),
    )
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A model that was read.

    Attributes:
      alone: whether it is a language model.
      vocabularies: name of a file -> what is in it, of source and target or of both.
      tokenizer: fields of config.tokenizer and config.parallel for them.
      notes: what a user should know, a line each.
      states_dropout: whether `model` and `sequence` have the dropout that it was trained with.
    """

    model: ModelSection
    sequence: SequenceSection
    params: dict
    alone: bool
    vocabularies: Mapping[str, bytes]
    tokenizer: Mapping[str, Any]
    notes: tuple[str, ...]
    states_dropout: bool


def import_run(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> Config:
    """Makes `folder` a run with the model at `path` as its step 0, which writes as it is.

    Args:
      path: as `fairseq.model.read` or `mesh_tensorflow.model.read` takes it.
      config: how the run trains, of a recipe that writes text; its model and vocabularies become
        those of the checkpoint. Mesh TensorFlow's checkpoints have neither dropout nor a
        vocabulary: these are those of `config` and of config.tokenizer.path.
      given: paths of fields that the user named. They stay, and are an error where they contradict
        the checkpoint, except for `mesh_tensorflow.model.forms`.

    Returns:
      the config of the run.

    Raises:
      ConversionError: the checkpoint cannot be read, is of another kind of model than the recipe,
        contradicts `given`, or `folder` holds a run already.
    """
    workdir = Workdir(folder)
    if workdir.steps():
        raise ConversionError(f"--workdir={folder} holds a run already; name another folder.")
    place = Path(files.expand(path))
    prefix = find_prefix(place)
    found = _of_fairseq(place) if prefix is None else _of_mesh_tensorflow(prefix, config, given)
    _check_recipe(found, path, config)
    fields = matching.keep_given(_fields(found), config, given, path)
    fields |= _paths(found, workdir)
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    _check_same(found, config)
    for note in found.notes:
        logging.info("%s", note)
    with workdir.open(config):
        for name, content in found.vocabularies.items():
            _write(_place(workdir, name), content)
        # Reads what was written, and what it says in place of "auto".
        config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer))
        workdir.keep_config(config)
        transformation = make_optimizer(config.optimizer, config.train.steps)
        fresh = state.create(jax.tree.map(jax.numpy.asarray, found.params), transformation)
        checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
        try:
            checkpoints.save(fresh, {}, last=True)  # the data begin at their first row
        finally:
            checkpoints.close()
    logging.info("Wrote %s, step 0: --mode=predict --workdir=%s writes.", folder, folder)
    return config


def _of_fairseq(path: Path) -> Found:
    read = fairseq.read(path)
    shared = read.sequence.shared_vocabulary
    names = ("words",) if shared else ("source", "target")
    sizes = [len(dictionary.entries) for dictionary in read.dictionaries]
    return Found(
        model=read.model,
        sequence=read.sequence,
        params=read.params,
        alone=len(read.dictionaries) == 1,
        vocabularies={
            f"{name}{SUFFIX}": _lines(dictionary)
            for name, dictionary in zip(names, read.dictionaries, strict=False)
        },
        tokenizer={
            "tokenizer.path": "",  # of a file of the user's; there are dictionaries in the folder
            "tokenizer.kind": "pieces",
            "tokenizer.vocab_size": sizes[0],
            "tokenizer.lowercase": False,
            "tokenizer.strip_accents": False,
            "parallel.target_vocabulary": "",
            "parallel.target_vocab_size": 0 if shared else sizes[1],
        },
        notes=tuple(
            f"Left out, as it counts in training only: {name}={value}."
            for name, value in read.left_out.items()
        ),
        states_dropout=True,
    )


def _of_mesh_tensorflow(prefix: Path, config: Config, given: Collection[str]) -> Found:
    path = config.tokenizer.path
    if not path:
        raise ConversionError(
            f"{prefix} has no vocabulary, and its weights mean nothing without theirs; name T5's "
            "with --config.tokenizer.path=sentencepiece.model."
        )
    read = mesh_tensorflow.read(prefix)
    try:
        content = fill_up(files.expand(path).read_bytes(), read.words)
    except OSError as error:
        raise ConversionError(
            f"config.tokenizer.path={path} cannot be read ({error.strerror})."
        ) from None
    except ConversionError as error:
        raise ConversionError(
            f"config.tokenizer.path={path} is not the vocabulary of {prefix}: {error}"
        ) from None
    sequence = read.sequence
    asked = "sequence.decoder_mixer_fields" in given and config.sequence.decoder_mixer_fields
    if asked in mesh_tensorflow.forms(sequence):  # how it writes is the user's choice
        sequence = dataclasses.replace(sequence, decoder_mixer_fields=asked)
    return Found(
        model=read.model,
        sequence=sequence,
        params=read.params,
        alone=False,
        vocabularies={_MODEL: content},
        tokenizer={
            "tokenizer.kind": "sentencepiece",
            "tokenizer.vocab_size": read.words,
            "tokenizer.lowercase": False,
            "tokenizer.strip_accents": False,
            "parallel.target_vocabulary": "",
            "parallel.target_vocab_size": 0,
        },
        notes=(f"Step {read.step} of its training; Adafactor's moments are not read.",),
        states_dropout=False,
    )


def _check_recipe(found: Found, path: str, config: Config) -> None:
    if found.alone != (config.recipe == "causal_lm"):
        fits = "configs/language_model.py" if found.alone else "configs/translation.py"
        raise ConversionError(
            f"{path} is {'a language model' if found.alone else 'an encoder-decoder'} and "
            f"config.recipe='{config.recipe}'; take --config={fits}."
        )
    if _MODEL in found.vocabularies and not config.reads_pairs:
        raise ConversionError(
            f"{path} reads rows as T5 makes them, and config.recipe='{config.recipe}' makes "
            "others; take --config=configs/text_to_text.py:t5_base."
        )


def _fields(found: Found) -> dict[str, Any]:
    """Path -> value of what the checkpoint decides."""
    sections = {"model": found.model, "sequence": found.sequence}
    fields = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in vars(values).items()
    }
    unstated = {*_UNSTATED, *(() if found.states_dropout else matching.SEQUENCE_DROPOUT)}
    fields = {path: value for path, value in fields.items() if path not in unstated}
    return fields | dict(found.tokenizer)


def _paths(found: Found, workdir: Workdir) -> dict[str, str]:
    """Where the vocabularies will be."""
    source, *target = (str(files.absolute(_place(workdir, n))) for n in found.vocabularies)
    return {
        "tokenizer.path": source,
        "parallel.target_vocabulary": target[0] if target else "",
    }


def _place(workdir: Workdir, name: str) -> epath.Path:
    """Of a vocabulary, as `vocabulary.read_tokenizers` looks for it."""
    side = Path(name).stem
    return workdir.vocabulary / (side if side in SIDES else "") / name


def _check_same(found: Found, config: Config) -> None:
    """The config describes the parameters that were read, each by name and shape."""
    wanted, there = (
        {name: leaf.shape for name, leaf in state.flatten(tree).items()}
        for tree in (abstract_params(config), found.params)
    )
    assert wanted == there, wanted.items() ^ there.items()


def _lines(dictionary: Dictionary) -> bytes:
    return "".join(f"{entry}\n" for entry in dictionary.entries).encode()


def _write(path: epath.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write(content)
