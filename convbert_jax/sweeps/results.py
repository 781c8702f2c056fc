"""Reads the metrics of runs from their folders."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from convbert_jax import storage
from convbert_jax.analysis import text_scores
from convbert_jax.analysis.sweep_report import RunOutcome, SweepOutcome, VariantInfo
from convbert_jax.config import Config, UserError
from convbert_jax.data.tasks import glue, own_task
from convbert_jax.data.tasks.labelled_text import DEFAULT_METRICS
from convbert_jax.finetuning import question_answering
from convbert_jax.finetuning.run_files import RunResult, read_results, runs_of
from convbert_jax.sweeps.runs import count_flops, count_parameters, count_tokens, describe_changes
from convbert_jax.sweeps.table import FINETUNE, FINISHED, PRETRAIN, Folder, Run, Sweep, SweepError
from convbert_jax.training.metrics_writer import read_metrics
from convbert_jax.workdir import Workdir

# Default metrics of pre-training in the report.
METRICS = ("mlm_loss", "discriminator_auc", "tokens_per_second")
# Metrics of the training split -> how the log intervals of a run are summarized.
_TRAINING = {"tokens_per_second": statistics.median, "host_memory": max, "device_memory": max}


def read_values(run: Run, folder: Folder) -> dict[str, float] | None:
    """Returns the metrics of a finished run by name; None if it is not finished.

    Pre-training: the last held-out metrics, the median of tokens_per_second, the peak of memory;
    with text pairs also "SPLIT METRIC", the scores of the generated texts. Tasks of text pairs:
    these scores only. Fine-tuning: "SPLIT METRIC" as fractions, the mean over its seeds; of several
    settings the one with the best median of the first metric on the first split.

    Raises:
      DamagedFileError: a file of the run is damaged.
      SweepError: the run is at its last step, but its metrics are missing.
    """
    workdir = folder.run(run.id)
    if run.config.recipe == FINETUNE:
        return _finetuning_values(run.config, workdir)
    steps = run.config.train.steps
    if max(workdir.steps(), default=-1) < steps:
        return None
    heldout, last = {}, -1
    trained: dict[str, list[float]] = {}
    for record in read_metrics(workdir.metrics):
        if record["split"] == "validation":
            last = record["step"]
            heldout = {n: value for n, value in record.items() if n not in ("step", "split")}
            continue
        for name in _TRAINING.keys() & record.keys():
            trained.setdefault(name, []).append(record[name])
    if last < steps:  # each run ends with an evaluation
        raise SweepError(
            f"no held-out metrics of step {steps}. Restore a copy, or delete the run to repeat it.",
            path=workdir.metrics,
        )
    scores = _read_scores(workdir, max(workdir.steps()))
    if run.after:
        return {name: scores[name] for name in metric_names(run) if name in scores}
    return heldout | {name: _TRAINING[name](found) for name, found in trained.items()} | scores


def metric_names(run: Run) -> tuple[str, ...]:
    """Names of all metrics that `read_values` may return for a run."""
    if run.config.recipe == FINETUNE:
        return _finetuning_names(run.config)
    scores = _score_names(run.config)
    return scores if run.after else (*run.config.heldout_metrics, *_TRAINING, *scores)


def check_metrics(sweep: Sweep, runs: Sequence[Run]) -> None:
    """Raises SweepError for a metric of the sweep or of its search that no run measures."""
    wanted = [("metrics", name, PRETRAIN) for name in sweep.metrics]
    if sweep.search:
        wanted.append(("search.metric", sweep.search.metric, sweep.search.stage))
    for field, name, stage in wanted:
        known = dict.fromkeys(n for r in runs if r.stage == stage for n in metric_names(r))
        if name not in known:
            choices = ", ".join(known) or f"none, because no run has the stage {stage!r}"
            raise SweepError(f"is not measured. Choose from: {choices}.", field=field, value=name)


def choose_metrics(sweep: Sweep, config: Config) -> tuple[str, ...]:
    """Pre-training metrics that the report and the log show."""
    if sweep.metrics or not config.spec.generates:
        return sweep.metrics or METRICS
    more = ("word_perplexity",) if "word_perplexity" in config.heldout_metrics else ()
    return (*(_score_names(config) or more), "perplexity", "tokens_per_second")


def _score_names(config: Config) -> tuple[str, ...]:
    return tuple(f"validation {name}" for name in text_scores.NAMES.get(config.recipe, ()))


def _finetuning_names(config: Config) -> tuple[str, ...]:
    """Metrics of the validation and test splits of all tasks."""
    names, by_lower = [], {name.lower(): name for name in glue.GLUE}
    for task in config.finetune.tasks:
        if task == "own":
            title, splits = config.task.name, own_task.SPLITS
            metrics = config.task.metrics or DEFAULT_METRICS[config.task.kind]
        elif task in question_answering.VERSIONS:
            title, splits = task, ("validation",)
            metrics = question_answering.METRICS[question_answering.VERSIONS[task]]
        elif title := by_lower.get(task.lower()):
            splits, metrics = glue.GLUE[title].splits, glue.GLUE[title].metrics
        else:
            continue  # the run itself refuses it
        prefix = f"{title} " if len(config.finetune.tasks) > 1 else ""
        names += [f"{prefix}{s} {m}" for s in splits if s != "train" for m in metrics]
    return tuple(names)


def _read_scores(workdir: Workdir, step: int) -> dict[str, float]:
    """Scores of generated texts at the end of a run; {} for encoders."""
    file = workdir.evaluation(step)
    if not file.is_file():
        return {}
    remedy = "write it again with --mode=eval"
    scores = storage.read_json(file, remedy=remedy, fields={}).get("scores", {})
    return {
        f"{split} {metric}": float(value)
        for split, of_split in scores.items()
        for metric, value in of_split.items()
        if isinstance(value, int | float)
    }


def _finetuning_values(config: Config, workdir: Workdir) -> dict[str, float] | None:
    seeds = range(config.seed, config.seed + config.finetune.seeds)
    results = [result for result in read_results(workdir) if result.seed in seeds]
    settings = max(1, len(config.finetune.learning_rates)) * max(1, len(config.finetune.epochs))
    if len(results) < len(config.finetune.tasks) * settings * len(seeds):
        return None
    values = {}
    tasks = dict.fromkeys(result.task for result in results)
    for task in tasks:
        of_task = [result for result in results if result.task == task]
        best = max(
            dict.fromkeys(result.setting for result in of_task),
            key=lambda setting: _median(runs_of(of_task, setting)),
        )
        chosen = runs_of(of_task, best)
        prefix = f"{task} " if len(tasks) > 1 else ""
        for split, scores in chosen[0].scores.items():
            for metric in scores:
                found = [result.scores[split][metric] for result in chosen]
                values[f"{prefix}{split} {metric}"] = statistics.fmean(found)
    return values


def _median(results: tuple[RunResult, ...]) -> float:
    """Median of the first metric on the first split; diverged runs count as worst."""
    first = [next(iter(next(iter(result.scores.values())).values())) for result in results]
    return statistics.median(-math.inf if math.isnan(value) else value for value in first)


def collect(name: str, sweep: Sweep, runs: Sequence[Run], folder: Folder) -> SweepOutcome:
    """Collects the results so far for `analysis.sweep_report`.

    Raises:
      DamagedFileError: the record of a run is damaged.
    """
    first = {run.variant: run for run in reversed(runs) if not run.after}
    return SweepOutcome(
        name=name,
        purpose=sweep.purpose,
        variants={
            variant: VariantInfo(
                describe_changes(sweep.variants[variant], first[variant]),
                count_parameters(first[variant], folder),
                count_tokens(first[variant]),
                count_flops(first[variant], folder),
            )
            for variant in sweep.variants
        },
        baseline=sweep.reference,
        metrics=choose_metrics(sweep, runs[0].config),
        runs=tuple(_collect(run, folder) for run in runs),
    )


def _collect(run: Run, folder: Folder) -> RunOutcome:
    record = folder.read(run.id)
    if record is None:
        return RunOutcome(run.variant, run.seed, run.stage, "new")
    curve, why = (), record.why
    if run.stage == PRETRAIN:
        try:
            curve = read_curve(run, folder)
        except UserError as error:
            why = why or str(error)
    values = {n: math.nan if value is None else value for n, value in record.values.items()}
    return RunOutcome(
        variant=run.variant,
        seed=run.seed,
        stage=run.stage,
        state=record.state,
        why=why,
        seconds=record.seconds,
        values=values if record.state == FINISHED else {},
        curve=curve,
    )


def read_curve(run: Run, folder: Folder) -> tuple[dict[str, float], ...]:
    """Reads the held-out metrics of pre-training so far, with `sweep_report.AXES`.

    Raises:
      DamagedFileError: the metrics file is damaged.
    """
    config = run.config
    records = read_metrics(folder.run(run.id).metrics)
    trained = [r for r in records if r["split"] == "train"]
    tokens, flops = config.spec.tokens_per_step(config), math.nan
    if tokens:
        flops = count_flops(run, folder) / config.train.steps
    elif trained:  # pairs: the mean of its batches, which vary
        tokens = trained[0]["tokens"] / trained[0]["step"]
    timed = [r["seconds_per_step"] for r in trained if "seconds_per_step" in r]
    median = statistics.median(timed) if timed else math.nan
    steps = np.asarray([0, *(r["step"] for r in trained)])
    seconds = np.asarray([r.get("seconds_per_step", median) for r in trained])
    clock = np.concatenate([[0.0], np.cumsum(np.diff(steps) * seconds)])
    return tuple(
        {
            **{name: value for name, value in r.items() if name != "split"},
            "tokens": r["step"] * tokens,
            "flops": r["step"] * flops,
            "seconds": float(np.interp(r["step"], steps, clock)),
        }
        for r in records
        if r["split"] == "validation"
    )
