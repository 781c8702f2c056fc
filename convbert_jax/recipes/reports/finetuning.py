"""The page of a fine-tuning run: the table of scores, then each task with its settings."""

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from convbert_jax import drawing
from convbert_jax.analysis import sweep_report
from convbert_jax.config import Config
from convbert_jax.finetuning import score_table
from convbert_jax.finetuning.run_files import RunResult, TaskResult, runs_of
from convbert_jax.finetuning.score_table import Column, Table
from convbert_jax.recipes.reports import page
from convbert_jax.workdir import Workdir

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATE = "finetuning.html"


def make_page(
    config: Config,
    workdir: Workdir,
    results: Sequence[TaskResult],
    columns: Sequence[Column],
    table: Table,
    about: page.About,
) -> str:
    """Returns the page of a finished run.

    Args:
      columns: all columns of `table`.
    """
    seeds = f"--config.finetune.seeds={2 * config.finetune.seeds}"
    count = sum(len(result.runs) for result in results)
    return page.render(
        _TEMPLATE,
        config,
        about,
        state=f"finished: {count} runs of {', '.join(result.task for result in results)}",
        table=table,
        tasks=[_describe_task(result, columns) for result in results],
        following=[("Train more seeds of every task", page.resume_command(workdir, seeds))],
    )


def make_interrupted_page(
    config: Config, workdir: Workdir, runs: Sequence[RunResult], about: page.About
) -> str:
    """Returns the page of an interrupted run.

    Args:
      runs: the finished ones.
    """
    rows = []
    for run in runs:
        scores = [
            f"{split} {name} {_percent(value)}"
            for split, values in run.scores.items()
            for name, value in values.items()
        ]
        rows.append((run.task, f"{run.setting}, seed {run.seed}", ", ".join(scores)))
    return page.render(
        _TEMPLATE,
        config,
        about,
        state=f"interrupted; finished runs: {len(runs)}",
        resume=page.resume_command(workdir),
        runs=rows,
    )


def _describe_task(result: TaskResult, columns: Sequence[Column]) -> dict[str, Any]:
    models = list(map(Workdir, result.folders))
    return {
        "name": result.task,
        "chosen": result.chosen,
        "seeds": ", ".join(str(run.seed) for run in result.chosen_runs),
        "first_seed": result.chosen_runs[0].seed,
        "scores": _tabulate_scores([c for c in columns if c.task == result.task]),
        "settings": _tabulate_settings(result),
        "chosen_row": list(result.medians).index(result.chosen),
        "pictures": _read_pictures(models[0]),
        "commands": page.after_finetuning(result.task, models),
    }


def _tabulate_scores(columns: Sequence[Column]) -> list[tuple]:
    """Returns a header and a row for each metric; intervals need two seeds that did not diverge."""
    rows, intervals = [], False
    for column in columns:
        summary = score_table.summarize(column.values)
        finite = [value for value in column.values if math.isfinite(value)]
        mean = sweep_report.summarize(finite)
        interval, chart = "", ""
        if mean.count > 1:
            intervals = True
            interval = f"{_percent(mean.low)} to {_percent(mean.high)}"
            chart = draw_seeds(finite, mean)
        numbers = (summary.median, summary.worst, summary.best)
        rows.append((column.title, *map(_percent, numbers), interval, chart))
    header = ("", "median", "worst", "best", "mean, 95% interval", "seeds")
    return [header, *rows] if intervals else [row[:2] for row in (header, *rows)]


def draw_seeds(scores: Sequence[float], mean: sweep_report.Interval) -> "Markup":
    """Returns an SVG with a dot for each score and a bar for the interval of their mean."""

    def draw(axis):
        first = drawing.COLORS["first"]
        axis.axhline(0, color=drawing.COLORS["line"], lw=1)
        axis.plot([mean.low, mean.high], [0, 0], color=first, lw=6, alpha=0.3)
        axis.plot(scores, [0] * len(scores), "o", color=first, ms=5)
        axis.margins(x=0.06)
        axis.set_axis_off()

    return drawing.to_svg(draw, (1.9, 0.28), ", ".join(map(_percent, scores)))


def _tabulate_settings(result: TaskResult) -> list[tuple[str, ...]]:
    """Returns a header and a row for each setting that was searched."""
    rows = [("", f"median {result.splits[0]} {result.metrics[0]}", "seeds", "diverged")]
    for setting, median in result.medians.items():
        runs = runs_of(result.runs, setting)
        diverged = sum(run.diverged for run in runs)
        rows.append((str(setting), _percent(median), str(len(runs)), str(diverged or "")))
    return rows if any(run.diverged for run in result.runs) else [row[:3] for row in rows]


def _read_pictures(model: Workdir) -> list[tuple[str, str]]:
    """Returns (caption, PNG in base64) of the figures in the folder of the predictions."""
    found = model.predictions.glob("*.png")
    ordered = sorted(found, key=lambda path: ("confusion" not in path.name, path.name))
    return [
        (path.stem.replace("-", ", "), base64.b64encode(path.read_bytes()).decode())
        for path in ordered
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "diverged"
