"""What came out of a cell, read off its folder."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from convbert_jax import files
from convbert_jax.analysis import text_scores
from convbert_jax.analysis.sweep_report import CellOutcome, Outcome, RowFacts
from convbert_jax.config import Config, UserError
from convbert_jax.data.tasks import glue, own_task
from convbert_jax.data.tasks.labelled_text import DEFAULT_METRICS
from convbert_jax.finetuning.results import RunResult, read_results, runs_of
from convbert_jax.finetuning.tasks import question_answering
from convbert_jax.sweeps import describe
from convbert_jax.sweeps.cells import FINETUNE, PRETRAIN, Cell
from convbert_jax.sweeps.folder import FINISHED, Folder
from convbert_jax.sweeps.table import Sweep, SweepError
from convbert_jax.training.reports.reporting import read_metrics
from convbert_jax.workdir import Workdir

# Shown of pre-training where a sweep names none.
METRICS = ("mlm_loss", "discriminator_auc", "tokens_per_second")
_OF_TRAINING = {  # of all log intervals
    "tokens_per_second": statistics.median,
    "host_memory": max,
    "device_memory": max,
}


def read_values(cell: Cell, folder: Folder) -> dict[str, float] | None:
    """The numbers of a cell that has come to its end, by metric; None of one that has not.

    Of pre-training: the last held-out numbers, the median of tokens_per_second, the peak of memory;
    of pairs of texts "SET METRIC" too, the scores of what was written; of a task these alone.
    Of fine-tuning: "SPLIT METRIC" as fractions, the mean over its seeds; of several settings, those
    of the best median of the first metric on the first split, as in the run's own table.

    Raises:
      DamagedFileError: the file that has them.
      SweepError: the run is at its end, and they are not there.
    """
    run = folder.run(cell.id)
    if cell.config.recipe == FINETUNE:
        return _of_finetuning(cell, run)
    if max(run.steps(), default=-1) < cell.config.train.steps:
        return None
    values: dict[str, float] = {}
    trained: dict[str, list[float]] = {}
    last = -1
    for record in read_metrics(run.metrics):
        split = record.pop("split")
        if split == "validation":
            last = record["step"]
            values = {name: value for name, value in record.items() if name != "step"}
            continue
        for name in _OF_TRAINING:
            if name in record:
                trained.setdefault(name, []).append(record[name])
    if last < cell.config.train.steps:  # every run ends with them
        raise SweepError(
            f"{run.metrics} lacks the held-out numbers of step {cell.config.train.steps}: put a "
            f"copy of it back, or delete {run.path} to run the cell again."
        )
    values |= {name: _OF_TRAINING[name](found) for name, found in trained.items()}
    written = _of_written(run, max(run.steps()))
    if cell.after:
        return {name: written[name] for name in name_values(cell) if name in written}
    return values | written


def name_values(cell: Cell) -> tuple[str, ...]:
    """Names of all numbers that `read_values` may return for a cell."""
    config = cell.config
    if config.recipe == FINETUNE:
        return _name_finetuned(config)
    written = _name_scores(config)
    return written if cell.after else (*config.heldout_metrics, *_OF_TRAINING, *written)


def check_metrics(sweep: Sweep, cells: Sequence[Cell]) -> None:
    """Raises SweepError where a metric of the sweep or of its search is not measured."""
    search = sweep.search
    wanted = [("metrics", name, PRETRAIN) for name in sweep.metrics]
    wanted += [("search.metric", search.metric, search.stage)] if search else []
    for field, name, stage in wanted:
        known = dict.fromkeys(n for c in cells if c.stage == stage for n in name_values(c))
        if name not in known:
            choices = ", ".join(known) or f"none, because no cell has the stage {stage!r}"
            raise SweepError(f"Unknown metric in {field}: {name!r}. Choose from: {choices}.")


def choose_metrics(sweep: Sweep, config: Config) -> tuple[str, ...]:
    """What a report shows of pre-training, and the line of a finished cell."""
    if sweep.metrics or not config.writes_text:
        return sweep.metrics or METRICS
    more = ("word_perplexity",) if "word_perplexity" in config.heldout_metrics else ()
    return (*(_name_scores(config) or more), "perplexity", "tokens_per_second")


def _name_scores(config: Config) -> tuple[str, ...]:
    """Scores of the held-out pairs."""
    return tuple(f"validation {name}" for name in text_scores.NAMES.get(config.recipe, ()))


def _name_finetuned(config: Config) -> tuple[str, ...]:
    """Metrics of the validation and test splits of all tasks."""
    names, of_glue = [], {name.lower(): name for name in glue.GLUE}
    for task in config.finetune.tasks:
        if task == "own":
            title, splits = config.task.name, own_task.SPLITS
            metrics = config.task.metrics or DEFAULT_METRICS[config.task.kind]
        elif task in question_answering.VERSIONS:
            title, splits = task, ("validation",)
            metrics = question_answering.METRICS[question_answering.VERSIONS[task]]
        elif title := of_glue.get(task.lower()):
            splits, metrics = glue.GLUE[title].splits, glue.GLUE[title].metrics
        else:
            continue  # its own run refuses it
        prefix = f"{title} " if len(config.finetune.tasks) > 1 else ""
        names += [f"{prefix}{s} {m}" for s in splits if s != "train" for m in metrics]
    return tuple(names)


def _of_written(run: Workdir, step: int) -> dict[str, float]:
    """Scores that the end of a run left; none of encoders."""
    file = run.evaluation(step)
    if not file.is_file():
        return {}
    remedy = "write it again with --mode=eval"
    scores = files.read_json(file, remedy=remedy, fields={}).get("scores", {})
    return {
        f"{name} {metric}": float(value)
        for name, of_set in scores.items()
        for metric, value in of_set.items()
        if isinstance(value, int | float)
    }


def _of_finetuning(cell: Cell, run: Workdir) -> dict[str, float] | None:
    config = cell.config
    seeds = range(config.seed, config.seed + config.finetune.seeds)
    runs = [result for result in read_results(run) if result.seed in seeds]
    tries = max(1, len(config.finetune.learning_rates)) * max(1, len(config.finetune.epochs))
    tasks = dict.fromkeys(result.task for result in runs)
    wanted = len(config.finetune.tasks) * tries * len(seeds)
    if len(runs) < wanted:
        return None
    values = {}
    for task in tasks:
        of_task = [result for result in runs if result.task == task]
        settings = dict.fromkeys(result.setting for result in of_task)
        best = max(settings, key=lambda s: _median(runs_of(of_task, s)))
        prefix = f"{task} " if len(tasks) > 1 else ""
        chosen = runs_of(of_task, best)
        for split, scores in chosen[0].scores.items():
            for metric in scores:
                found = [result.scores[split][metric] for result in chosen]
                values[f"{prefix}{split} {metric}"] = statistics.fmean(found)
    return values


def _median(runs: tuple[RunResult, ...]) -> float:
    """Of the first metric on the first split; a run that diverged is worse than any."""
    first = [next(iter(next(iter(result.scores.values())).values())) for result in runs]
    return statistics.median(-math.inf if math.isnan(v) else v for v in first)


def collect(name: str, sweep: Sweep, cells: Sequence[Cell], folder: Folder) -> Outcome:
    """What came out so far, as `analysis.sweep_report` takes it.

    Raises:
      DamagedFileError: the record of a cell.
    """
    first = {cell.row: cell for cell in reversed(cells) if not cell.after}
    rows = {
        row: RowFacts(
            describe.describe_changes(sweep.rows[row], cell),
            describe.count_parameters(cell, folder),
            describe.count_tokens(cell),
            describe.count_flops(cell, folder),
        )
        for row, cell in ((row, first[row]) for row in sweep.rows)
    }
    return Outcome(
        name=name,
        purpose=sweep.purpose,
        rows=rows,
        baseline=sweep.compared_with,
        metrics=choose_metrics(sweep, cells[0].config),
        cells=tuple(_collect(cell, folder) for cell in cells),
    )


def _collect(cell: Cell, folder: Folder) -> CellOutcome:
    record = folder.read(cell.id)
    if record is None:
        return CellOutcome(cell.row, cell.seed, cell.stage, "not begun")
    curve, why = (), record.why
    if cell.stage == PRETRAIN:
        try:
            curve = read_curve(cell, folder)
        except UserError as error:
            why = why or str(error)
    finished = record.state == FINISHED
    values = {n: math.nan if v is None else v for n, v in record.values.items()}
    return CellOutcome(
        row=cell.row,
        seed=cell.seed,
        stage=cell.stage,
        state=record.state,
        why=why,
        seconds=record.seconds,
        values=values if finished else {},
        curve=curve,
    )


def read_curve(cell: Cell, folder: Folder) -> tuple[dict[str, float], ...]:
    """Held-out numbers of pre-training so far, with `AXES` beside them.

    Raises:
      DamagedFileError: the run's metrics.
    """
    config = cell.config
    records = read_metrics(folder.run(cell.id).metrics)
    trained = [r for r in records if r["split"] == "train"]
    tokens, each = config.train.batch_size * config.data.length, math.nan
    if not config.reads_pairs:
        each = describe.count_flops(cell, folder) / config.train.steps
    elif trained:  # the mean of its batches, as the run knows it
        tokens = trained[0]["tokens"] / trained[0]["step"]
    timed = [r["seconds_per_step"] for r in trained if "seconds_per_step" in r]
    usual = statistics.median(timed) if timed else math.nan
    steps = np.asarray([0, *(r["step"] for r in trained)])
    seconds = np.asarray([r.get("seconds_per_step", usual) for r in trained])
    clock = np.concatenate([[0.0], np.cumsum(np.diff(steps) * seconds)])
    return tuple(
        {
            **{name: value for name, value in r.items() if name != "split"},
            "tokens": r["step"] * tokens,
            "flops": r["step"] * each,
            "seconds": float(np.interp(r["step"], steps, clock)),
        }
        for r in records
        if r["split"] == "validation"
    )
