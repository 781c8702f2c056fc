"""Weights from anywhere, read into networks: a run of ours, a Hugging Face folder, a TensorFlow 1
checkpoint; and what a new run takes of them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, TokenizerSection, to_text
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interop import mark, matching
from convbert_jax.interop.claims import check_finite, shown
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.huggingface import tokenizer as huggingface_tokenizer
from convbert_jax.interop.huggingface import weight_files
from convbert_jax.interop.huggingface.tokenizer_rules import OtherTokenizerError
from convbert_jax.interop.networks import (
    ConversionError,
    Network,
    Report,
    abstract_params,
    join,
    split,
    to_tree,
)
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.training import state
from convbert_jax.training.checkpoints import reading as checkpoint_reading
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights from anywhere.

    Attributes:
      kind: "huggingface", "tensorflow1" or "run".
      networks: "main" and, if there is one, "generator".
      ignored: what the source has besides, by its own names.
      step: steps it was trained for, 0 if it does not say.
      moments: Adam's first and second moments as networks, if the source has them.
      tokenizer: fields of config.tokenizer for the vocabulary beside the weights, if there is one
        that our tokenizers read.
      not_read: why one that is there is not, as the beginning of a sentence.
    """

    kind: str
    networks: Mapping[str, Network]
    ignored: tuple[str, ...] = ()
    step: int = 0
    moments: tuple[Mapping[str, Network], Mapping[str, Network]] | None = None
    tokenizer: Mapping[str, Any] | None = None
    not_read: str = ""


def read_source(path: str) -> Source:
    """Reads a run's folder, a Hugging Face folder, or a TensorFlow 1 checkpoint.

    Args:
      path: for TensorFlow the prefix, as model.ckpt-1000000, one of its files or its folder.

    Raises:
      ConversionError: there is nothing of these, or it cannot be read.
    """
    try:
        return _read_source(path)
    except (OSError, RuntimeError) as error:  # too long a name, no right to read
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConversionError(f"{shown(path)} cannot be read ({reason}).") from error
    except MemoryError as error:
        raise ConversionError(f"{path} needs more memory than there is.", path=path) from error


def _read_source(path: str) -> Source:
    folder = files.to_path(path)
    workdir = Workdir(folder)
    if workdir.holds_run():
        run = workdir.read_config()
        step, params = read_params(workdir, run)
        section = dataclasses.asdict(read_tokenizer(workdir, run)[1])
        return Source("run", split(run, params), step=step, tokenizer=section)
    if files.is_remote(folder):
        raise ConversionError(
            f"{path} holds no run; weights of others are read from a disk.", path=path
        )
    if (folder / huggingface_config.FILE).is_file() and weight_files.are_in(folder):
        found = huggingface.read_folder(folder)
        if found.extra["main"].get("generator") and "generator" not in found.networks:
            logging.warning("%s was written with a generator, which is not there any more.", path)
        return Source(
            "huggingface",
            found.networks,
            found.ignored,
            step=_step_of(found.extra["main"]),
            **_describe_vocabulary(folder),
        )
    prefix = tensorflow1.find_prefix(folder)
    if prefix is None:
        raise ConversionError(
            f"{path} is no run (config.json and checkpoints/), no Hugging Face folder (config.json "
            "and weights) and no TensorFlow checkpoint (FILE.index beside FILE.data-*); name one "
            "of these; a model on the hub must be downloaded first (hf download NAME --local-dir "
            "FOLDER).",
            path=path,
        )
    read = tensorflow1.read_checkpoint(prefix)
    return Source(
        "tensorflow1",
        _with_masking(read.networks, prefix.parent),
        read.ignored,
        step=read.step,
        moments=read.moments,
        **_describe_vocabulary(prefix.parent),
    )


def read_params(workdir: Workdir, config: Config, step: int | None = None) -> tuple[int, Any]:
    """(step, parameters on the host) of a checkpoint, by default the newest that is whole.

    Raises:
      CheckpointError: there is none, or it cannot be read.
      ConversionError: NaN or infinity in it.
    """
    folder = workdir.checkpoints
    step, params = checkpoint_reading.load_params(folder, abstract_params(config), step)
    check_finite(state.flatten(params), f"{folder / str(step)}")
    return step, params


def read_moments(workdir: Workdir, config: Config, step: int | None = None):
    """(step, Adam's first and second moments, each laid out like the networks of `config`).

    Arguments and errors as `read_params`; all parts of that checkpoint are whole.
    """
    step, arrays = checkpoint_reading.load_arrays(workdir.checkpoints, step)

    def networks(kind: str) -> dict[str, Network]:
        parts = (name.partition(f"/{kind}/") for name in arrays)
        found = {path: arrays[a + b + path] for a, b, path in parts if a.startswith("opt_state")}
        tree = to_tree({path: array for path, array in found.items() if path})
        # The gradient of a sum is that of what is added to the shared part, which gets none.
        return split(config, tree, fold=lambda shared, own: own)

    return step, (networks("mu"), networks("nu"))


def check_fits(source: Source, config: Config) -> None:
    """Refuses a source that is not the model of `config`.

    Raises:
      ConversionError: with the flags that make it fit.
    """
    different = matching.differences(matching.derive_fields(source.networks, config), config)
    if different:
        field, (value, now) = next(iter(different.items()))
        value, now = (to_text(each) or "nothing" for each in (value, now))
        wanted = matching.flags({path: pair[0] for path, pair in different.items()})
        raise ConversionError(
            f"the source holds a network with config.{field}={value}, this run has {now}; start "
            f"it with {wanted}",
            field=f"config.{field}",
            value=now,
        )


def initialize(config: Config, source: Source) -> tuple[Any, Report]:
    """Parameters of a new run of `config`, filled from `source` as far as that has them.

    Raises:
      ConversionError: the source's networks are not those of `config`.
    """
    check_fits(source, config)
    reads = source.networks["main"].encoder.reads_padding
    if reads != config.encoder.reads_padding:
        logging.warning(
            "The mixers of the weights %s padding, those of this run %s it "
            "(config.model.mask_convolution=%s): near padding it computes something else until it "
            "has adapted.",
            "read" if reads else "do not read",
            "do not read" if reads else "read",
            config.model.mask_convolution,
        )
    params, report = join(config, source.networks)
    return params, dataclasses.replace(report, ignored=(*report.ignored, *source.ignored))


def open_vocabulary(path: str, source: Source) -> tuple[Tokenizer, TokenizerSection]:
    """The vocabulary beside weights, and the settings that it is opened with.

    Args:
      path: of the weights, for a message.
      source: with a `tokenizer`.

    Raises:
      ConversionError: it has more entries than they have rows, so that ids would be of none.
    """
    section = dataclasses.replace(Config().tokenizer, **source.tokenizer)
    tokenizer = Tokenizer(section, Path(section.path))
    found, rows = tokenizer.vocab_size, source.networks["main"].embeddings.vocab_size
    if found > rows:
        raise ConversionError(
            f"{tokenizer.path} has {found} entries, but {path} is of a vocabulary of {rows}; put "
            "theirs there, or name it in Python with vocabulary=FILE.",
            value=found,
            path=tokenizer.path,
        )
    if found < rows:
        logging.warning(
            "%s has %d entries and the embedding table of %s %d rows: the last %d are taken for "
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
            f"config.json has step={shown(step)}, no number of steps.", field="step", value=step
        )
    return step


def _with_masking(networks: Mapping[str, Network], folder: Path) -> Mapping[str, Network]:
    """The networks as they were trained: the mark of a TensorFlow checkpoint of ours says that."""
    masked = mark.read(folder).get("mask_convolution", False)
    if not isinstance(masked, bool):
        raise ConversionError(
            f"{folder / mark.FILE} has mask_convolution={shown(masked)}, not true or false.",
            field="mask_convolution",
            value=masked,
            path=folder / mark.FILE,
        )

    return {name: network.with_masking(masked) for name, network in networks.items()}


def _describe_vocabulary(folder: Path) -> dict[str, Any]:
    """What `Source` says of it; who needs one and may name one in its place decides."""
    vocabulary = huggingface_tokenizer.find_vocabulary(folder)
    if vocabulary is None:
        return {}
    try:
        fields = huggingface_tokenizer.describe_vocabulary(folder, vocabulary.absolute())
    except OtherTokenizerError as error:
        logging.warning("%s; it is not read.", error)
        return {"not_read": str(error)}
    return {"tokenizer": fields}
