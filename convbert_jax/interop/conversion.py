"""Export of runs and conversion to Hugging Face, TensorFlow 1, ONNX and StableHLO, with checks."""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import Config, TokenizerSection, UserError
from convbert_jax.data import batching, stores
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interop import (
    huggingface,
    huggingface_tokenizer,
    lfm2,
    onnx_export,
    parity,
    sentence_transformers,
    sources,
    stablehlo,
    tensorflow1,
    weight_files,
)
from convbert_jax.interop.networks import ConversionError, Network, split
from convbert_jax.interop.sentence_transformers import VectorConfig
from convbert_jax.interop.sources import read_tokenizer
from convbert_jax.storage import damaged, parse_json
from convbert_jax.workdir import Workdir

_FORMS = ("huggingface", "tensorflow1", "onnx", "stablehlo")
_EXAMPLES = 50
_ABOUT_PADDING = "See docs/howto/export_weights.md#padded-batches."


def export(
    workdir: epath.PathLike,
    *,
    form: str = "huggingface",
    step: int | None = None,
    output: epath.PathLike | None = None,
    with_generator: bool | None = None,
    quantize: str | None = None,
) -> Path:
    """Exports a checkpoint of a run for other software.

    Args:
      workdir: folder of the run.
      form: "huggingface", "tensorflow1", "onnx" (a Hugging Face folder with ONNX files) or
        "stablehlo".
      step: step of the checkpoint; default the newest complete one.
      output: folder to write; default WORKDIR/FORM/step-STEP.
      with_generator: whether to write the generator. None writes it if the format can hold it, and
        otherwise logs a warning with the reason.
      quantize: for "onnx": "int8" also writes a model with int8 weights.

    Returns:
      the folder that was written.

    Raises:
      CheckpointError: the checkpoint is damaged, or no checkpoint is complete.
      WorkdirError: the run has no checkpoint of that step.
      ConversionError: the format cannot hold the model, the requested generator does not exist,
        or the output folder holds something else.
      ParityError: PyTorch or ONNX Runtime computes different outputs.
    """
    _check_form(form, quantize)
    workdir = Workdir(workdir)
    step = workdir.choose_step(step)
    config = workdir.read_config_at(step)
    if config.recipe == "causal_lm" and form == "huggingface":
        return _export_language_model(workdir, config, step, output)
    moments = None
    if form == "tensorflow1":
        step, moments = sources.read_moments(workdir, config, step)
    step, params = sources.read_params(workdir, config, step)
    tokenizer, section = read_tokenizer(workdir, config)
    networks = split(config, params)
    output = _choose_output(workdir, form, step, output)
    texts = _examples(workdir)
    if quantize and not texts:
        texts = _heldout_texts(workdir, config, tokenizer)
    return _write(
        output,
        form,
        networks,
        (tokenizer, section),
        title=config.name,
        source=workdir.path,
        step=step,
        generator=with_generator,
        quantize=quantize,
        moments=moments,
        texts=texts,
        vectors=sentence_transformers.of_run(config),
        about=_describe_privacy(config),
    )


def _describe_privacy(config: Config) -> list[str]:
    """Returns a paragraph of the model card; [] without differential privacy."""
    f = config.finetune
    if config.recipe != "finetune" or not f.privacy_epsilon:
        return []
    return [
        f"Fine-tuning was ({f.privacy_epsilon:g}, {f.privacy_delta:g})-differentially private "
        "(DP-SGD): neighboring training sets differ in one row, which is added or removed."
    ]


def _choose_output(workdir: Workdir, form: str, step: int, output: epath.PathLike | None) -> Path:
    """Returns the folder to write, which replaces neither the run nor another model's export."""
    if not output:
        storage.check_links(workdir.path)
        output = workdir.export(form, step)
    output = storage.to_path(output)
    _check_output(output, workdir.path)
    return output


def _export_language_model(
    workdir: Workdir, config: Config, step: int, output: epath.PathLike | None
) -> Path:
    """Writes the folder of an Lfm2ForCausalLM with its tokenizer, and compares the logits."""
    model = config.language_model
    lfm2.check_expressible(model)
    step, params = sources.read_params(workdir, config, step)
    tokenizer, section = read_tokenizer(workdir, config)
    output = _choose_output(workdir, "huggingface", step, output)
    special = tokenizer.special
    ids = {"pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep}

    def write(folder: Path) -> None:
        lfm2.write_folder(folder, model, params, ids)
        huggingface_tokenizer.write_tokenizer(
            folder, tokenizer, section, max_length=model.tokens.positions, types=False, ends=False
        )
        for line in parity.check_logits(folder, model, params):
            logging.info("%s", line)

    replace_folder(output, write, source=str(_place(workdir.path)))
    logging.info("Wrote %s.", output)
    return output


def convert(
    path: str,
    output: epath.PathLike,
    *,
    form: str = "huggingface",
    with_generator: bool | None = None,
    quantize: str | None = None,
) -> Path:
    """Converts the weights at `path` to another format, with the vocabulary next to them if any.

    Args:
      path: run, Hugging Face folder or TensorFlow 1 checkpoint, see `sources.read_source`.
      output, form, with_generator, quantize: as in `export`, which raises the same errors.
    """
    _check_form(form, quantize)
    output = storage.to_path(output)
    _check_output(output, Path(path))
    source = sources.read_source(path)
    if source.ignored:
        logging.info("Ignored %d tensors: %s.", len(source.ignored), ", ".join(source.ignored))
    vocabulary = None
    if source.tokenizer:
        vocabulary = sources.open_vocabulary(path, source)
    else:
        logging.warning("Wrote no vocabulary: found no supported one next to the weights.")
    return _write(
        output,
        form,
        source.networks,
        vocabulary,
        title=Path(path).name,
        source=Path(path),
        step=source.step,
        generator=with_generator,
        quantize=quantize,
        moments=source.moments,
        vectors=sources.read_vectors(path, source),
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
    quantize: str | None,
    moments=None,
    texts: Sequence[Sequence[str]] = (),
    vectors: VectorConfig | None = None,
    about: Sequence[str] = (),
) -> Path:
    if generator is None:
        networks = expressible(networks, form)
    elif not generator:
        networks = {"main": networks["main"]}
    elif "generator" not in networks:
        raise ConversionError(
            f"Cannot use --generator=true: {source} has no generator. Remove the flag.",
            field="--generator",
            value="true",
            path=source,
        )
    elif form == "stablehlo":
        raise ConversionError(
            "Cannot use --generator=true with --format=stablehlo, which exports only the encoder. "
            "Remove the flag, or use --format=huggingface or tensorflow1.",
            field="--generator",
            value="true",
        )
    if form in ("huggingface", "onnx"):
        return write_huggingface(
            output,
            networks,
            vocabulary,
            title=title,
            step=step,
            texts=texts,
            source=source,
            vectors=vectors,
            onnx=form == "onnx",
            quantize=quantize,
            about=about,
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
        where = "the official TensorFlow code"
        padding = parity.describe_padding(main, where, "Run batches of equal length.")
        logging.warning("%s %s", padding, _ABOUT_PADDING)
    return output


def expressible(networks: Mapping[str, Network], form: str) -> Mapping[str, Network]:
    """Returns `networks`, without the generator (and with a warning) if `form` cannot hold it."""
    checks = {
        "huggingface": huggingface.check_expressible,
        "onnx": huggingface.check_expressible,
        "tensorflow1": tensorflow1.check_expressible,
    }
    try:
        if "generator" in networks and form in checks:
            checks[form](networks["generator"])
    except ConversionError as error:
        logging.warning("Skipped the generator: %s", error)
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
    vectors: VectorConfig | None = None,
    onnx: bool = False,
    quantize: str | None = None,
    about: Sequence[str] = (),
) -> Path:
    """Writes a Hugging Face folder, with the generator in a subfolder, and checks parity of both.

    Args:
      vocabulary: tokenizer and the settings that it was opened with; None writes no tokenizer
        files.
      title: name of the run, for the model card.
      step: training steps, for the model card and config.json.
      compare: whether to compare outputs with PyTorch, if it is installed.
      texts: examples, see `parity.check_parity`.
      source: path of the weights, kept in the folder as a checksum.
      vectors: how the main network computes vectors, for sentence-transformers; None if it was not
        trained to give vectors.
      onnx, quantize: whether to add ONNX files, see `onnx_export.write`.
      about: further paragraphs of the model card.

    Raises:
      ConversionError, ParityError: as in `export`.
    """
    check_expressible(networks)
    warnings = []

    def write(folder: Path) -> None:
        for name, network in networks.items():
            role = _role(networks, name)
            place = folder if name == "main" else folder / huggingface.GENERATOR
            special = vocabulary[0].special if vocabulary else None
            pad_id = special.pad if special else 0
            ids = {"cls": special.cls, "sep": special.sep} if special else {}
            extra = {"step": step, "network": role}
            if name == "main":
                extra["generator"] = "generator" in networks
            huggingface.write_network(place, network, pad_id=pad_id, ids=ids, extra=extra)
            if vocabulary:
                huggingface_tokenizer.write_tokenizer(
                    place,
                    *vocabulary,
                    max_length=network.embeddings.positions,
                    types=network.embeddings.types > 0,
                )
            own_vectors = vectors if name == "main" else None
            if own_vectors:
                sentence_transformers.write(
                    place,
                    own_vectors,
                    hidden_size=network.encoder.hidden_size,
                    positions=network.embeddings.positions,
                )
            proof = parity.check_parity(place, network, name, compare=compare, texts=texts)
            for line in proof.lines():
                logging.info("%s: %s", role, line)
            if proof.padding:
                warnings.append(proof.padding)
            notes = [*about, *_notes(networks, name)]
            if onnx:
                lines = onnx_export.write(
                    place, network, vectors=own_vectors, quantize=quantize, texts=texts
                )
                for line in lines:
                    logging.info("%s: %s", role, line)
                notes.append("## ONNX\n\n" + "\n".join(f"- {line}" for line in lines))
            card = parity.write_card(
                network,
                title=f"{title}, {role}",
                made_by=f"Written by convbert_jax{f' after {step:,} steps' if step else ''}.",
                report=proof,
                notes=notes,
                vectors=own_vectors,
            )
            (place / parity.CARD).write_text(card, encoding="utf-8")

    replace_folder(output, write, source=str(_place(source)) if source else "")
    logging.info("Wrote %s.", output)
    if compare and warnings:  # the first one is the main network's; the generator's is similar
        logging.warning("%s %s", warnings[0], _ABOUT_PADDING)
    return output


def check_expressible(
    networks: Mapping[str, Network],
    check: Callable[[Network], None] = huggingface.check_expressible,
) -> None:
    """Checks that other software, by default transformers, can compute the networks.

    Args:
      check: raises ConversionError for a network that cannot be expressed.

    Raises:
      ConversionError: names the network, the reason and a fix.
    """
    for name, network in networks.items():
        try:
            check(network)
        except ConversionError as error:
            hint = " (skip it with --generator=false)" if name == "generator" else ""
            raise ConversionError(
                f"Cannot export the {_role(networks, name)}{hint}: {error}",
                field=error.field,
                value=error.value,
            ) from None


def replace_folder(
    output: Path, write: Callable[[Path], None], *, source: str, **said: bool
) -> None:
    """Writes a folder atomically; replaces only folders that this package exported.

    Args:
      output: folder to create or replace.
      write: fills an empty folder.
      source, said: content of the manifest, see `weight_files.write_manifest`.

    Raises:
      ConversionError: `output` exists and is not an export, or cannot be written.
    """
    if output.exists() and not weight_files.is_export(output):
        raise ConversionError(
            f"{output} exists and was not exported by convbert_jax. Remove it or use another "
            "--output.",
            path=output,
        )
    if storage.is_remote(output):
        with storage.written_locally(output) as place:
            write(place)
            weight_files.write_manifest(place, source, **said)
            storage.remove_tree(output)  # only when the new folder is complete
        return
    unfinished = output.with_name(output.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        weight_files.write_manifest(unfinished, source, **said)
        shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)
    except OSError as error:
        if not error.errno:  # not an error of the operating system
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConversionError(
            f"Cannot write {output}: {error.strerror}. Free disk space or use another --output.",
            path=output,
        ) from error


def _place(path: Path) -> Path:
    return path if storage.is_remote(path) else Path(os.path.realpath(os.path.expanduser(path)))


def _check_form(form: str, quantize: str | None) -> None:
    if form not in _FORMS:
        raise ConversionError(
            f"Unknown form={form!r}; choose one of {', '.join(_FORMS)}.", field="form", value=form
        )
    if form == "onnx":
        onnx_export.check_packages()
    if quantize not in (None, "int8") or (quantize and form != "onnx"):
        raise ConversionError(
            f"quantize={quantize!r} is not supported with form={form!r}; use 'int8' with 'onnx'.",
            field="quantize",
            value=quantize,
        )


def _check_output(output: Path, source: Path) -> None:
    """Checks that the output replaces neither the weights nor the export of another model."""
    output, place = _place(output), _place(source)
    if output in (place, *place.parents):
        raise ConversionError(
            f"--output={output} would overwrite the weights that are read. Use another --output.",
            field="--output",
            value=str(output),
        )
    weight_files.check_own_export(output, str(place))


def _examples(workdir: Workdir) -> list[list[str]]:
    """Returns the first texts in the predictions of a fine-tuned run, if it has stored any."""
    for path in sorted(workdir.predictions.glob("validation*.jsonl")):
        with path.open("rb") as file:
            lines = list(itertools.islice(file, _EXAMPLES))
        try:
            found = [parse_json(line) for line in lines]
            return [line.get("texts") or [" ".join(line["words"])] for line in found]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(path, error, "remove it; only the predictions are lost") from None
    return []


def _heldout_texts(workdir: Workdir, config: Config, tokenizer: Tokenizer) -> list[list[str]]:
    """Returns beginnings of held-out texts of a run; none for a mixture or if they are not here."""
    directory = workdir.data(config)
    if storage.is_remote(directory) or config.data.mixture or config.spec.data == "task":
        return []
    try:
        data = stores.store_of(config).open_prepared(config, directory)
    except UserError as error:
        logging.warning("Cannot read held-out texts: %s", error)
        return []
    if data is None:
        return []
    if config.spec.data == "parallel":
        fields = ("source", "source_ids")
        batches = batching.pair_evaluation_batches(data, config.parallel, rows=_EXAMPLES)
    else:
        fields = ("tokens", "segment_ids")
        batches = batching.evaluation_batches(data, batch_size=_EXAMPLES, rows=_EXAMPLES)
    rows = (pair for batch in batches for pair in zip(*map(batch.get, fields), strict=True))
    first = (tokens[segments == 1] for tokens, segments in rows)
    return [[tokenizer.decode(tokens)] for tokens in first if len(tokens)]


def _role(networks: Mapping[str, Network], name: str) -> str:
    if name == "generator":
        return "generator"
    detects = "generator" in networks or networks[name].has("rtd_head")
    return "discriminator" if detects else "encoder"


def _notes(networks: Mapping[str, Network], name: str) -> list[str]:
    if name == "main" and "generator" in networks:
        return [
            "The generator, a masked language model, is in the folder `generator` "
            f'(`from_pretrained("FOLDER", subfolder="{huggingface.GENERATOR}")`).'
        ]
    return []
