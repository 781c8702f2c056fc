"""Import of foreign weights as a run, with Adam's moments and the step if the source has them."""

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

from convbert_jax import storage
from convbert_jax.config import Config, from_config_dict, lengths, to_dict
from convbert_jax.data.pair_worker import SIDES
from convbert_jax.data.tokenizer.pieces_model import SUFFIX
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    follow_file,
    load_tokenizer,
)
from convbert_jax.interop import huggingface, lfm2, matching, parity
from convbert_jax.interop.fairseq import Dictionary, FairseqModel, read
from convbert_jax.interop.networks import (
    ConversionError,
    Network,
    Report,
    abstract_params,
    join,
)
from convbert_jax.interop.sources import (
    Source,
    check_fits,
    describe_vocabulary,
    initialize,
    keep_vocabularies,
    read_source,
    trained_folder,
)
from convbert_jax.storage import expand
from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training import partitioning, train_step
from convbert_jax.training.checkpoints import Checkpoints
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.workdir import Workdir


def import_run(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> tuple[Config, Report]:
    """Creates a run in `folder` that starts from the weights at `path`.

    Args:
      path: a source as in `sources.read_source`.
      config: training settings. The source replaces model, generator and vocabulary; values that
        it lacks, such as the dropout in a TensorFlow 1 checkpoint, are kept.
      given: paths of the fields that the user has set, for example "model.dropout". They are kept;
        it is an error if they contradict the weights.

    Returns:
      the config of the run and a report of the loaded parameters.

    Raises:
      ConversionError: the source cannot be read, no config describes it, its vocabulary is unknown,
        or `folder` already contains a run.
      ParityError: PyTorch computes different outputs from the source.
    """
    workdir = _new_workdir(folder)
    source = read_source(path)
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    check_entries(source, config)
    fields = matching.derive_fields(source.networks, config)
    if source.kind == "tensorflow1":  # TensorFlow checkpoints do not contain the dropout
        fields = {name: v for name, v in fields.items() if name not in matching.DROPOUT}
    fields = matching.keep_given(fields, config, given, path)
    fields |= tokenizer_fields(source, config, given)
    logging.info("%s", _describe(fields, config))
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    config = lengths.to_steps(config, lengths.tokens_of_step)
    tokenizer = load_tokenizer(config.tokenizer, trained_folder(workdir, config))
    config = dataclasses.replace(config, tokenizer=tokenizer.section)
    check_tokenizer(tokenizer, [])
    params, report = initialize(config, source)
    for line in report.lines():
        logging.info("%s", line)
    certify(path, source)
    filled = _state(config, source, params)
    with workdir.open(config):
        keep_vocabularies(workdir, config, [tokenizer])  # before the checkpoint, which completes it
        checkpoints = checkpoints_lib.Checkpoints(workdir.checkpoints, config.checkpoint)
        try:
            checkpoints.save(filled, {}, last=True)  # no data state: data start at the first row
        finally:
            checkpoints.close()
    logging.info("Wrote %s, step %d.", folder, int(filled.step))
    if filled.step >= config.train.steps:
        logging.warning(
            "The run is already complete at config.train.steps=%d; increase it to train further.",
            config.train.steps,
        )
    return config, report


def _new_workdir(folder: epath.PathLike) -> Workdir:
    workdir = Workdir(folder)
    if workdir.steps():
        raise ConversionError(
            f"--workdir={folder} already contains a run. Use another folder.",
            field="--workdir",
            value=str(folder),
        )
    return workdir


def follow_source(config: Config, source: Source, given: Collection[str]) -> Config:
    """Returns `config` with the vocabulary and the sizes of the weights in config.init_from.

    Args:
      config: its tokenizer.path is empty or another file of the same vocabulary.
      given: paths of the fields that the user has set, for example "model.layers"; they are kept.

    Raises:
      ConversionError: the weights contradict fields that the user has set, or their vocabulary is
        unknown or differs from tokenizer.path.
      ConfigError, TokenizerError: the resulting config or its vocabulary is invalid.
    """
    check_entries(source, config)
    vocabulary = tokenizer_fields(source, config, given)
    fields = matching.decisive(matching.derive_fields(source.networks, config)) | vocabulary
    fields = {path: value for path, value in fields.items() if path not in given}
    if changed := _changed(fields, config):
        logging.info("Set by the weights %s: %s", config.init_from, changed)
    config = matching.replace(config, fields)
    section = follow_file(config.tokenizer, {*given, *vocabulary})
    config = from_config_dict(to_dict(dataclasses.replace(config, tokenizer=section)))
    check_fits(source, config)
    check_vocabulary(source, load_tokenizer(config.tokenizer, Path()))
    return config


def check_entries(source: Source, config: Config) -> None:
    """Checks that the vocabulary has as many entries as the embedding table has rows.

    Raises:
      ConversionError: the numbers differ.
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
    # Embedding tables are often padded for speed.
    if found < rows and (beside is None or beside.vocab_size == found):
        raise ConversionError(
            f"{named} has {found} entries, but the embedding table of the weights has {rows} rows. "
            f"If the last {rows - found} rows are padding, shrink the table to {found} rows (in "
            f"PyTorch model.resize_token_embeddings({found}), then save_pretrained), or extend the "
            f"vocabulary to {rows} entries ([unused{found}] and so on). Otherwise set "
            "--config.tokenizer.path to the vocabulary of the weights.",
            path=named,
            value=found,
        )
    if config.tokenizer.path:
        raise ConversionError(
            f"config.tokenizer.path={named} has {found} entries, but the weights need a vocabulary "
            f"of {rows}. Remove the field, or set it to the vocabulary of the weights.",
            field="config.tokenizer.path",
            value=named,
        )
    raise ConversionError(
        f"{named} has {found} entries, but the weights need a vocabulary of {rows}. Set "
        "--config.tokenizer.path to the vocabulary of the weights.",
        path=named,
        value=found,
    )


def _vocabulary_beside(source: Source) -> Tokenizer | None:
    if not source.tokenizer:
        return None
    section = dataclasses.replace(Config().tokenizer, **source.tokenizer)
    return Tokenizer(section, Path(section.path))


def tokenizer_fields(source: Source, config: Config, given: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of config.tokenizer for the vocabulary of a source.

    Args:
      given: paths of the fields that the user has set, for example "tokenizer.lowercase"; they are
        kept.

    Raises:
      ConversionError: neither the source nor the config names a vocabulary.
    """
    if config.tokenizer.path:
        return {}
    if not source.tokenizer:
        raise ConversionError(
            "The source has no vocabulary. Set --config.tokenizer.path to the vocabulary that the "
            "weights were trained with.",
            field="config.tokenizer.path",
        )
    fields = {f"tokenizer.{field}": value for field, value in source.tokenizer.items()}
    kept = set(given) - {"tokenizer.path"}  # config.tokenizer.path is empty here
    return {path: value for path, value in fields.items() if path not in kept}


def check_vocabulary(source: Source, tokenizer: Tokenizer) -> None:
    """Checks that a tokenizer has the same entries as the vocabulary next to the weights, if any.

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
            f"{tokenizer.path} is not the vocabulary of the weights, {beside.path}: entry {first} "
            f"is the first that differs. Set --config.tokenizer.path={beside.path}.",
            field="config.tokenizer.path",
            path=tokenizer.path,
        )


def certify(path: str, source: Source) -> None:
    """Checks parity of a source with PyTorch and logs the result.

    Raises:
      ParityError: PyTorch computes different outputs.
    """
    for name, network in source.networks.items():
        if source.kind == "huggingface":
            folder = expand(path)
            place = folder if name == "main" else folder / huggingface.GENERATOR
            proof = parity.check_parity(place, network)
        else:
            try:
                huggingface.check_expressible(network)
            except ConversionError as error:
                logging.info("%s: skipped the comparison with PyTorch: %s", name, error)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                huggingface.write_network(Path(scratch), network, pad_id=0)
                proof = parity.check_parity(Path(scratch), network)
        for line in proof.lines():
            logging.info("%s: %s", name, line)


def _state(config: Config, source: Source, params) -> train_step.TrainState:
    transformation = make_optimizer(config.optimizer, config.train.steps)
    fresh = train_step.create_state(jax.tree.map(jax.numpy.asarray, params), transformation)
    if source.moments is None:
        if source.step:
            logging.info("The source has no Adam moments; the run starts at step 0 with a warm-up.")
        return fresh
    zeros = jax.tree.map(np.zeros_like, params)
    (mu, first), (nu, _) = (join(config, moments, zeros) for moments in source.moments)
    if first.initialized:
        logging.info("The Adam moments of the source are incomplete; the run starts at step 0.")
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
    """Returns flags for the fields whose values differ in `config`."""
    values = fields.items()
    return matching.flags({p: v for p, v in values if matching.value_of(config, p) != v})


def _describe(fields: dict[str, Any], config: Config) -> str:
    changed = _changed(fields, config)
    if not changed:
        return "The config already matches the source."
    return f"The source sets these fields: {changed}"


# Sources of generative models do not store how parameters are initialized, nor how the model is
# computed here.
_NOT_STORED = tuple(
    f"model.{name}"
    for name in (
        *("attention", "convolution", "initializers", "initializer_range"),
        *("remat", "scan_unroll"),
    )
)


def import_generative(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> Config:
    """Creates a run whose checkpoint of step 0 is a generative model at `path`.

    Arguments, result and errors are those of `import_lfm2` for a Hugging Face folder, and of
    `import_fairseq` for all other paths.
    """
    is_folder = lfm2.is_folder(Path(storage.expand(path)))
    return (import_lfm2 if is_folder else import_fairseq)(path, config, folder, given)


def import_lfm2(
    path: str, config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> Config:
    """Creates a run of a language model from the folder of an Lfm2ForCausalLM.

    Args:
      config: training settings. The folder replaces model and vocabulary.
      folder: the new run.
      given: paths of the fields that the user set; they keep their value.

    Returns:
      The config of the run.

    Raises:
      ConversionError: the folder cannot be read, does not fit config.recipe, has no supported
        vocabulary, or contradicts a field in `given`; or `folder` already contains a run.
      ParityError: transformers computes different logits.
    """
    workdir = _new_workdir(folder)
    place = Path(storage.expand(path))
    found = lfm2.read_folder(place)
    if config.spec.network != "a language model":
        raise ConversionError(
            f"config.recipe='{config.recipe}' does not fit {path}, which is a language model. Use "
            "--config=configs/language_model.py.",
            field="config.recipe",
            value=config.recipe,
            path=path,
        )
    network = Network(lfm2.FAMILY, found.config.tokens, found.config.decoder, {})
    source = Source("huggingface", {"main": network}, **describe_vocabulary(place))
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    check_entries(source, config)
    fields = _section_fields(found) | {"tokenizer.vocab_size": found.config.tokens.vocab_size}
    fields = matching.keep_given(fields, config, given, path)
    fields |= tokenizer_fields(source, config, given)
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    tokenizer = load_tokenizer(config.tokenizer, trained_folder(workdir, config))
    config = dataclasses.replace(config, tokenizer=tokenizer.section)
    for line in parity.check_logits(place, found.config, found.params):
        logging.info("%s", line)
    with workdir.open(config):
        keep_vocabularies(workdir, config, [tokenizer])  # before the checkpoint, which completes it
        _save_first(workdir, config, found.params)
    return config


def import_fairseq(
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
    workdir = _new_workdir(folder)
    found = read(Path(storage.expand(path)))
    _check_recipe(found, path, config)
    names = _vocabulary_names(found)
    fields = matching.keep_given(_fairseq_fields(found), config, given, path)
    fields |= _vocabulary_paths(workdir, names)
    config = from_config_dict(to_dict(matching.replace(config, fields)))
    _check_shapes(found, config)
    for name, value in found.left_out.items():
        logging.info("Ignored %s=%s: it affects only training and has no equivalent.", name, value)
    with workdir.open(config):
        for name, dictionary in zip(names, found.dictionaries, strict=False):
            _write_dictionary(_vocabulary_path(workdir, name), dictionary)
        # Resolves the tokenizer's "auto" settings from the files.
        config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer))
        workdir.keep_config(config)
        _save_first(workdir, config, found.params)
    return config


def _save_first(workdir: Workdir, config: Config, params) -> None:
    """Writes the checkpoint of step 0."""
    transformation = make_optimizer(config.optimizer, config.train.steps)
    params = jax.tree.map(jax.numpy.asarray, params)
    checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
    try:
        checkpoints.save(train_step.create_state(params, transformation), {}, last=True)
    finally:
        checkpoints.close()
    logging.info(
        "Wrote step 0 to %s. Use it with --mode=predict --workdir=%s.", workdir, workdir.path
    )


def _check_recipe(found: FairseqModel, path: str, config: Config) -> None:
    language_model = len(found.dictionaries) == 1
    network = "a language model" if language_model else "an encoder-decoder"
    if network != config.spec.network:
        fitting = "language_model" if language_model else "translation"
        raise ConversionError(
            f"config.recipe='{config.recipe}' does not fit {path}, which is {network}. Use "
            f"--config=configs/{fitting}.py.",
            field="config.recipe",
            value=config.recipe,
            path=path,
        )


def _section_fields(found: FairseqModel | lfm2.Lfm2) -> dict[str, Any]:
    """Returns field -> value for the fields of model and sequence that a source determines."""
    return {
        f"{section}.{name}": value
        for section, values in (("model", found.model), ("sequence", found.sequence))
        for name, value in vars(values).items()
        if f"{section}.{name}" not in _NOT_STORED
    }


def _fairseq_fields(found: FairseqModel) -> dict[str, Any]:
    """Returns field -> value for all fields that the checkpoint determines."""
    fields = _section_fields(found)
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
    source, *target = (str(storage.absolute(_vocabulary_path(workdir, name))) for name in names)
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
        {name: leaf.shape for name, leaf in partitioning.flatten_params(tree).items()}
        for tree in (abstract_params(config), found.params)
    )
    assert wanted == loaded, wanted.items() ^ loaded.items()


def _write_dictionary(path: epath.Path, dictionary: Dictionary) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        file.write("".join(f"{entry}\n" for entry in dictionary.entries).encode())
