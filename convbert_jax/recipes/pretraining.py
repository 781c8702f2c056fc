"""Runs pre-training and the training of generative models."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.analysis import overview, pretraining_report
from convbert_jax.config import Config, ConfigError, UserError, lengths
from convbert_jax.data import beam_pipeline, bucket, stores
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.generation import read_mean
from convbert_jax.interop import conversion, sentence_transformers
from convbert_jax.interop.networks import abstract_params, split
from convbert_jax.interop.sources import check_learned, keep_vocabularies
from convbert_jax.recipes import evaluation, prepared, scoring, start, tasks, teaching
from convbert_jax.recipes.prepared import Data
from convbert_jax.recipes.reports import page
from convbert_jax.recipes.reports import pretraining as reports
from convbert_jax.recipes.reports.pretraining import PretrainingReport
from convbert_jax.recipes.results import PretrainingResult
from convbert_jax.training import (
    distributed,
    environment,
    loop,
    metrics_writer,
    optimizer,
    partitioning,
)
from convbert_jax.training.loop import Rollbacks, TrainingError
from convbert_jax.training.timing import format_seconds
from convbert_jax.training.train_step import Task
from convbert_jax.workdir import Workdir

_BUDGET_MARGIN = 0.05  # of a budget in hours, for evaluations, checkpoints and the report


def prepare(
    config: Config,
    folder: epath.PathLike,
    given: Collection[str] = (),
    *,
    runner: str | None = None,
    runner_options: Sequence[str] = (),
) -> None:
    """See `recipes.prepare`."""
    opened = beam_pipeline.open_runner(runner, runner_options) if runner else None
    workdir = Workdir(folder)
    config, _ = start.read_start(config, workdir, given)
    directory = workdir.data(config)
    storage.check_links(workdir.path)
    directory = storage.absolute(directory) if runner else directory
    prepared.prepare(config, directory, opened, compare=True)


def show(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> str:
    """See `recipes.show`."""
    config = complete(config, folder, given)
    return overview.describe_run(config, abstract_params(config), config.spec.unread)


def complete(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> Config:
    """See `recipes.complete`."""
    return start.read_start(config, Workdir(folder), given)[0]


def check_sources(config: Config, directory: epath.Path) -> str:
    """See `recipes.check_sources`."""
    if storage.is_remote(directory) and (listed := bucket.list_files(directory)):
        size = sum(size for size, _ in listed.values()) / 1e9
        return f"{directory} is prepared, {size:.2f} GB to copy to {config.data.cache}"
    metadata = stores.store_of(config).read_metadata(Path(directory))
    if metadata and metadata["complete"] and not config.data.mixture:
        return f"{directory} is prepared"
    return ", ".join(stores.check_sources(config))


def pretrain(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> PretrainingResult:
    """Pre-trains in the workdir `folder`, resuming from its newest checkpoint.

    Args:
      given: see `start.read_start`.

    Raises:
      UserError: invalid config, data or weights, or a failed run; see `loop.train`.
    """
    begin = time.monotonic()
    metrics_writer.check_tracker(config.train.tracker)
    optimizer.check_method(config.optimizer)
    found = environment.find_devices(config)
    mesh = partitioning.make_mesh(config.mesh, found)
    recipe = tasks.recipe_of(config)
    for of_phase in config.phase_configs:
        recipe.check_batches(of_phase, mesh)
    workdir = Workdir(folder)
    config, source = start.read_start(config, workdir, given)
    recipe.check(config)
    teacher = teaching.open_teacher(config)
    if teacher and config.distillation.initialize and not workdir.is_bound():
        source = teaching.start_of(config, teacher)
    writer = jax.process_index() == 0
    opened = workdir.open(config, writer=writer, alone=jax.process_count() == 1)
    with environment.random_numbers(found), opened:
        start.log_run(config, workdir, found, abstract_params(config))
        environment.advise_dtype(config, found[0])
        teaching.bind(workdir, config, teacher, writer=writer)
        if idle := config.spec.idle_fields(config):
            logging.info(
                "Ignored (set per stage, or not read by the mixer): %s.",
                ", ".join(f"config.model.{f}={getattr(config.model, f)}" for f in idle),
            )
        recipe.log_start(config)
        data = recipe.open_data(config, workdir)
        build = functools.partial(
            tasks.build_task,
            special=data.tokenizer.special,
            device=found[0],
            teacher=teacher,
            tokenizer=data.tokenizer,
        )
        if hours := lengths.hours_of(config):
            steps = _steps_in(float(hours), begin, config, data, build, mesh)
            train = dataclasses.replace(config.train, steps=steps)
            config = dataclasses.replace(config, train=train)
        counted = start.count_steps(config, workdir, required=True)
        if counted is not config:
            config, data = counted, recipe.open_data(counted, workdir)
        # Later calls read the values chosen for "auto" from the kept config.
        config = dataclasses.replace(config, tokenizer=data.tokenizers[0].section)
        if writer:
            workdir.keep_config(config)
        if workdir.is_bound():
            check_learned(workdir, config, data.tokenizers)
        elif writer:
            keep_vocabularies(workdir, config, data.tokenizers)
        made: dict[Config, Task] = {}  # phases with equal values share their compiled steps
        segments = []
        phases = prepared.open_phases(config, workdir, recipe.effort) if config.phases else [data]
        for of_phase, its_data, end in zip(
            config.phase_configs, phases, config.phase_ends, strict=True
        ):
            if of_phase not in made:
                made[of_phase] = build(of_phase, effort=its_data.effort(mesh))
            segments.append(
                loop.Segment(
                    end=end,
                    task=made[of_phase],
                    batches=functools.partial(its_data.training, mesh),
                    evaluation=its_data.heldout(mesh),
                )
            )
        task = segments[-1].task
        try:
            result = loop.train(
                segments,
                config,
                workdir=workdir,
                mesh=mesh,
                initial_params=functools.partial(start.fill, config, source) if source else None,
                initial_opt_state=start.opt_state_of(config) if source else None,
                publish=functools.partial(_publish, config, workdir, data.tokenizer),
            )
        except TrainingError as error:
            if writer:
                try:
                    _tell_of_failure(config, workdir, task, str(error), mesh)
                except Exception as another:  # must not replace the training error
                    logging.warning("Cannot write the report of the run: %s", another)
            raise
        return _conclude(config, workdir, data, task, result, mesh)


def _steps_in(
    hours: float,
    begin: float,
    config: Config,
    data: Data,
    build: Callable[..., Task],
    mesh: jax.sharding.Mesh,
) -> int:
    """Returns the number of training steps that end within `hours` after `begin`.

    Raises:
      ConfigError: there is no time for a step.
    """
    logging.info("Measuring the time of a step for config.train.steps=%s.", config.train.steps)
    # The time of a step depends on neither.
    train = dataclasses.replace(config.train, steps=1)
    section = dataclasses.replace(config.optimizer, warmup_steps=0)
    measured = dataclasses.replace(config, train=train, optimizer=section)
    task = build(measured, effort=data.effort(mesh))
    first, seconds = loop.time_steps(task, measured, mesh, data.training(mesh))
    # The run compiles its steps again, because its length is a constant in them; the programs of
    # evaluation and report take no longer.
    left = hours * 3600 - (time.monotonic() - begin) - 2 * first
    steps = distributed.broadcast_int(int((1 - _BUDGET_MARGIN) * left / seconds))
    if steps < 1:
        raise ConfigError(
            f"is too short: preparation and compilation need {hours * 3600 - left:.0f} s, and a "
            f"step {seconds:.3g} s. Give more time, or a number of steps.",
            field="config.train.steps",
            value=config.train.steps,
        )
    logging.info(
        "A step takes %.4g s (median of %d). %s remain, %.0f%% of it for evaluations and "
        "checkpoints: the run has %s steps.",
        seconds,
        loop.TIMED_STEPS,
        format_seconds(left),
        100 * _BUDGET_MARGIN,
        f"{steps:,}",
    )
    return steps


def _publish(config: Config, workdir: Workdir, tokenizer: Tokenizer, step: int, params):
    """Exports the parameters to WORKDIR/huggingface/step-N."""
    params = partitioning.gather(params)
    if jax.process_index() == 0:
        conversion.write_huggingface(
            workdir.export("huggingface", step),
            conversion.expressible(split(config.at(step), params), "huggingface"),
            (tokenizer, config.tokenizer),
            title=config.name,
            step=step,
            compare=False,
            vectors=sentence_transformers.of_run(config),
        )


def _conclude(
    config, workdir, data: Data, task: Task, result: loop.Result, mesh
) -> PretrainingResult:
    """Writes the report on process 0 and returns the result."""
    metrics, curves, sets, text = [], None, (), ""
    if jax.process_index() == 0:
        metrics = metrics_writer.read_undamaged(workdir.metrics)
        report = _report(config, workdir, data, result, metrics, mesh)
        written = page.write(
            workdir, lambda: _make_page(report, task, result.state.params, metrics, mesh)
        )
        if not report.interrupted:
            text = reports.describe(report, has_page=written)
        elif written:
            logging.info("Wrote the report of the interrupted run: %s", workdir.report)
        curves = workdir.curves if report.picture else None
        sets = report.written
    return PretrainingResult(
        folder=workdir.path,
        step=result.step,
        metrics=metrics,
        evaluation=result.evaluation,
        stopped_by=result.stopped_by,
        curves=curves,
        report=text,
        scores=scoring.values_of(sets),
    )


def _tell_of_failure(config, workdir, task: Task, failed: str, mesh) -> None:
    """Writes the HTML report of a failed run, with its curves up to the failure."""
    metrics = metrics_writer.read_undamaged(workdir.metrics)
    if not metrics:
        return  # the error is printed anyway
    step = metrics[-1]["step"]
    report = _begin_report(config, workdir, metrics, step=step, interrupted=True, failed=failed)
    params = abstract_params(config)
    if page.write(workdir, lambda: _make_page(report, task, params, metrics, mesh)):
        logging.info("Wrote the report of the failed run: %s", workdir.report)


def _begin_report(config, workdir, metrics, **fields) -> PretrainingReport:
    """Returns the parts of a report that need no computation."""
    evaluations = [record for record in metrics if record["split"] == "validation"]
    last = evaluations[-1] if evaluations else {}
    return PretrainingReport(
        config=config,
        workdir=workdir,
        numbers=pretraining_report.list_numbers(last, config.vocabularies[1]),
        evaluated=last.get("step", 0),
        curves=pretraining_report.arrange_curves(metrics),
        commands=tasks.recipe_of(config).commands(config, workdir, fields["step"]),
        **fields,
    )


def _report(config, workdir, data: Data, result: loop.Result, metrics, mesh) -> PretrainingReport:
    """Returns the full report; for an interrupted run (preemption) only the fast parts."""
    report = _begin_report(
        config, workdir, metrics, step=result.step, interrupted=result.interrupted
    )
    if result.interrupted:
        return report
    recipe, cloze, suspects = tasks.recipe_of(config), None, None
    if jax.process_count() == 1:  # several processes have only some of the rows each
        of_phase = dataclasses.replace(config.at(result.step), data=config.data)
        with jax.set_mesh(mesh):
            cloze = recipe.fill_in(of_phase, data, result.state.params)
            suspects = recipe.detect(of_phase, data, result.state.params)
    try:
        picture = pretraining_report.plot_curves(report.curves, workdir.curves, report.title)
    except Exception as error:  # a failed plot must not fail a finished run
        picture = False
        logging.warning("Cannot plot %s (%s); the run is complete.", workdir.curves, error)
    heldout = result.evaluation if report.evaluated == result.step else {}
    sets, unwritten = _write_and_score(config, workdir, data, result, heldout)
    return dataclasses.replace(
        report,
        picture=picture,
        cloze=cloze,
        suspects=suspects,
        written=sets,
        unwritten=unwritten,
    )


def _make_page(report: PretrainingReport, task: Task, params, metrics, mesh) -> str:
    config, warnings = report.config, None
    if config.train.warn_health:
        warnings = reports.find_warnings(metrics_writer.HealthWatch(task.health), metrics)
    if went_back := Rollbacks(report.workdir.skipped, 0).describe():
        warnings = sorted([*went_back, *(warnings or ())])
    return reports.make_page(
        report,
        page.describe(config, mesh, config.spec.unread),
        parameters=overview.count_parts(params),
        warnings=warnings,
    )


def _write_and_score(
    config: Config,
    workdir: Workdir,
    data: Data,
    result: loop.Result,
    heldout: Mapping[str, float],
) -> tuple[list[scoring.Set], str]:
    """Generates texts for the held-out pairs and scores them, for the report.

    Errors are returned, not raised, because training is complete.

    Args:
      heldout: held-out metrics of this step, written with the scores; {} if it was not evaluated.

    Returns:
      (scored sets, reason if the held-out pairs were not scored).
    """
    file = workdir.evaluation(result.step)

    def read():
        if config.decoding.average > 1:
            return read_mean(workdir, config, result.step)
        return (result.step,), partitioning.gather(result.state.params)

    try:
        sets, unwritten = tasks.recipe_of(config).write_and_score(
            config, data, evaluation.texts_folder(file), read, tests={}
        )
    except UserError as error:
        logging.warning("No texts were generated and scored: %s", error)
        return [], f"No texts were generated and scored: {error}"
    if sets:
        evaluation.write_numbers(workdir, (result.step,), heldout, file, sets)
    return sets, unwritten
