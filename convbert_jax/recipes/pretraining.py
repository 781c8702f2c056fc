"""One long run: pre-training, and training of models that write text."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
from absl import logging
from etils import epath

from convbert_jax import files, links
from convbert_jax.analysis import overview, pretraining_report
from convbert_jax.config import Config, UserError, network, sequences
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.data.units import beam_pipeline
from convbert_jax.inference.writing.reading import read_mean
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import abstract_params, outline, split
from convbert_jax.interop.runs.vocabulary import check_learned, keep_vocabularies
from convbert_jax.recipes import evaluation, finetuning, prepared, start, tasks, teaching
from convbert_jax.recipes.prepared import Data
from convbert_jax.recipes.reports import held_out_text, page
from convbert_jax.recipes.reports import pretraining as reports
from convbert_jax.recipes.reports.pretraining import PretrainingReport
from convbert_jax.recipes.results import PretrainingResult
from convbert_jax.recipes.writing import scoring
from convbert_jax.training import loop, optimizer, sharding
from convbert_jax.training.environment import devices
from convbert_jax.training.reports import reporting, trackers
from convbert_jax.training.rollback import Rollbacks, TrainingError
from convbert_jax.training.task import Task
from convbert_jax.workdir import Workdir


def prepare(
    config: Config,
    folder: epath.PathLike,
    given: Collection[str] = (),
    *,
    runner: str | None = None,
    runner_options: Sequence[str] = (),
) -> None:
    """Makes tokenizer and shards for `config` in the workdir `folder`, or finds them there.

    Args:
      given: as `start.read_start` takes it.
      runner, runner_options: of Apache Beam, as `beam_pipeline.open_runner` takes them; None:
        processes of this machine do it.

    Raises:
      DataError: a runner that cannot be used, and as preparing does.
    """
    if config.recipe == "finetune":
        logging.info("Fine-tuning has nothing to prepare: it reads its tasks when it starts.")
        return
    opened = beam_pipeline.open_runner(runner, runner_options) if runner else None
    workdir = Workdir(folder)
    config, _ = start.read_start(config, workdir, given)
    directory = workdir.data(config)
    links.check(workdir.path)
    directory = files.absolute(directory) if runner else directory
    prepared.prepare(config, directory, opened, compare=True)


def show(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> str:
    """What a config comes to, as `overview.describe` says it; nothing is started or written.

    Args:
      given: as `start.read_start` takes it; files and weights that the config names are read.
    """
    if config.recipe == "finetune":
        config, *_ = finetuning.read_start(config, given)
        unread = finetuning.UNREAD
    else:
        config, _ = start.read_start(config, Workdir(folder), given)
        unread = _unread(config)
    return overview.describe(config, abstract_params(config), unread)


def pretrain(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> PretrainingResult:
    """Pre-trains in the workdir `folder`, resuming what is there.

    Args:
      given: as `start.read_start` takes it.

    Raises:
      UserError: what cannot be used, or gave out; see the kinds of it and `loop.train`.
    """
    trackers.check_tracker(config.train.tracker)
    optimizer.check_method(config.optimizer)
    found = devices.find_devices(config)
    mesh = sharding.make_mesh(config.mesh, found)
    prepared.check_batches(config, mesh)
    workdir = Workdir(folder)
    config, source = start.read_start(config, workdir, given)
    if config.reads_pairs and scoring.can_score():
        scoring.check(config, tests=False)
    if config.recipe == "span_corruption" and not config.tokenizer.path:
        tasks.check_sentinels(config, config.tokenizer.sentinels)
    teacher = teaching.open_teacher(config)
    if teacher and config.distillation.initialize and not workdir.is_bound():
        source = teaching.start_of(config, teacher)
    writer = jax.process_index() == 0
    opened = workdir.open(config, writer=writer, alone=jax.process_count() == 1)
    with devices.random_numbers(found), opened:
        start.log_run(config, workdir, found)
        devices.advise_dtype(config, found[0])
        teaching.bind(workdir, config, teacher, writer=writer)
        if idle := _idle_fields(config):
            logging.info(
                "Without effect, as each stage has its own or a mixer that does not read it: %s.",
                ", ".join(f"config.model.{f}={getattr(config.model, f)}" for f in idle),
            )
        if not config.writes_text:
            _tell_of_encoder(config)
        data = prepared.open_data(config, workdir)
        # What was "auto" is decided; whoever opens the run reads what was chosen.
        config = dataclasses.replace(config, tokenizer=data.tokenizers[0].section)
        if writer:
            workdir.keep_config(config)
        if workdir.is_bound():
            check_learned(workdir, config, data.tokenizers)
        elif writer:
            keep_vocabularies(workdir, config, data.tokenizers)
        task = tasks.build_task(
            config,
            data.tokenizer.special,
            found[0],
            teacher,
            tokenizer=data.tokenizer,
            effort=data.effort(mesh),
        )
        try:
            result = loop.train(
                task,
                config,
                workdir=workdir,
                mesh=mesh,
                batches=data.training(mesh),
                evaluation=data.heldout(mesh),
                initial_params=functools.partial(start.fill, config, source) if source else None,
                publish=functools.partial(_publish, config, workdir, data.tokenizer),
            )
        except TrainingError as error:
            if writer:
                try:
                    _tell_of_failure(config, workdir, task, str(error), mesh)
                except Exception as another:  # it must not hide the one that is to be told
                    logging.warning("There is no page of the run: %s", another)
            raise
        return _conclude(config, workdir, data, task, result, mesh)


def _unread(config: Config) -> tuple[str, ...]:
    """Sections that the recipe does not read."""
    of_tasks = ("finetune", "task", "outputs")
    if not config.writes_text:
        return (*of_tasks, "sequence", "parallel", "decoding")
    return (*of_tasks, "generator", "distillation", *(() if config.reads_pairs else ("parallel",)))


def _idle_fields(config: Config) -> list[str]:
    if config.writes_text and config.recipe != "causal_lm":
        return sequences.idle_fields(config.model, config.sequence)
    return network.idle_fields(config.model)


def _tell_of_encoder(config: Config) -> None:
    """What the log says of an encoder's run at its start."""
    networks = outline(config)
    if networks["main"].masked:
        logging.info(
            "The convolutions ignore padding; those of an export for transformers, "
            "sentence-transformers or ONNX read it. If padded batches must give the same outputs "
            "there, train with --config.model.mask_convolution=false "
            "--config.data.layout=electra. See docs/weights.md#padded-batches."
        )
    if first := config.objective.masked_lm_steps:
        logging.info(
            "Steps 1 to %d train the encoder on masked words, those from %d on on replaced tokens.",
            first,
            first + 1,
        )
    if config.checkpoint.huggingface_every:
        conversion.check_expressible(conversion.expressible(networks, "huggingface"))


def _publish(config: Config, workdir: Workdir, tokenizer: Tokenizer, step: int, params):
    """Writes WORKDIR/huggingface/step-N, to be uploaded as a revision."""
    params = sharding.gather(params)
    if jax.process_index() == 0:
        conversion.write_huggingface(
            workdir.export("huggingface", step),
            conversion.expressible(split(config, params), "huggingface"),
            (tokenizer, config.tokenizer),
            title=config.name,
            step=step,
            compare=False,
        )


def _conclude(
    config, workdir, data: Data, task: Task, result: loop.Result, mesh
) -> PretrainingResult:
    """What the run came to, told by the first process."""
    metrics, curves, sets, text = [], None, (), ""
    if jax.process_index() == 0:
        metrics = reporting.read_undamaged(workdir.metrics)
        report = _report(config, workdir, data, result, metrics, mesh)
        written = page.write(
            workdir, lambda: _make_page(report, task, result.state.params, metrics, mesh)
        )
        if not report.interrupted:
            text = reports.describe(report, page=written)
        elif written:
            logging.info("How far it came: %s", workdir.report)
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
    """Leaves the page of a run that an error has ended, with its curves up to there."""
    metrics = reporting.read_undamaged(workdir.metrics)
    if not metrics:
        return  # there is nothing to look at but the error, which is told anyway
    step = metrics[-1]["step"]
    report = _begin_report(config, workdir, metrics, step=step, interrupted=True, failed=failed)
    params = abstract_params(config)
    if page.write(workdir, lambda: _make_page(report, task, params, metrics, mesh)):
        logging.info("How far it came: %s", workdir.report)


def _begin_report(config, workdir, metrics, **fields) -> PretrainingReport:
    """What takes no time to tell."""
    evaluations = [record for record in metrics if record["split"] == "validation"]
    last = evaluations[-1] if evaluations else {}
    return PretrainingReport(
        config=config,
        workdir=workdir,
        numbers=pretraining_report.list_numbers(last, config.vocabularies[1]),
        evaluated=last.get("step", 0),
        curves=pretraining_report.arrange_curves(metrics),
        **fields,
    )


def _report(config, workdir, data: Data, result: loop.Result, metrics, mesh) -> PretrainingReport:
    """What there is to tell; of an interrupted run what takes no time, as a machine that is taken
    away gives little.
    """
    report = _begin_report(
        config, workdir, metrics, step=result.step, interrupted=result.interrupted
    )
    if result.interrupted:
        return report
    with jax.set_mesh(mesh):
        cloze = held_out_text.fill_in(config, data.corpus, result.state.params)
        suspects = held_out_text.detect(config, data.corpus, result.state.params)
    try:
        picture = pretraining_report.plot_curves(report.curves, workdir.curves, report.title)
    except Exception as error:  # as with the page: the run itself is done
        picture = False
        logging.warning("%s could not be drawn (%s); the run is kept.", workdir.curves, error)
    sets, unwritten = [], ""
    if config.reads_pairs:
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
        warnings = reports.find_warnings(reporting.HealthWatch(task.health), metrics)
    if went_back := Rollbacks(report.workdir.skipped, 0).describe():
        warnings = sorted([*went_back, *(warnings or ())])
    return reports.make_page(
        report,
        page.describe(config, mesh, _unread(config)),
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
    """What the model writes to the held-out pairs, or what keeps it from that, for the report: the
    run itself is done.

    Args:
      heldout: numbers of this step, to be kept beside the scores; {} if it was not evaluated.
    """
    if not scoring.can_score():
        return [], scoring.NOT_SCORED
    file = workdir.evaluation(result.step)
    try:
        steps, params = (result.step,), sharding.gather(result.state.params)
        if config.decoding.average > 1:
            steps, params = read_mean(workdir, config, result.step)
        sets, unwritten = scoring.score_sets(
            config,
            params,
            data.tokenizers,
            data.pairs,
            evaluation.texts_folder(file),
            steps=steps,
            tests={},
        )
    except UserError as error:
        logging.warning("Nothing was written and scored: %s", error)
        return [], f"Nothing was written and scored: {error}"
    if sets:
        evaluation.write_numbers(workdir, (result.step,), heldout, file, sets)
    return sets, unwritten
