"""Imports a fairseq checkpoint as a run."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.parallel.vocabularies import SIDES
from convbert_jax.data.tokenizer.pieces_model import SUFFIX
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interop import matching
from convbert_jax.interop.fairseq.dictionaries import Dictionary
from convbert_jax.interop.fairseq.model import FairseqModel, read
from convbert_jax.interop.networks import ConversionError, abstract_params
from convbert_jax.training import state
from convbert_jax.training.checkpoints.saving import Checkpoints
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.workdir import Workdir

# fairseq does not store how parameters are initialized, nor how the model is computed here.
_NOT_STORED = tuple(
    f"model.{name}"
    for name in (
        *("attention", "convolution", "initializers", "initializer_range"),
        *("remat", "scan_unroll"),
    )
)


def import_run(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> Config:
    """Creates a run whose checkpoint of step 0 is a fairseq model.

    Args:
      path: a fairseq checkpoint or its folder, as for `model.read`.
      config: training settings. Model and vocabularies are replaced by the checkpoint's.
      folder: the new run.
      given: paths of the fields that the user set, such as "model.layers". They keep their value.

    Returns:
      The config of the run.

    Raises:
      ConversionError: the checkpoint cannot be read, does not fit config.recipe, or contradicts a
        field in `given`; or `folder` already contains a run.
    """
    workdir = Workdir(folder)
    if workdir.steps():
        raise ConversionError(
            f"--workdir={folder} already contains a run. Use another folder.",
            field="--workdir",
            value=str(folder),
        )
    found = read(Path(files.expand(path)))
    _check_recipe(found, path, config)
    names = _vocabulary_names(found)
    fields = matching.keep_given(_fields(found), config, given, path)
    fields |= _vocabulary_paths(workdir, names)
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    _check_shapes(found, config)
    for name, value in found.left_out.items():
        logging.info("Ignored %s=%s: it affects only training and has no equivalent.", name, value)
    with workdir.open(config):
        for name, dictionary in zip(names, found.dictionaries, strict=False):
            _write(_vocabulary_path(workdir, name), dictionary)
        # Resolves the tokenizer's "auto" settings from the files.
        config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer))
        workdir.keep_config(config)
        transformation = make_optimizer(config.optimizer, config.train.steps)
        params = jax.tree.map(jax.numpy.asarray, found.params)
        checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
        try:
            checkpoints.save(state.create(params, transformation), {}, last=True)
        finally:
            checkpoints.close()
    logging.info("Wrote step 0 to %s. Use it with --mode=predict --workdir=%s.", folder, folder)
    return config


def _is_language_model(found: FairseqModel) -> bool:
    return len(found.dictionaries) == 1


def _check_recipe(found: FairseqModel, path: str, config: Config) -> None:
    language_model = _is_language_model(found)
    if language_model != (config.recipe == "causal_lm"):
        kind = "a language model" if language_model else "an encoder-decoder"
        fitting = "language_model" if language_model else "translation"
        raise ConversionError(
            f"config.recipe='{config.recipe}' does not fit {path}, which is {kind}. Use "
            f"--config=configs/{fitting}.py.",
            field="config.recipe",
            value=config.recipe,
            path=path,
        )


def _fields(found: FairseqModel) -> dict[str, Any]:
    """Returns field -> value for all fields that the checkpoint determines."""
    fields = {
        f"{section}.{name}": value
        for section, values in (("model", found.model), ("sequence", found.sequence))
        for name, value in vars(values).items()
        if f"{section}.{name}" not in _NOT_STORED
    }
    sizes = [len(dictionary.entries) for dictionary in found.dictionaries]
    return fields | {
        # Replaced by the run's copies; a file that the user named contradicts the checkpoint.
        "tokenizer.path": "",
        "tokenizer.kind": "pieces",
        "tokenizer.vocab_size": sizes[0],
        "tokenizer.lowercase": False,
        "tokenizer.strip_accents": False,
        "parallel.target_vocabulary": "",
        "parallel.target_vocab_size": 0 if found.sequence.shared_vocabulary else sizes[1],
    }


def _vocabulary_names(found: FairseqModel) -> tuple[str, ...]:
    stems = ("words",) if found.sequence.shared_vocabulary else ("source", "target")
    return tuple(f"{stem}{SUFFIX}" for stem in stems)


def _vocabulary_paths(workdir: Workdir, names: tuple[str, ...]) -> dict[str, str]:
    source, *target = (str(files.absolute(_vocabulary_path(workdir, name))) for name in names)
    return {
        "tokenizer.path": source,
        "parallel.target_vocabulary": target[0] if target else "",
    }


def _vocabulary_path(workdir: Workdir, name: str) -> epath.Path:
    """Returns where `vocabulary.read_tokenizers` looks for a vocabulary."""
    side = Path(name).stem
    return workdir.vocabulary / (side if side in SIDES else "") / name


def _check_shapes(found: FairseqModel, config: Config) -> None:
    """Asserts that the parameters have the names and shapes of the run's model."""
    wanted, loaded = (
        {name: leaf.shape for name, leaf in state.flatten(tree).items()}
        for tree in (abstract_params(config), found.params)
    )
    assert wanted == loaded, wanted.items() ^ loaded.items()


def _write(path: epath.Path, dictionary: Dictionary) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write("".join(f"{entry}\n" for entry in dictionary.entries).encode())
