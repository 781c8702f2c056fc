"""A run of ours made from somebody else's weights; the moments of Adam and the step come along
where the source has them.
"""

import dataclasses
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from etils import epath

from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    follow_file,
    load_tokenizer,
)
from convbert_jax.files import expand
from convbert_jax.interop import certificate, matching
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.networks import ConversionError, Report, join
from convbert_jax.interop.runs.vocabulary import keep_vocabularies, trained_folder
from convbert_jax.interop.sources import (
    Source,
    check_fits,
    initialize,
    read_source,
)
from convbert_jax.training import state
from convbert_jax.training.checkpoints import saving as checkpoint
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.workdir import Workdir


def import_run(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> tuple[Config, Report]:
    """Makes `folder` a run of ours that starts from the weights at `path`.

    Args:
      path: as `sources.read_source` takes it.
      config: how the run trains. Its model, generator and vocabulary become those of the source;
        what the source does not state, such as the dropout of a TensorFlow 1 checkpoint, stays.
      given: paths of fields that the user named, "model.dropout" for one. They stay, and are an
        error where they contradict the weights.

    Returns:
      the config of the run, and what was loaded.

    Raises:
      ConversionError: the source cannot be read or no config describes it, its vocabulary is
        unknown, or `folder` holds a run already.
      ParityError: PyTorch does not compute the same numbers from the source.
    """
    workdir = Workdir(folder)
    if workdir.steps():
        raise ConversionError(
            f"--workdir={folder} holds a run already; name another folder.",
            field="--workdir",
            value=str(folder),
        )
    source = read_source(path)
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    check_entries(source, config)
    fields = matching.derive_fields(source.networks, config)
    if source.kind == "tensorflow1":  # no variable tells the dropout
        fields = {name: v for name, v in fields.items() if name not in matching.DROPOUT}
    fields = matching.keep_given(fields, config, given, path)
    fields |= tokenizer_fields(source, config, given)
    logging.info("%s", _describe(fields, config))
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    tokenizer = load_tokenizer(config.tokenizer, trained_folder(workdir, config))
    config = dataclasses.replace(config, tokenizer=tokenizer.section)
    check_tokenizer(tokenizer, [])
    params, report = initialize(config, source)
    for line in report.lines():
        logging.info("%s", line)
    certify(path, source)
    filled = _state(config, source, params)
    with workdir.open(config):
        keep_vocabularies(workdir, config, [tokenizer])  # first: a checkpoint makes it a run
        checkpoints = checkpoint.Checkpoints(workdir.checkpoints, config.checkpoint)
        try:
            checkpoints.save(filled, {}, last=True)  # the data begin at their first row
        finally:
            checkpoints.close()
    logging.info("Wrote %s, step %d.", folder, int(filled.step))
    if filled.step >= config.train.steps:
        logging.warning(
            "The run is finished by config.train.steps=%d; raise it to train on.",
            config.train.steps,
        )
    return config, report


def follow_source(config: Config, source: Source, given: Collection[str]) -> Config:
    """`config` with the vocabulary and the sizes of the weights that a new run starts from.

    Args:
      config: names another file of the same vocabulary in tokenizer.path, or none.
      given: paths of fields that were asked for by name, "model.layers" for one: they stay.

    Raises:
      ConversionError: the weights do not fit what was given, or their vocabulary is unknown or
        another one than that of tokenizer.path.
      ConfigError, TokenizerError: what follows cannot work.
    """
    check_entries(source, config)
    vocabulary = tokenizer_fields(source, config, given)
    fields = matching.decisive(matching.derive_fields(source.networks, config)) | vocabulary
    fields = {path: value for path, value in fields.items() if path not in given}
    if changed := _changed(fields, config):
        logging.info("From the weights %s: %s", config.init_from, changed)
    config = matching.replace(config, fields)
    section = follow_file(config.tokenizer, {*given, *vocabulary})
    config = from_config_dict(to_dict(dataclasses.replace(config, tokenizer=section)))
    check_fits(source, config)
    check_vocabulary(source, load_tokenizer(config.tokenizer, Path()))
    return config


def check_entries(source: Source, config: Config) -> None:
    """Refuses a vocabulary with another number of entries than the weights have.

    Raises:
      ConversionError: it has.
    """
    rows = source.networks["main"].embeddings.vocab_size
    beside = _vocabulary_beside(source)
    if config.tokenizer.path:
        named, found = config.tokenizer.path, follow_file(config.tokenizer).vocab_size
    elif beside:
        named, found = beside.path, beside.vocab_size
    else:
        return
    if found == rows:
        return
    if found < rows and (beside is None or beside.vocab_size == found):  # padded, for speed
        raise ConversionError(
            f"{named} has {found} entries, but the embedding table of the weights has {rows} rows; "
            f"if the last {rows - found} only pad it, cut the weights to {found} rows (in PyTorch "
            f"model.resize_token_embeddings({found}), then save_pretrained), or add entries to "
            f"the vocabulary up to {rows} ([unused{found}] and so on); else name the vocabulary "
            "of the weights with --config.tokenizer.path.",
            path=named,
            value=found,
        )
    if config.tokenizer.path:
        raise ConversionError(
            f"config.tokenizer.path={named} has {found} entries, but the weights are of a "
            f"vocabulary of {rows}; leave the field out, or name theirs.",
            field="config.tokenizer.path",
            value=named,
        )
    raise ConversionError(
        f"{named} has {found} entries, but the weights are of a vocabulary of {rows}; name theirs "
        "with --config.tokenizer.path.",
        path=named,
        value=found,
    )


def _vocabulary_beside(source: Source) -> Tokenizer | None:
    if not source.tokenizer:
        return None
    section = dataclasses.replace(Config().tokenizer, **source.tokenizer)
    return Tokenizer(section, Path(section.path))


def tokenizer_fields(source: Source, config: Config, given: Collection[str] = ()) -> dict[str, Any]:
    """Fields of config.tokenizer for the vocabulary of a source.

    Args:
      given: paths of fields that were asked for by name, "tokenizer.lowercase" for one: they stay.

    Raises:
      ConversionError: nobody says which vocabulary the weights were trained with.
    """
    if config.tokenizer.path:
        return {}
    if not source.tokenizer:
        raise ConversionError(
            "the source has no vocabulary, and its weights mean nothing without theirs; name it "
            "with --config.tokenizer.path=vocab.txt.",
            field="config.tokenizer.path",
        )
    fields = {f"tokenizer.{field}": value for field, value in source.tokenizer.items()}
    kept = set(given) - {"tokenizer.path"}  # which is empty here
    return {path: value for path, value in fields.items() if path not in kept}


def check_vocabulary(source: Source, tokenizer: Tokenizer) -> None:
    """Refuses another vocabulary than the one beside the weights, if there is one.

    Raises:
      ConversionError: an entry differs.
    """
    beside = _vocabulary_beside(source)
    if beside is None:
        return
    theirs = beside.entries
    if theirs != tokenizer.entries:
        pairs = enumerate(zip(theirs, tokenizer.entries, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(theirs), tokenizer.vocab_size))
        raise ConversionError(
            f"{tokenizer.path} is not the vocabulary of the weights, {beside.path}: they differ "
            f"from entry {first} on; set --config.tokenizer.path={beside.path}.",
            field="config.tokenizer.path",
            path=tokenizer.path,
        )


def certify(path: str, source: Source) -> None:
    """Compares what was read with PyTorch's reading of the same weights, and logs the proof.

    Raises:
      ParityError: they differ.
    """
    for name, network in source.networks.items():
        if source.kind == "huggingface":
            folder = expand(path)
            place = folder if name == "main" else folder / huggingface.GENERATOR
            proof = certificate.certify(place, network)
        else:
            try:
                huggingface_config.check_expressible(network)
            except ConversionError as error:
                logging.info("%s: not compared with PyTorch: %s", name, error)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                huggingface.write_network(Path(scratch), network, pad_id=0)
                proof = certificate.certify(Path(scratch), network)
        for line in proof.lines():
            logging.info("%s: %s", name, line)


def _state(config: Config, source: Source, params) -> state.TrainState:
    transformation = make_optimizer(config.optimizer, config.train.steps)
    fresh = state.create(jax.tree.map(jax.numpy.asarray, params), transformation)
    if source.moments is None:
        if source.step:
            logging.info(
                "The source has no moments of Adam: the run starts at step 0, with a warm-up."
            )
        return fresh
    zeros = jax.tree.map(np.zeros_like, params)
    (mu, first), (nu, _) = (join(config, moments, zeros) for moments in source.moments)
    if first.initialized:
        logging.info("The moments of Adam are not complete for this run: it starts at step 0.")
        return fresh
    count = jax.numpy.asarray(source.step, jax.numpy.int32)

    def fill(part):
        if isinstance(part, optax.ScaleByAdamState):
            mean, square = (jax.tree.map(jax.numpy.asarray, tree) for tree in (mu, nu))
            return optax.ScaleByAdamState(count=count, mu=mean, nu=square)
        return part._replace(count=count) if isinstance(part, optax.ScaleByScheduleState) else part

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    opt_state = jax.tree.map(fill, fresh.opt_state, is_leaf=lambda part: isinstance(part, kinds))
    return dataclasses.replace(fresh, step=count, opt_state=opt_state)


def _changed(fields: dict[str, Any], config: Config) -> str:
    """The flags for those of `fields` that `config` has otherwise."""
    values = fields.items()
    return matching.flags({p: v for p, v in values if matching.value_of(config, p) != v})


def _describe(fields: dict[str, Any], config: Config) -> str:
    changed = _changed(fields, config)
    if not changed:
        return "The config describes the source as it is."
    return f"The source needs these fields, to train it too: {changed}"
