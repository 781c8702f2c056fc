"""Fine-tuning: weights from anywhere, labelled tasks, and the runs that follow."""

import dataclasses
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import jax
from absl import logging

from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.data import glue, own_task, squad
from convbert_jax.data.errors import DataError
from convbert_jax.data.labelled_text import LabelledTask
from convbert_jax.data.tokenizer import Tokenizer, check_tokenizer, follow_file, load_tokenizer
from convbert_jax.files import write_text
from convbert_jax.finetuning import (
    classification,
    prediction_files,
    question_answering,
    run,
    score_table,
)
from convbert_jax.finetuning.programs import Params, Programs
from convbert_jax.finetuning.results import TaskResult
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.networks import stack, to_tree
from convbert_jax.recipes import devices, finetuned
from convbert_jax.training import compilation, sharding, workdir

_OF_PRETRAINING = (
    *("generator", "objective", "data", "train", "checkpoint", "outputs"),
    *("optimizer.learning_rate", "optimizer.warmup_steps"),
)
_LESS_MEMORY = (
    "lower config.finetune.batch_size or eval_batch_size, or set config.model.remat=full or "
    "config.finetune.vectorize_seeds=false"
)


def finetune(config: Config, folder: Path, given: Collection[str] = ()) -> list[TaskResult]:
    """Fine-tunes on every task of `config.finetune.tasks`, going on from what `folder` has.

    Args:
      given: as `read_start` takes it.

    Raises:
      UserError: weights, vocabulary, data and config do not fit together; see the kinds of it.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "fine-tuning runs as one process, on all devices of its machine; start it without "
            "--multihost."
        )
    found = devices.find_devices(config)
    mesh = make_mesh(config, found)
    compilation.enable_compile_cache(config.train.compile_cache)
    config, tokenizer, weights = read_start(config, given)
    tasks = open_tasks(config, tokenizer)
    with workdir.open_workdir(folder, config):
        devices.print_config(config, leave_out=_OF_PRETRAINING)
        programs = Programs(config, devices.compute_dtype(config, found[0]), mesh)
        with jax.set_mesh(mesh), compilation.explain_out_of_memory(_LESS_MEMORY):
            results = run.finetune(config, folder, tasks, programs, tokenizer, weights)
    _report(config, folder, results)
    return results


def make_mesh(config: Config, found: list[jax.Device]):
    """The batch over `config.mesh.data` devices, by default all; parameters on each.

    Raises:
      ConfigError: another axis is asked for.
      ShardingError: a batch size does not divide.
    """
    section = config.mesh
    if section.fsdp != 1 or section.tensor != 1:
        raise ConfigError(
            "fine-tuning copies the parameters to every device; set config.mesh.fsdp=1 and "
            "config.mesh.tensor=1."
        )
    mesh = sharding.make_mesh(section, found if section.data == -1 else found[: section.data])
    for size in (config.finetune.batch_size, config.finetune.eval_batch_size):
        sharding.check_batch_size(size, 1, mesh)
    return mesh


def read_start(
    config: Config, given: Collection[str] = ()
) -> tuple[Config, Tokenizer, Params | None]:
    """The config with sizes and vocabulary of the weights, the vocabulary, and the weights.

    Weights are nested dicts `embeddings` and `encoder` on the host; None with
    config.finetune.from_scratch, or without config.init_from, where config.model has the sizes.

    Args:
      given: paths of fields that were asked for by name, "tokenizer.kind" for one: where the file
        of config.tokenizer.path tells another value, these are an error, others follow it.

    Raises:
      ConfigError, ConversionError: no weights, no vocabulary, or one that is not theirs.
    """
    fields = {}
    source = None
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    if config.init_from:
        source = sources.read_source(config.init_from)
        importing.check_entries(source, config)
        fields = matching.derive_fields(source.networks, config)
        fields |= importing.tokenizer_fields(source, config, given)
    elif not config.tokenizer.path:
        raise ConfigError(
            "config.init_from is empty; name the weights to start from, or for random ones a "
            "vocabulary with --config.tokenizer.path=vocab.txt."
        )
    f = config.finetune
    fields |= {"model.dropout": f.dropout, "model.attention_dropout": f.dropout}
    config = matching.replace(config, fields)
    config = matching.replace(config, _shapes(config))
    config = from_config_dict(to_dict(config))
    tokenizer = load_tokenizer(config.tokenizer, Path())
    check_tokenizer(tokenizer, config.tokenizer, [])
    if source is None:
        return config, tokenizer, None
    importing.check_vocabulary(source, tokenizer)
    if f.from_scratch:
        logging.info("Random weights, of the sizes of %s.", config.init_from)
        return config, tokenizer, None
    return config, tokenizer, _encoder_weights(source)


def open_tasks(config: Config, tokenizer: Tokenizer) -> list[Callable[[], FinetuneTask]]:
    """The tasks that are here, each to be read when it is called; names what is absent.

    Raises:
      ConfigError: an unknown name.
      DataError: the only task, or every task, is absent.
    """
    names = config.finetune.tasks
    if not names:
        raise ConfigError("config.finetune.tasks is empty; name tasks, or take configs/glue.py:all")
    distill_from = config.finetune.distill_from
    teacher = finetuned.open_teacher(distill_from) if distill_from else None
    makers, absent = [], []
    for name in names:
        if name in question_answering.VERSIONS:
            if teacher:
                raise ConfigError(
                    f"config.finetune.distill_from teaches no answers; leave it out, or {name}."
                )
            squad.check_present(question_answering.VERSIONS[name], config.finetune.data)
            makers.append(partial(question_answering.make_task, name, config, tokenizer))
            continue
        source = _open_source(name, config)
        missing = [source.absent[s] for s in source.splits if s in source.absent]
        if source.has("train") and any(map(source.has, source.validation_splits)):
            teach = teacher.for_task(source) if teacher else None
            makers.append(
                partial(classification.make_task, source, config, tokenizer, teacher=teach)
            )
            for sentence in missing:
                logging.info("%s", sentence)
        else:
            absent.append(missing[0])
    for sentence in absent:
        if not makers:
            raise DataError(sentence)
        logging.warning("Left out: %s", sentence)
    return makers


def _open_source(name: str, config: Config) -> LabelledTask:
    if name == "own":
        return own_task.open_task(config.task)
    if name.lower() in map(str.lower, glue.GLUE):
        return glue.open_task(name, config.finetune.data)
    known = ", ".join((*map(str.lower, glue.GLUE), *question_answering.VERSIONS, "own"))
    raise ConfigError(f"config.finetune.tasks has '{name}', which is unknown; choose from {known}.")


def _report(config: Config, folder: Path, results: list[TaskResult]) -> None:
    """Prints the table, and collects what the GLUE server takes."""
    columns = [
        score_table.Column(
            result.task, split, metric, tuple(r.scores[split][metric] for r in result.chosen_runs)
        )
        for result in results
        for split in result.splits
        for metric in result.metrics
    ]
    table = score_table.format_table(columns, show_best=config.finetune.show_best)
    write_text(folder / "table.md", table + "\n")
    print(f"\n{table}\n\nRuns, models and predictions: {folder}", flush=True)
    if len(results) > 1:
        _collect_server_files(folder, results)


def _collect_server_files(folder: Path, results: list[TaskResult]) -> None:
    """WORKDIR/glue_server/seed-N: the files of a submission, from the chosen runs of that seed."""
    names = set(prediction_files.SERVER_FILES.values())
    for result in results:
        for place in result.folders:
            for file in (place / "predictions").glob("*.tsv"):
                if file.name in names:
                    target = folder / "glue_server" / place.name
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)
    for target in sorted((folder / "glue_server").glob("seed-*")):
        prediction_files.complete_server_files(target)


def _shapes(config: Config) -> dict:
    """Lengths that the position table has, and buckets only where padding is not read."""
    f, m = config.finetune, config.model
    fields = {}
    if f.length > m.positions:
        logging.warning(
            "Rows have %d tokens, not config.finetune.length=%d: the weights have no more "
            "positions.",
            m.positions,
            f.length,
        )
        fields["finetune.length"] = m.positions
    if f.buckets and m.mixer == "mixed" and not m.mask_convolution:
        logging.warning(
            "The convolution of these weights reads padding, so all rows are padded to the same "
            "length: config.finetune.buckets is not used."
        )
        fields["finetune.buckets"] = ()
    return fields


def _encoder_weights(source: sources.Source) -> Params:
    main = source.networks["main"]
    tree = to_tree(stack(main.parameters, main.encoder))
    others = sorted(set(tree) - {"embeddings", "encoder"})
    if others:
        logging.info("Not used of the weights: %s.", ", ".join(others))
    return {name: tree[name] for name in ("embeddings", "encoder")}
