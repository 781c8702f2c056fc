"""Whole conversions: a run of ours, a Hugging Face folder, a TensorFlow checkpoint, each into the
others, with a proof at the end.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging

from convbert_jax.config import Config, TokenizerSection, from_config_dict
from convbert_jax.data.tokenizer import Tokenizer, load_tokenizer
from convbert_jax.interop import (
    certificate,
    huggingface,
    huggingface_config,
    huggingface_tokenizer,
    matching,
    model_card,
    stablehlo,
    tensorflow1,
    weight_files,
)
from convbert_jax.interop.networks import (
    ConversionError,
    Network,
    Report,
    abstract_params,
    join,
    split,
    to_tree,
)
from convbert_jax.training import checkpoint

MARK = "exported_by_convbert_jax.json"  # in every folder written here, which may be replaced


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights from anywhere.

    Attributes:
      kind: "huggingface", "tensorflow1" or "run".
      networks: "main" and, if there is one, "generator".
      ignored: what the source has besides, by its own names.
      step: steps it was trained for, 0 if it does not say.
      moments: Adam's first and second moments as networks, if the source has them.
      tokenizer: fields of config.tokenizer for the vocabulary beside the weights, if there is one.
    """

    kind: str
    networks: Mapping[str, Network]
    ignored: tuple[str, ...] = ()
    step: int = 0
    moments: tuple[Mapping[str, Network], Mapping[str, Network]] | None = None
    tokenizer: Mapping[str, Any] | None = None


def read_source(path: str) -> Source:
    """Reads a run's folder, a Hugging Face folder, or a TensorFlow 1 checkpoint.

    Args:
      path: for TensorFlow the prefix, as model.ckpt-1000000, one of its files or its folder.

    Raises:
      ConversionError: there is nothing of these, or it cannot be read.
    """
    folder = Path(path).expanduser()
    if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
        run = read_config(folder)
        step, params = read_params(folder, run)
        section = dataclasses.asdict(read_tokenizer(folder, run)[1])
        return Source("run", split(run, params), step=step, tokenizer=section)
    if (folder / huggingface_config.FILE).is_file() and weight_files.are_in(folder):
        found = huggingface.read_folder(folder)
        return Source(
            "huggingface",
            found.networks,
            found.ignored,
            step=int(found.extra["main"].get("step", 0)),
            tokenizer=_vocabulary_fields(folder),
        )
    prefix = tensorflow1.find_prefix(folder)
    if prefix is None:
        raise ConversionError(
            f"{path} is no run (config.json and checkpoints/), no Hugging Face folder (config.json "
            "and weights) and no TensorFlow checkpoint (FILE.index beside FILE.data-*); name one "
            "of these; a model on the hub must be downloaded first (hf download NAME --local-dir "
            "FOLDER)."
        )
    read = tensorflow1.read_checkpoint(prefix)
    return Source(
        "tensorflow1",
        read.networks,
        read.ignored,
        step=read.step,
        moments=read.moments,
        tokenizer=_vocabulary_fields(prefix.parent),
    )


def read_config(workdir: Path) -> Config:
    """The config that a run keeps.

    Raises:
      ConversionError: there is no run in `workdir`.
    """
    try:
        return from_config_dict(json.loads((workdir / "config.json").read_text()))
    except OSError as error:
        raise ConversionError(
            f"--workdir={workdir} holds no run (config.json: {error.strerror}); train one, or name "
            "another folder."
        ) from error
    except ValueError as error:
        raise ConversionError(f"{workdir / 'config.json'} is damaged ({error}).") from error


def read_params(workdir: Path, config: Config, step: int | None = None) -> tuple[int, Any]:
    """(step, parameters on the host) of a checkpoint, by default the newest.

    Raises:
      CheckpointError: there is none, or it cannot be read.
    """
    folder = workdir / "checkpoints"
    params = checkpoint.restore_params(folder, abstract_params(config), step)
    step = checkpoint.list_steps(folder)[-1] if step is None else step
    return step, jax.device_get(params)


def read_moments(workdir: Path, config: Config, step: int):
    """Adam's first and second moments of a checkpoint, laid out like its networks.

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    arrays = checkpoint.load_arrays(workdir / "checkpoints", step)

    def networks(kind: str) -> dict[str, Network]:
        parts = (name.partition(f"/{kind}/") for name in arrays)
        found = {path: arrays[a + b + path] for a, b, path in parts if a.startswith("opt_state")}
        return split(config, to_tree({path: array for path, array in found.items() if path}))

    return networks("mu"), networks("nu")


def read_tokenizer(workdir: Path, config: Config) -> tuple[Tokenizer, Any]:
    """(the vocabulary of a run, the settings to open its file with).

    Raises:
      TokenizerError: it is not there any more.
    """
    folder = Path(config.data.directory) if config.data.directory else workdir / "data"
    tokenizer = load_tokenizer(config.tokenizer, folder)
    path = str(tokenizer.path.absolute())
    return tokenizer, dataclasses.replace(config.tokenizer, path=path)


def check_fits(source: Source, config: Config) -> None:
    """Refuses a source that is not the model of `config`.

    Raises:
      ConversionError: with the flags that make it fit.
    """
    different = matching.differences(matching.derive_fields(source.networks, config), config)
    if different:
        flags = " ".join(f"--config.{field}={value}" for field, (value, _) in different.items())
        field, (value, now) = next(iter(different.items()))
        raise ConversionError(
            f"the source holds a network with config.{field}={value!r}, this run has {now!r}; "
            f"start it with {flags}."
        )


def initialize(config: Config, source: Source) -> tuple[Any, Report]:
    """Parameters of a new run of `config`, filled from `source` as far as that has them.

    Raises:
      ConversionError: the source's networks are not those of `config`.
    """
    check_fits(source, config)
    layer = source.networks["main"].layer
    if layer.mixer == "mixed" and layer.mask_convolution != config.model.mask_convolution:
        logging.warning(
            "The weights were trained with config.model.mask_convolution=%s, this run has %s: "
            "near padding it computes something else until it has adapted.",
            layer.mask_convolution,
            config.model.mask_convolution,
        )
    params, report = join(config, source.networks)
    return params, dataclasses.replace(report, ignored=(*report.ignored, *source.ignored))


def export(
    workdir: Path,
    *,
    form: str = "huggingface",
    step: int | None = None,
    output: Path | None = None,
    with_generator: bool = True,
) -> Path:
    """Writes a checkpoint of a run for other software.

    Args:
      form: "huggingface", "tensorflow1" or "stablehlo".
      step: of the checkpoint; default the newest.
      output: default WORKDIR/FORM/step-STEP.

    Raises:
      ConversionError: the format cannot hold the model, or the folder holds something else.
      ParityError: PyTorch does not compute the same numbers.
    """
    config = read_config(workdir)
    step, params = read_params(workdir, config, step)
    tokenizer, section = read_tokenizer(workdir, config)
    networks = split(config, params)
    output = output or workdir / form / f"step-{step}"
    return _write(
        output,
        form,
        networks,
        (tokenizer, section),
        title=config.name,
        step=step,
        generator=with_generator,
        moments=read_moments(workdir, config, step) if form == "tensorflow1" else None,
    )


def convert(
    path: str, output: Path, *, form: str = "huggingface", with_generator: bool = True
) -> Path:
    """Writes the weights at `path`, as `read_source` takes it, in another format.

    A vocabulary goes along if there is one beside the weights. Arguments and errors as `export`.
    """
    source = read_source(path)
    if source.ignored:
        logging.info("Ignored %d: %s.", len(source.ignored), ", ".join(source.ignored))
    vocabulary = None
    if source.tokenizer:
        section = dataclasses.replace(Config().tokenizer, **source.tokenizer)
        vocabulary = Tokenizer(section, Path(section.path)), section
    else:
        logging.warning("There is no vocabulary beside the weights: none is written.")
    return _write(
        output,
        form,
        source.networks,
        vocabulary,
        title=Path(path).name,
        step=source.step,
        generator=with_generator,
        moments=source.moments,
    )


def _write(
    output: Path,
    form: str,
    networks: Mapping[str, Network],
    vocabulary,
    *,
    title: str,
    step: int,
    generator: bool,
    moments=None,
) -> Path:
    if not generator:
        networks = {"main": networks["main"]}
    if form == "huggingface":
        return write_huggingface(output, networks, vocabulary, title=title, step=step)

    def write(folder: Path) -> None:
        if form == "stablehlo":
            stablehlo.write(folder, networks["main"])
            return
        prefix = folder / f"model.ckpt-{step}"
        kept = moments and tuple({name: part[name] for name in networks} for part in moments)
        tensorflow1.write_checkpoint(prefix, networks, step=step, moments=kept)
        if vocabulary:
            huggingface_tokenizer.write_vocabulary(folder, vocabulary[0])

    replace_folder(output, write)
    logging.info("Wrote %s.", output)
    layer = networks["main"].layer
    if form == "tensorflow1" and layer.mixer == "mixed" and layer.mask_convolution:
        logging.warning(
            "The official code reads padding in its convolution, this model was trained not to: "
            "the same numbers come out of rows without padding only."
        )
    return output


def write_huggingface(
    output: Path,
    networks: Mapping[str, Network],
    vocabulary: tuple[Tokenizer, TokenizerSection] | None,
    *,
    title: str,
    step: int,
    compare: bool = True,
) -> Path:
    """Writes the folder of a model, its generator inside, and certifies both.

    Args:
      vocabulary: tokenizer and the settings it was opened with; None writes no tokenizer files.
      title: for the model card, the name of the run.
      compare: with PyTorch, if it is installed; else only reads back.

    Raises:
      ConversionError, ParityError: as `export`.
    """
    check_expressible(networks)

    def write(folder: Path) -> None:
        for name, network in networks.items():
            role = _role(networks, name)
            place = folder if name == "main" else folder / huggingface.GENERATOR
            pad_id = vocabulary[0].special.pad if vocabulary else 0
            extra = {"step": step, "network": role}
            huggingface.write_network(place, network, pad_id=pad_id, extra=extra)
            if vocabulary:
                huggingface_tokenizer.write_tokenizer(
                    place, *vocabulary, max_length=network.embeddings.positions
                )
            proof = certificate.certify(place, network, name, compare=compare)
            for line in proof.lines():
                logging.info("%s: %s", role, line)
            card = model_card.write_card(
                network,
                title=f"{title}, {role}",
                made_by=f"Written by convbert_jax after {step:,} steps of training.",
                certificate=proof,
                notes=_notes(networks, name),
            )
            (place / model_card.FILE).write_text(card, encoding="utf-8")

    replace_folder(output, write)
    logging.info("Wrote %s.", output)
    return output


def check_expressible(networks: Mapping[str, Network]) -> None:
    """Refuses what Hugging Face's classes cannot compute, see huggingface_config.

    Raises:
      ConversionError: one sentence that names the network and what to do.
    """
    for name, network in networks.items():
        try:
            huggingface_config.check_expressible(network)
        except ConversionError as error:
            hint = " (leave it out with --generator=false)" if name == "generator" else ""
            raise ConversionError(f"the {_role(networks, name)}{hint}: {error}") from None


def replace_folder(output: Path, write: Callable[[Path], None]) -> None:
    """Makes `output` by `write`, whole or not at all; replaces only what was made here.

    Raises:
      ConversionError: `output` is somebody else's, or cannot be written.
    """
    if output.exists() and not (output / MARK).is_file():
        raise ConversionError(
            f"{output} exists and was not exported from here; remove it or name another --output."
        )
    unfinished = output.with_name(output.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConversionError(
            f"{output} cannot be written ({error.strerror}); name another --output."
        ) from error
    write(unfinished)
    (unfinished / MARK).write_text(json.dumps({"format": 1}) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)


def _vocabulary_fields(folder: Path) -> dict[str, Any] | None:
    vocabulary = huggingface_tokenizer.find_vocabulary(folder)
    if vocabulary is None:
        return None
    return huggingface_tokenizer.describe_vocabulary(folder, vocabulary.absolute())


def _role(networks: Mapping[str, Network], name: str) -> str:
    if name == "generator":
        return "generator"
    detects = "generator" in networks or networks[name].has("rtd_head")
    return "discriminator" if detects else "encoder"


def _notes(networks: Mapping[str, Network], name: str) -> list[str]:
    if name == "main" and "generator" in networks:
        return [
            "Its generator, a masked language model, is in the folder `generator` "
            f'(`from_pretrained("FOLDER", subfolder="{huggingface.GENERATOR}")`).'
        ]
    return []
