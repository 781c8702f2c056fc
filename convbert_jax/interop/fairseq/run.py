"""A run of ours that starts from a checkpoint of fairseq."""

from collections.abc import Collection
from pathlib import Path

import jax
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.tokenizer.pieces_model import SUFFIX
from convbert_jax.interop import matching
from convbert_jax.interop.fairseq.dictionaries import Dictionary
from convbert_jax.interop.fairseq.model import FairseqModel, read
from convbert_jax.interop.networks import ConversionError, abstract_params
from convbert_jax.training import state
from convbert_jax.training.checkpoints.saving import Checkpoints
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.workdir import Workdir

VOCABULARY = "vocabulary"  # folder of the run


def import_run(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> Config:
    """Makes `folder` a run with the model at `path` as its step 0, which translates as it is.

    Args:
      path: as `model.read` takes it.
      config: how the run trains, of a recipe that writes text; its model and vocabularies become
        those of the checkpoint.
      given: paths of fields that were asked for by name; those of the model are an error where they
        contradict.

    Returns:
      the config of the run.

    Raises:
      ConversionError: the checkpoint cannot be read, is of another kind of model than the recipe,
        contradicts `given`, or `folder` holds a run already.
    """
    workdir = Workdir(folder)
    if workdir.steps():
        raise ConversionError(f"--workdir={folder} holds a run already; name another folder.")
    found = read(Path(files.expand(path)))
    alone = len(found.dictionaries) == 1
    if alone != (config.recipe == "causal_lm"):
        fits = "configs/language_model.py" if alone else "configs/translation.py"
        raise ConversionError(
            f"{path} is {'a language model' if alone else 'an encoder-decoder'} and "
            f"config.recipe='{config.recipe}'; take --config={fits}."
        )
    fields = _fields(found, workdir)
    for field in given:
        if field in fields and fields[field] != matching.value_of(config, field):
            raise ConversionError(
                f"--config.{field}={matching.value_of(config, field)}, but {path} has "
                f"{fields[field]}; leave it out."
            )
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    _check_same(found, config)
    for name, value in found.left_out.items():
        logging.info("Left out, as it counts in training only: %s=%s.", name, value)
    with workdir.open(config):
        for name, dictionary in _vocabularies(found):
            _write(workdir.path / VOCABULARY / name, dictionary)
        transformation = make_optimizer(config.optimizer, config.train.steps)
        fresh = state.create(jax.tree.map(jax.numpy.asarray, found.params), transformation)
        checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
        try:
            checkpoints.save(fresh, {})  # the data begin at their first row
        finally:
            checkpoints.close()
    logging.info("Wrote %s, step 0: --mode=predict --workdir=%s translates.", folder, folder)
    return config


def _vocabularies(found: FairseqModel) -> list[tuple[str, Dictionary]]:
    """(name of a file, what is in it): one where source and target share it."""
    if found.sequence.shared_vocabulary:
        return [(f"words{SUFFIX}", found.dictionaries[0])]
    source, target = found.dictionaries
    return [(f"source{SUFFIX}", source), (f"target{SUFFIX}", target)]


def _fields(found: FairseqModel, workdir: Workdir) -> dict[str, object]:
    """Path -> value of what the checkpoint decides."""
    sections = {"model": found.model, "sequence": found.sequence}
    fields = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in vars(values).items()
    }
    folder = workdir.path.absolute() / VOCABULARY
    names = [str(folder / name) for name, _ in _vocabularies(found)]
    sizes = [len(dictionary.entries) for _, dictionary in _vocabularies(found)]
    fields |= {
        "tokenizer.kind": "pieces",
        "tokenizer.path": names[0],
        "tokenizer.vocab_size": sizes[0],
        "tokenizer.lowercase": False,
        "tokenizer.strip_accents": False,
        "parallel.target_vocabulary": names[1] if len(names) > 1 else "",
        "parallel.target_vocab_size": sizes[1] if len(sizes) > 1 else 0,
    }
    return fields


def _check_same(found: FairseqModel, config: Config) -> None:
    """The config describes the parameters that were read, each by name and shape."""
    wanted, there = (
        {name: leaf.shape for name, leaf in state.flatten(tree).items()}
        for tree in (abstract_params(config), found.params)
    )
    assert wanted == there, wanted.items() ^ there.items()


def _write(path: epath.Path, dictionary: Dictionary) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write("".join(f"{entry}\n" for entry in dictionary.entries).encode())
