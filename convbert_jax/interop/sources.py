"""Readers of runs, Hugging Face folders and TensorFlow 1 checkpoints as networks.

A run has copies of its vocabularies, which make its folder self-contained.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config, TokenizerSection, to_text
from convbert_jax.data import bucket
from convbert_jax.data.pair_worker import list_sections
from convbert_jax.data.stores import read_fingerprints
from convbert_jax.data.tokenizer.tokenizer import KINDS, Tokenizer, TokenizerError, load_tokenizer
from convbert_jax.interop import (
    huggingface,
    huggingface_tokenizer,
    matching,
    sentence_transformers,
    tensorflow1,
    weight_files,
)
from convbert_jax.interop.huggingface_tokenizer import OtherTokenizerError
from convbert_jax.interop.networks import (
    ConversionError,
    Network,
    Report,
    abstract_params,
    join,
    split,
    to_tree,
)
from convbert_jax.interop.sentence_transformers import VectorConfig
from convbert_jax.interop.weight_files import check_finite, shown
from convbert_jax.training import checkpoints, partitioning
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights read from a run, a Hugging Face folder or a TensorFlow 1 checkpoint.

    Attributes:
      kind: "huggingface", "tensorflow1" or "run".
      networks: "main" and, optionally, "generator".
      ignored: other tensors, by their names in the source.
      step: steps of training, 0 if unknown.
      moments: Adam's first and second moments as networks, if the source has them.
      tokenizer: fields of config.tokenizer for the vocabulary next to the weights; None if there
        is no supported vocabulary.
      not_read: reason why an existing vocabulary is not supported, without a final period.
    """

    kind: str
    networks: Mapping[str, Network]
    ignored: tuple[str, ...] = ()
    step: int = 0
    moments: tuple[Mapping[str, Network], Mapping[str, Network]] | None = None
    tokenizer: Mapping[str, Any] | None = None
    not_read: str = ""


def read_source(path: str) -> Source:
    """Reads a run, a Hugging Face folder, or a TensorFlow 1 checkpoint.

    Args:
      path: a folder; for TensorFlow also the prefix, as model.ckpt-1000000, or one of its files.

    Raises:
      ConversionError: `path` has another format, or cannot be read.
    """
    try:
        return _read_source(path)
    except (OSError, RuntimeError) as error:  # for example a name too long, or no permission
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConversionError(f"Cannot read {shown(path)}: {reason}.") from error
    except MemoryError as error:
        raise ConversionError(f"Out of memory while reading {path}.", path=path) from error


def _read_source(path: str) -> Source:
    path, phase, average = split_run(path)
    folder = storage.to_path(path)
    workdir = Workdir(folder)
    if workdir.holds_run():
        step = step_of_phase(workdir, phase) if phase else None
        run = workdir.read_config_at(step)
        (*_, step), params = read_mean(workdir, run, average, step)
        section = dataclasses.asdict(read_tokenizer(workdir, run)[1])
        return Source("run", split(run, params), step=step, tokenizer=section)
    if storage.is_remote(folder):
        raise ConversionError(
            f"{path} is not a run. Foreign weights in a bucket must be copied to a local disk "
            "first.",
            path=path,
        )
    if (folder / huggingface.CONFIG).is_file() and weight_files.has_weights(folder):
        found = huggingface.read_folder(folder)
        if found.extra["main"].get("generator") and "generator" not in found.networks:
            logging.warning("The generator that %s was exported with is missing.", path)
        return Source(
            "huggingface",
            found.networks,
            found.ignored,
            step=_step_of(found.extra["main"]),
            **describe_vocabulary(folder),
        )
    prefix = tensorflow1.find_prefix(folder)
    if prefix is None:
        raise ConversionError(
            f"Found no weights at {path}: expected a run (config.json and checkpoints/), a Hugging "
            "Face folder (config.json and weights) or a TensorFlow checkpoint (FILE.index and "
            "FILE.data-*). Download models from the Hugging Face hub first (hf download NAME "
            "--local-dir FOLDER).",
            path=path,
        )
    read = tensorflow1.read_checkpoint(prefix)
    return Source(
        "tensorflow1",
        _with_masking(read.networks, prefix.parent),
        read.ignored,
        step=read.step,
        moments=read.moments,
        **describe_vocabulary(prefix.parent),
    )


def read_vectors(path: str, source: Source) -> VectorConfig | None:
    """Returns how the model at `path` computes vectors of texts; None if it has no settings.

    Raises:
      ConversionError: the settings are not supported.
    """
    if source.kind == "huggingface":
        return sentence_transformers.read(storage.to_path(path))
    if source.kind == "run":
        return sentence_transformers.of_run(Workdir(split_run(path)[0]).read_config())
    return None


def split_run(path: str) -> tuple[str, str, int]:
    """Splits RUN@PHASE, the end of a phase of a run, or RUN@average=N, the mean of N checkpoints.

    Returns:
      (run, phase or "", number of checkpoints to average); (path, "", 1) for any other path.
    """
    run, _, what = path.rpartition("@")
    if not (run and Workdir(run).holds_run()):
        return path, "", 1
    average = re.fullmatch(r"average=([1-9]\d{0,3})", what)
    return (run, "", int(average[1])) if average else (run, what, 1)


def step_of_phase(workdir: Workdir, phase: str) -> int:
    """Returns the last step of a phase of a run; raises ConversionError if it has no such phase."""
    config = workdir.read_config()
    names = [each.name for each in config.phases]
    ends = dict(zip(names, config.phase_ends, strict=bool(names)))
    if phase not in ends:
        raise ConversionError(
            f"{workdir} has no phase '{phase}'. Use one of: {', '.join(ends) or 'none'}.",
            value=phase,
            path=workdir.path,
        )
    return ends[phase]


def read_params(workdir: Workdir, config: Config, step: int | None = None) -> tuple[int, Any]:
    """Reads the parameters of a checkpoint to the host.

    Args:
      step: step of the checkpoint; default the newest complete one.

    Returns:
      (step, parameters).

    Raises:
      CheckpointError: the checkpoint is missing or cannot be read.
      ConversionError: a parameter contains NaN or infinity.
    """
    folder = workdir.checkpoints
    step, params = checkpoints.load_params(folder, abstract_params(config), step)
    check_finite(partitioning.flatten_params(params), f"{folder / str(step)}")
    return step, params


def read_mean(
    workdir: Workdir, config: Config, count: int, step: int | None = None
) -> tuple[tuple[int, ...], Any]:
    """Reads the mean parameters of the `count` newest checkpoints, summed in float64.

    Args:
      step: newest checkpoint to use, default the newest. A single checkpoint defaults to the newest
        undamaged one.

    Returns:
      (steps of the checkpoints, mean parameters on the host).

    Raises:
      ConversionError: there are fewer checkpoints, or a parameter contains NaN or infinity.
      CheckpointError: a checkpoint is missing or damaged.
    """
    if count == 1:
        step, params = read_params(workdir, config, step)
        return (step,), params
    steps = [there for there in workdir.steps() if step is None or there <= step][-count:]
    if len(steps) < count:
        raise ConversionError(
            f"Cannot average {count} checkpoints: {workdir} has "
            f"{', '.join(map(str, steps)) or 'none'}. Average at most {len(steps)}, or train with "
            "a higher config.checkpoint.keep.",
            field="average",
            value=count,
            path=workdir.path,
        )
    total = None
    for number in steps:
        _, params = read_params(workdir, config, number)
        kinds = jax.tree.map(lambda leaf: leaf.dtype, params)
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        total = params if total is None else jax.tree.map(np.add, total, params)
    logging.info("Averaged the checkpoints %s.", ", ".join(map(str, steps)))
    return tuple(steps), jax.tree.map(lambda sums, kind: (sums / count).astype(kind), total, kinds)


def read_moments(workdir: Workdir, config: Config, step: int | None = None):
    """Reads Adam's moments; arguments and errors as in `read_params`.

    Returns:
      (step, (first moments, second moments)), each as networks of `config`. All parts of the
      checkpoint of that step are complete.
    """
    step, arrays = checkpoints.load_arrays(workdir.checkpoints, step)

    def networks(kind: str) -> dict[str, Network]:
        parts = (name.partition(f"/{kind}/") for name in arrays)
        found = {path: arrays[a + b + path] for a, b, path in parts if a.startswith("opt_state")}
        tree = to_tree({path: array for path, array in found.items() if path})
        # Disentangled sharing stops gradients to the shared part; the moments belong to OWN.
        return split(config, tree, fold=lambda shared, own: own)

    return step, (networks("mu"), networks("nu"))


def check_fits(source: Source, config: Config) -> None:
    """Checks that the networks of a source fit the model of `config`.

    Raises:
      ConversionError: they differ; the message has the flags that make them fit.
    """
    different = matching.differences(matching.derive_fields(source.networks, config), config)
    if different:
        field, (value, now) = next(iter(different.items()))
        value, now = (to_text(each) or "nothing" for each in (value, now))
        wanted = matching.flags({path: pair[0] for path, pair in different.items()})
        raise ConversionError(
            f"The source has config.{field}={value}, but this run has {now}. Start the run with "
            f"{wanted}",
            field=f"config.{field}",
            value=now,
        )


def initialize(config: Config, source: Source) -> tuple[Any, Report]:
    """Initializes the parameters of a new run of `config` from a source.

    Raises:
      ConversionError: the networks of the source do not fit `config`.
    """
    check_fits(source, config)
    reads = source.networks["main"].encoder.reads_padding
    if reads != config.encoder.reads_padding:
        logging.warning(
            "The weights were trained with mixers that %s padding; mixers of this run %s it "
            "(config.model.mask_convolution=%s). Outputs near padding differ until training adapts "
            "them.",
            "read" if reads else "do not read",
            "do not read" if reads else "read",
            config.model.mask_convolution,
        )
    params, report = join(config, source.networks)
    return params, dataclasses.replace(report, ignored=(*report.ignored, *source.ignored))


def open_vocabulary(path: str, source: Source) -> tuple[Tokenizer, TokenizerSection]:
    """Opens the vocabulary next to weights.

    Args:
      path: path of the weights, for messages.
      source: a source whose `tokenizer` is not None.

    Returns:
      the tokenizer and its settings.

    Raises:
      ConversionError: the vocabulary has more entries than the embedding table has rows.
    """
    section = dataclasses.replace(Config().tokenizer, **source.tokenizer)
    tokenizer = Tokenizer(section, Path(section.path))
    found, rows = tokenizer.vocab_size, source.networks["main"].embeddings.vocab_size
    if found > rows:
        raise ConversionError(
            f"{tokenizer.path} has {found} entries, but {path} has a vocabulary of {rows}. Replace "
            "it by the vocabulary of the weights, or pass vocabulary=FILE in Python.",
            value=found,
            path=tokenizer.path,
        )
    if found < rows:
        logging.warning(
            "%s has %d entries, but the embedding table of %s has %d rows; treating the last %d as "
            "padding.",
            tokenizer.path,
            found,
            path,
            rows,
            rows - found,
        )
    return tokenizer, tokenizer.section


def _step_of(extra: Mapping[str, Any]) -> int:
    step = extra.get("step", 0)
    if type(step) is not int or not 0 <= step < 1 << 31:
        raise ConversionError(
            f"config.json has step={shown(step)}, expected an integer from 0 to 2^31 - 1.",
            field="step",
            value=step,
        )
    return step


def _with_masking(networks: Mapping[str, Network], folder: Path) -> Mapping[str, Network]:
    """Returns the networks with the convolution masking that the manifest of an export records."""
    masked = weight_files.read_manifest(folder).get("mask_convolution", False)
    if not isinstance(masked, bool):
        raise ConversionError(
            f"{folder / weight_files.MANIFEST} has mask_convolution={shown(masked)}, expected "
            "true or false.",
            field="mask_convolution",
            value=masked,
            path=folder / weight_files.MANIFEST,
        )

    return {name: network.with_masking(masked) for name, network in networks.items()}


def describe_vocabulary(folder: Path) -> dict[str, Any]:
    """Returns the fields of `Source` for the vocabulary of a folder.

    An unsupported vocabulary is not an error here, because the caller may pass another one.
    """
    vocabulary = huggingface_tokenizer.find_vocabulary(folder)
    if vocabulary is None:
        return {}
    try:
        fields = huggingface_tokenizer.describe_vocabulary(folder, vocabulary.absolute())
    except OtherTokenizerError as error:
        logging.warning("%s; ignored this vocabulary.", error)
        return {"not_read": str(error)}
    return {"tokenizer": fields}


def trained_folder(workdir: Workdir, config: Config) -> Path:
    """Returns the folder of the vocabularies trained for a run, copied from a bucket if needed."""
    return bucket.fetch(workdir.data(config), config.data.cache, rows=False)


def keep_vocabularies(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Copies vocabularies into the folder of the run and replaces earlier copies.

    Args:
      tokenizers: the tokenizer of the run, or the source and target tokenizers.

    Raises:
      WorkdirError: the folder cannot be written.
    """
    sections = list_sections(config)
    made = tokenizers if len(sections) > 1 else tokenizers[:1]
    names = [name for name, _ in sections]
    workdir.keep_vocabularies(
        {name: tokenizer.path for name, tokenizer in zip(names, made, strict=True)},
        {name: tokenizer.fingerprint for name, tokenizer in zip(names, made, strict=True)},
    )


def use_copies(workdir: Workdir, config: Config) -> Config:
    """Returns the config of a started run with copies in place of missing vocabulary files.

    A vocabulary may be missing if it belonged to a teacher or to initial weights that were moved.
    Whether the copy is the same vocabulary is checked against the rows. The config of a run in a
    bucket is unchanged, because paths of local copies would differ between processes.
    """
    if storage.is_remote(workdir.path):
        return config
    paths = [config.tokenizer.path, config.parallel.target_vocabulary]
    for number, (name, section) in enumerate(list_sections(config)):
        copy = workdir.vocabulary / name / _file_name(section)
        if section.path and not storage.expand(section.path).exists() and copy.is_file():
            logging.warning("%s does not exist; using the run's copy %s.", section.path, copy)
            paths[number] = str(copy.absolute())
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, path=paths[0]),
        parallel=dataclasses.replace(config.parallel, target_vocabulary=paths[1]),
    )


def check_learned(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Checks that rows were made with the vocabularies of the run, if the run has recorded them.

    Args:
      tokenizers: tokenizers of the rows, as in `keep_vocabularies`.

    Raises:
      TokenizerError: a vocabulary differs.
    """
    learned = workdir.read_fingerprints()
    fields = ("tokenizer.path", "parallel.target_vocabulary")
    for (name, section), tokenizer, field in zip(
        list_sections(config), tokenizers, fields, strict=False
    ):
        if learned and learned.get(name) != tokenizer.fingerprint:
            copy = workdir.vocabulary / name / _file_name(section)
            raise TokenizerError(
                f"The rows in {workdir.data(config)} were made with {tokenizer.path}, which is not "
                f"the vocabulary of the run {workdir}. Restore the original rows, or prepare new "
                f"ones with --config.{field}={copy} --config.data.directory=FOLDER.",
                field=f"config.{field}",
                path=tokenizer.path,
            )


def read_tokenizer(workdir: Workdir, config: Config) -> tuple[Tokenizer, TokenizerSection]:
    """Returns the tokenizer of an encoder's run and the settings to open its file with.

    Raises:
      TokenizerError: the vocabulary is missing, or differs from the one that the run was trained
        with.
      DamagedFileError: the recorded fingerprints are damaged.
    """
    tokenizer = read_tokenizers(workdir, config)[0]
    return tokenizer, dataclasses.replace(tokenizer.section, path=str(tokenizer.path.absolute()))


def read_tokenizers(workdir: Workdir, config: Config) -> tuple[Tokenizer, Tokenizer]:
    """Returns the tokenizers of source and target; the same object twice if they are shared.

    Raises:
      TokenizerError, DamagedFileError: as in `read_tokenizer`.
    """
    sections = list_sections(config)
    copies = [workdir.vocabulary / name / _file_name(section) for name, section in sections]
    if all(copy.is_file() for copy in copies):
        where, learned = workdir.vocabulary, workdir.read_fingerprints()
        found = [
            load_tokenizer(dataclasses.replace(s, path=str(storage.local_copy(copy))), Path())
            for (_, s), copy in zip(sections, copies, strict=True)
        ]
    else:  # the run has no copies
        named = all(section.path for _, section in sections)
        where = Path(workdir.data(config)) if named else trained_folder(workdir, config)
        found = [load_tokenizer(section, where / name) for name, section in sections]
        learned = read_fingerprints(config, where)
    for (name, _), tokenizer in zip(sections, found, strict=True):
        if learned and learned.get(name) != tokenizer.fingerprint:
            raise TokenizerError(
                f"{tokenizer.path} is not the vocabulary that {workdir} was trained with (its "
                f"fingerprint is recorded in {where}). Restore the original file.",
                path=tokenizer.path,
            )
    return found[0], found[-1]


def _file_name(section: TokenizerSection) -> str:
    return Path(section.path).name if section.path else KINDS[section.kind].FILE
