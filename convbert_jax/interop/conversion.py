"""Whole conversions: a run of ours, a Hugging Face folder, a TensorFlow checkpoint, each into the
others, with a proof at the end.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import logging
from etils import epath

from convbert_jax import files, links
from convbert_jax.config import TokenizerSection
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.files import damaged, parse_json
from convbert_jax.interop import certificate, mark, sources, stablehlo
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.huggingface import model_card
from convbert_jax.interop.huggingface import tokenizer as huggingface_tokenizer
from convbert_jax.interop.networks import ConversionError, Network, split
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.workdir import Workdir

_FORMS = ("huggingface", "tensorflow1", "stablehlo")
_EXAMPLES = 50
_ABOUT_PADDING = "See docs/weights.md#padded-batches."


def export(
    workdir: epath.PathLike,
    *,
    form: str = "huggingface",
    step: int | None = None,
    output: epath.PathLike | None = None,
    with_generator: bool | None = None,
) -> Path:
    """Writes a checkpoint of a run for other software.

    Args:
      with_generator: whether it is written too; None: if the format can hold it, else a warning
        says why it is left out.
      form: "huggingface", "tensorflow1" or "stablehlo".
      step: of the checkpoint; default the newest that is whole.
      output: default WORKDIR/FORM/step-STEP.

    Raises:
      CheckpointError: the checkpoint is damaged, or none is whole.
      WorkdirError: there is none of that step.
      ConversionError: the format cannot hold the model, there is no generator that is asked for,
        or the folder holds something else.
      ParityError: PyTorch does not compute the same numbers.
    """
    _check_form(form)
    workdir = Workdir(workdir)
    config, step = workdir.read_config(), workdir.choose_step(step)
    moments = None
    if form == "tensorflow1":
        step, moments = sources.read_moments(workdir, config, step)
    step, params = sources.read_params(workdir, config, step)
    tokenizer, section = read_tokenizer(workdir, config)
    networks = split(config, params)
    if not output:
        links.check(workdir.path)
        output = workdir.export(form, step)
    output = files.to_path(output)
    _check_output(output, workdir.path)
    return _write(
        output,
        form,
        networks,
        (tokenizer, section),
        title=config.name,
        source=workdir.path,
        step=step,
        generator=with_generator,
        moments=moments,
        texts=_examples(workdir),
    )


def convert(
    path: str,
    output: epath.PathLike,
    *,
    form: str = "huggingface",
    with_generator: bool | None = None,
) -> Path:
    """Writes the weights at `path`, as `sources.read_source` takes it, in another format.

    A vocabulary goes along if there is one beside the weights. Arguments and errors as `export`.
    """
    _check_form(form)
    output = files.to_path(output)
    _check_output(output, Path(path))
    source = sources.read_source(path)
    if source.ignored:
        logging.info("Ignored %d: %s.", len(source.ignored), ", ".join(source.ignored))
    vocabulary = None
    if source.tokenizer:
        vocabulary = sources.open_vocabulary(path, source)
    else:
        logging.warning("No vocabulary is written: beside the weights is none that is read here.")
    return _write(
        output,
        form,
        source.networks,
        vocabulary,
        title=Path(path).name,
        source=Path(path),
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
    source: Path,
    step: int,
    generator: bool | None,
    moments=None,
    texts: Sequence[Sequence[str]] = (),
) -> Path:
    if generator is None:
        networks = expressible(networks, form)
    elif not generator:
        networks = {"main": networks["main"]}
    elif "generator" not in networks:
        raise ConversionError(
            f"{source} has no generator; leave out --generator=true.",
            field="--generator",
            value="true",
            path=source,
        )
    elif form == "stablehlo":
        raise ConversionError(
            "--format=stablehlo has the encoder alone; leave out --generator=true, or take "
            "--format=huggingface or tensorflow1.",
            field="--generator",
            value="true",
        )
    if form == "huggingface":
        return write_huggingface(
            output, networks, vocabulary, title=title, step=step, texts=texts, source=source
        )
    if form == "tensorflow1":
        check_expressible(networks, tensorflow1.check_expressible)

    def write(folder: Path) -> None:
        if form == "stablehlo":
            stablehlo.write(folder, networks["main"])
            return
        prefix = folder / f"model.ckpt-{step}"
        kept = moments and tuple({name: part[name] for name in networks} for part in moments)
        tensorflow1.write_checkpoint(prefix, networks, step=step, moments=kept)
        if vocabulary:
            huggingface_tokenizer.write_vocabulary(folder, vocabulary[0])

    main = networks["main"]
    masked = not main.encoder.reads_padding
    replace_folder(output, write, source=str(_place(source)), mask_convolution=masked)
    logging.info("Wrote %s.", output)
    if form == "tensorflow1" and main.masked:
        padding = certificate.describe_padding(main, "the official TensorFlow code")
        logging.warning("%s %s", padding, _ABOUT_PADDING)
    return output


def expressible(networks: Mapping[str, Network], form: str) -> Mapping[str, Network]:
    """`networks`, or where `form` cannot hold their generator, which a warning tells, the model."""
    checks = {
        "huggingface": huggingface_config.check_expressible,
        "tensorflow1": tensorflow1.check_expressible,
    }
    try:
        if "generator" in networks and form in checks:
            checks[form](networks["generator"])
    except ConversionError as error:
        logging.warning("The generator is left out: %s", error)
        return {"main": networks["main"]}
    return networks


def write_huggingface(
    output: Path,
    networks: Mapping[str, Network],
    vocabulary: tuple[Tokenizer, TokenizerSection] | None,
    *,
    title: str,
    step: int,
    compare: bool = True,
    texts: Sequence[Sequence[str]] = (),
    source: Path | None = None,
) -> Path:
    """Writes the folder of a model, its generator inside, and certifies both.

    Args:
      vocabulary: tokenizer and the settings it was opened with; None writes no tokenizer files.
      title: for the model card, the name of the run.
      compare: with PyTorch, if it is installed; else only reads back.
      texts: examples, see `certificate.certify`.
      source: where the weights are, of which the folder keeps a number.

    Raises:
      ConversionError, ParityError: as `export`.
    """
    check_expressible(networks)
    warnings = []

    def write(folder: Path) -> None:
        for name, network in networks.items():
            role = _role(networks, name)
            place = folder if name == "main" else folder / huggingface.GENERATOR
            pad_id = vocabulary[0].special.pad if vocabulary else 0
            extra = {"step": step, "network": role}
            if name == "main":
                extra["generator"] = "generator" in networks
            huggingface.write_network(place, network, pad_id=pad_id, extra=extra)
            if vocabulary:
                huggingface_tokenizer.write_tokenizer(
                    place, *vocabulary, max_length=network.embeddings.positions
                )
            proof = certificate.certify(place, network, name, compare=compare, texts=texts)
            for line in proof.lines():
                logging.info("%s: %s", role, line)
            if proof.padding:
                warnings.append(proof.padding)
            card = model_card.write_card(
                network,
                title=f"{title}, {role}",
                made_by=f"Written by convbert_jax{f' after {step:,} steps' if step else ''}.",
                certificate=proof,
                notes=_notes(networks, name),
            )
            (place / model_card.FILE).write_text(card, encoding="utf-8")

    replace_folder(output, write, source=str(_place(source)) if source else "")
    logging.info("Wrote %s.", output)
    if compare and warnings:  # the main network's; the same holds for the generator
        logging.warning("%s %s", warnings[0], _ABOUT_PADDING)
    return output


def check_expressible(
    networks: Mapping[str, Network],
    check: Callable[[Network], None] = huggingface_config.check_expressible,
) -> None:
    """Refuses what other software cannot compute, by default Hugging Face's classes.

    Args:
      check: raises ConversionError for a network that cannot be expressed.

    Raises:
      ConversionError: one sentence that names the network and what to do.
    """
    for name, network in networks.items():
        try:
            check(network)
        except ConversionError as error:
            hint = " (leave it out with --generator=false)" if name == "generator" else ""
            raise ConversionError(
                f"the {_role(networks, name)}{hint}: {error}",
                field=error.field,
                value=error.value,
            ) from None


def replace_folder(
    output: Path, write: Callable[[Path], None], *, source: str, **said: bool
) -> None:
    """Makes `output` by `write`, whole or not at all; replaces only what was made here.

    Args:
      source, said: kept beside it, see `mark.write`.

    Raises:
      ConversionError: `output` is somebody else's, or cannot be written.
    """
    if output.exists() and not mark.is_in(output):
        raise ConversionError(
            f"{output} exists and was not exported from here; remove it or name another --output.",
            path=output,
        )
    if files.is_remote(output):
        with files.written_locally(output) as place:
            write(place)
            mark.write(place, source, **said)
            files.remove_tree(output)  # once the new one is whole
        return
    unfinished = output.with_name(output.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        mark.write(unfinished, source, **said)
        shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)
    except OSError as error:
        if not error.errno:  # not of the disk
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConversionError(
            f"{output} cannot be written ({error.strerror}); free some space, or name another "
            "--output.",
            path=output,
        ) from error


def _place(path: Path) -> Path:
    return path if files.is_remote(path) else Path(os.path.realpath(os.path.expanduser(path)))


def _check_form(form: str) -> None:
    if form not in _FORMS:
        raise ConversionError(
            f"form={form!r} is unknown; choose from {', '.join(_FORMS)}.", field="form", value=form
        )


def _check_output(output: Path, source: Path) -> None:
    """Refuses an output that would replace what is to be read, or is of something else."""
    output, place = _place(output), _place(source)
    if output in (place, *place.parents):
        raise ConversionError(
            f"--output={output} is where the weights are, and would replace them; name another "
            "--output.",
            field="--output",
            value=str(output),
        )
    mark.check_own(output, str(place))


def _examples(workdir: Workdir) -> list[list[str]]:
    """The first texts that a fine-tuned run predicted, if it keeps them."""
    for path in sorted(workdir.predictions.glob("validation*.jsonl")):
        with path.open("rb") as file:
            lines = list(itertools.islice(file, _EXAMPLES))
        try:
            found = [parse_json(line) for line in lines]
            return [line.get("texts") or [" ".join(line["words"])] for line in found]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(path, error, "take it away, nothing else is lost") from None
    return []


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
