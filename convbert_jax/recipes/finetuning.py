"""Fine-tunes pre-trained weights on labeled tasks."""

import dataclasses
import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from convbert_jax.analysis import overview
from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.config.network import group_layers
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import glue, own_task, squad
from convbert_jax.data.tasks.labelled_text import LabelledTask
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    follow_file,
    load_tokenizer,
)
from convbert_jax.finetuning import (
    classification,
    lora,
    privacy,
    question_answering,
    run,
    score_table,
)
from convbert_jax.finetuning import predictions as prediction_files
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.run_files import TaskResult, read_results
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.inference import loading
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.networks import abstract_params, stack, to_tree
from convbert_jax.recipes import start
from convbert_jax.recipes.reports import finetuning as reports
from convbert_jax.recipes.reports import page
from convbert_jax.recipes.results import FinetuningResult
from convbert_jax.storage import copy, write_text
from convbert_jax.training import environment, optimizer, partitioning
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir


def prepare(config: Config, folder: epath.PathLike, *_: Any, **__: Any) -> None:
    """See `recipes.prepare`; there is nothing to prepare."""
    logging.info("Nothing to prepare: fine-tuning reads its tasks when it starts.")


def show(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> str:
    """See `recipes.show`."""
    config = complete(config, folder, given)
    return overview.describe_tasks(config, _shared_params(config), config.spec.unread)


def complete(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> Config:
    """See `recipes.complete`."""
    return read_start(config, given)[0]


def check_sources(config: Config, directory: epath.Path | None = None) -> str:
    """See `recipes.check_sources`; weights are not read."""
    open_tasks(config, None)  # the tokenizer is used only when a task is read
    return f"the files of {', '.join(config.finetune.tasks)} exist"


def _shared_params(config: Config) -> Params:
    """Returns the shapes of the parameters of all tasks; each task has its own head."""
    return {name: part for name, part in abstract_params(config).items() if name != "head"}


def finetune(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> FinetuningResult:
    """Fine-tunes on every task of `config.finetune.tasks`, resuming from `folder`.

    Several processes share the work of every run and the folder; process 0 writes.

    Args:
      given: see `read_start`.

    Raises:
      UserError: weights, vocabulary, data and config do not match; see its subclasses.
    """
    optimizer.check_method(config.optimizer)
    found = environment.find_devices(config)
    mesh = make_mesh(config, found)
    privacy.check(config, mesh.size)
    config, tokenizer, weights = read_start(config, given)
    tasks = open_tasks(config, tokenizer)
    workdir = Workdir(folder)
    alone = jax.process_count() == 1
    with workdir.open(config, writer=jax.process_index() == 0, alone=alone):
        start.log_run(config, workdir, found, _shared_params(config))
        environment.advise_dtype(config, found[0])
        programs = Programs(config, environment.compute_dtype(config, found[0]), mesh)
        with jax.set_mesh(mesh):
            try:
                results = run.finetune(config, workdir, tasks, programs, tokenizer, weights)
            except KeyboardInterrupt:
                _tell_of_interruption(config, workdir, mesh)
                raise
    return _conclude(config, workdir, results, mesh)


def make_mesh(config: Config, found: list[jax.Device]):
    """Returns the mesh of `config.mesh`; a single process may use a subset of its devices.

    Raises:
      ShardingError: devices or a batch size are not divisible by the mesh axes.
    """
    sizes = dataclasses.astuple(config.mesh)
    if -1 not in sizes and jax.process_count() == 1:
        found = found[: math.prod(sizes)]
    mesh = partitioning.make_mesh(config.mesh, found)
    for name in ("batch_size", "eval_batch_size"):
        size = getattr(config.finetune, name)
        partitioning.check_batch_size(size, 1, mesh, field=f"config.finetune.{name}")
    return mesh


def read_start(
    config: Config, given: Collection[str] = ()
) -> tuple[Config, Tokenizer, Params | None]:
    """Returns (config with sizes and vocabulary of the weights, tokenizer, weights).

    Weights are nested dicts `embeddings` and `encoder` on the host. They are None with
    config.finetune.from_scratch, and without config.init_from (config.model has the sizes).

    Args:
      given: paths of fields that the user set, as "tokenizer.kind". A conflict with the weights or
        the file of config.tokenizer.path is an error; other fields are taken from these.

    Raises:
      ConfigError, ConversionError: weights or vocabulary are missing or do not match, or a field
        of `given` conflicts.
    """
    fields = {}
    source = None
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    if config.init_from:
        source = _first_layers(sources.read_source(config.init_from), config)
        importing.check_entries(source, config)
        fields = matching.derive_fields(source.networks, config)
        fields = matching.keep_given(fields, config, given, config.init_from)
        fields |= importing.tokenizer_fields(source, config, given)
    elif not config.tokenizer.path:
        raise ConfigError(
            "config.init_from is empty. Set it to pre-trained weights, or for random "
            "initialization set a vocabulary with --config.tokenizer.path=vocab.txt.",
            field="config.init_from",
        )
    elif config.finetune.layers:
        raise ConfigError(
            f"config.finetune.layers={config.finetune.layers} has no effect without "
            "config.init_from. For random initialization set config.model.layers.",
            field="config.finetune.layers",
            value=config.finetune.layers,
        )
    f = config.finetune
    for path in matching.DROPOUT:
        if path in given and matching.value_of(config, path) != f.dropout:
            raise ConfigError(
                f"config.{path}={matching.value_of(config, path)} is not read by fine-tuning. Set "
                f"config.finetune.dropout={matching.value_of(config, path)}.",
                field=f"config.{path}",
                value=matching.value_of(config, path),
            )
        fields[path] = f.dropout
    config = matching.replace(config, fields)
    config = matching.replace(config, _shapes(config))
    config = from_config_dict(to_dict(config))
    if f.lora_rank:
        lora.find_targets(_shared_params(config), f.lora_targets)
    tokenizer = load_tokenizer(config.tokenizer, Path())
    config = dataclasses.replace(config, tokenizer=tokenizer.section)
    check_tokenizer(tokenizer, [])
    if source is None:
        return config, tokenizer, None
    importing.check_vocabulary(source, tokenizer)
    if f.from_scratch:
        logging.info("Initialized random weights with the sizes of %s.", config.init_from)
        return config, tokenizer, None
    return config, tokenizer, _encoder_weights(source, config)


def open_tasks(config: Config, tokenizer: Tokenizer | None) -> list[Callable[[], FinetuneTask]]:
    """Returns a function for each available task that reads it; logs missing files.

    Raises:
      ConfigError: a task name is unknown.
      DataError: no task is available.
    """
    names = config.finetune.tasks
    if not names:
        raise ConfigError(
            "config.finetune.tasks is empty. List tasks, or use configs/glue.py:all.",
            field="config.finetune.tasks",
        )
    distill_from = config.finetune.distill_from
    teacher = loading.open_teacher(distill_from) if distill_from else None
    makers, absent = [], []
    for name in names:
        if name in question_answering.VERSIONS:
            if teacher:
                raise ConfigError(
                    f"config.finetune.distill_from does not support question answering ({name}). "
                    "Unset it or remove the task.",
                    field="config.finetune.distill_from",
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
        logging.warning("Skipped a task: %s", sentence)
    return makers


def _open_source(name: str, config: Config) -> LabelledTask:
    if name == "own":
        return own_task.open_task(config.task)
    if name.lower() in map(str.lower, glue.GLUE):
        return glue.open_task(name, config.finetune.data)
    known = ", ".join((*map(str.lower, glue.GLUE), *question_answering.VERSIONS, "own"))
    raise ConfigError(
        f"config.finetune.tasks contains the unknown task '{name}'. Choose from {known}.",
        field="config.finetune.tasks",
    )


def _tell_of_interruption(config: Config, workdir: Workdir, mesh) -> None:
    """Writes the HTML report of an interrupted run."""
    if jax.process_index() != 0:
        return
    if page.write(
        workdir,
        lambda: reports.make_interrupted_page(
            config,
            workdir,
            read_results(workdir),
            page.describe(config, mesh, config.spec.unread),
        ),
    ):
        logging.info("Wrote a report of the finished runs: %s", workdir.report)


def _conclude(
    config: Config, workdir: Workdir, results: list[TaskResult], mesh
) -> FinetuningResult:
    """Writes the table, the HTML report and the files for the GLUE server."""
    columns = [
        score_table.Column(
            result.task, split, metric, tuple(r.scores[split][metric] for r in result.chosen_runs)
        )
        for result in results
        for split in result.splits
        for metric in result.metrics
    ]
    table = score_table.make_table(columns, show_best=config.finetune.show_best)
    text, report = score_table.to_markdown(table), ""
    if jax.process_index() == 0:
        write_text(workdir.table, text + "\n")
        if len(results) > 1:
            _collect_server_files(workdir, results)
        report = f"\n{text}\n\nRuns, models and predictions: {workdir}"
        if page.write(
            workdir,
            lambda: reports.make_page(
                config,
                workdir,
                results,
                columns,
                table,
                page.describe(config, mesh, config.spec.unread),
            ),
        ):
            report += f"\nReport (HTML): {workdir.report}"
    return FinetuningResult(workdir.path, tuple(results), text, report)


def _collect_server_files(workdir: Workdir, results: list[TaskResult]) -> None:
    """Copies the submission files of the chosen runs to WORKDIR/glue_server/seed-N."""
    names, made = set(prediction_files.SERVER_FILES.values()), set()
    for result in results:
        for model in map(Workdir, result.folders):
            for file in model.predictions.glob("*.tsv"):
                if file.name in names:
                    target = workdir.glue_server(model)
                    target.mkdir(parents=True, exist_ok=True)
                    copy(file, target / file.name)
                    made.add(target)
    for target in sorted(made):
        prediction_files.complete_server_files(target)


def _shapes(config: Config) -> dict:
    """Limits lengths to the number of positions; drops buckets if the model reads padding."""
    f, m = config.finetune, config.model
    fields = {}
    if f.length > m.positions:
        logging.warning(
            "Rows have %d tokens, the number of positions of the weights, instead of "
            "config.finetune.length=%d.",
            m.positions,
            f.length,
        )
        fields["finetune.length"] = m.positions
    if f.buckets and config.encoder.reads_padding:
        logging.warning(
            "The convolution of these weights reads padding: all rows are padded to the same "
            "length and config.finetune.buckets is ignored."
        )
        fields["finetune.buckets"] = ()
    return fields


def _first_layers(source: sources.Source, config: Config) -> sources.Source:
    """Keeps the first config.finetune.layers layers of the main network (0: all).

    Raises:
      ConfigError: the source has fewer layers.
    """
    wanted, main = config.finetune.layers, source.networks["main"]
    if not wanted:
        return source
    if wanted > main.encoder.depth:
        raise ConfigError(
            f"config.finetune.layers={wanted}, but {config.init_from} has {main.encoder.depth} "
            "layers. Use fewer, or 0 for all.",
            field="config.finetune.layers",
            value=wanted,
            path=config.init_from,
        )
    encoder = dataclasses.replace(main.encoder, stages=group_layers(main.encoder.layers[:wanted]))
    logging.info("Using the first %d of %d layers.", wanted, main.encoder.depth)
    main = dataclasses.replace(main, encoder=encoder)
    return dataclasses.replace(source, networks={**source.networks, "main": main})


def _encoder_weights(source: sources.Source, config: Config) -> Params:
    """Regroups the weights of `source` into the stages of `config`, whose bounds may differ."""
    main = source.networks["main"]
    tree = to_tree(stack(main.parameters, config.encoder))
    others = sorted(set(tree) - {"embeddings", "encoder"})
    if others:
        logging.info("Unused parts of the weights: %s.", ", ".join(others))
    return {name: tree[name] for name in ("embeddings", "encoder")}
