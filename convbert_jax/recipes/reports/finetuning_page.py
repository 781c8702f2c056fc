"""The page of labelled tasks: the table, each task with its seeds and settings, pictures."""

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from convbert_jax.analysis.sweep_report import comparison
from convbert_jax.config import Config
from convbert_jax.finetuning.results import RunResult, TaskResult, runs_of
from convbert_jax.finetuning.scores import score_table
from convbert_jax.finetuning.scores.score_table import Column, Table
from convbert_jax.html_page import blocks
from convbert_jax.html_page.charts import seeds_chart
from convbert_jax.html_page.elements import element, foreign
from convbert_jax.recipes.reports import commands, run_page
from convbert_jax.workdir import Workdir


def make(
    config: Config,
    workdir: Workdir,
    results: Sequence[TaskResult],
    columns: Sequence[Column],
    table: Table,
    about: run_page.About,
) -> str:
    """The page of a run that is finished.

    Args:
      columns: of `table`, those of a task in `Column.task`.
    """
    head, *rows = table.rows
    notes = [element("p", note, class_="note") for note in table.notes]
    sections = [blocks.section("Results", blocks.table(head, rows, names=2), *notes)]
    for result in results:
        own = [column for column in columns if column.task == result.task]
        sections.append(_task(result, own))
    seeds = f"--config.finetune.seeds={2 * config.finetune.seeds}"
    more = [("More seeds of every task", commands.go_on(workdir, seeds))]
    sections.append(blocks.section("What to do next", blocks.commands(more)))
    count = sum(len(result.runs) for result in results)
    state = f"finished: {count} runs of {', '.join(result.task for result in results)}"
    return run_page.make(config, state, "", sections, about)


def make_interrupted(
    config: Config,
    workdir: Workdir,
    runs: Sequence[RunResult],
    about: run_page.About,
) -> str:
    """The page of a run that was stopped, with what is finished of it."""
    rows = [
        (
            run.task,
            f"{run.setting}, seed {run.seed}",
            ", ".join(
                f"{split} {name} {_percent(value)}"
                for split, scores in run.scores.items()
                for name, value in scores.items()
            ),
        )
        for run in runs
    ]
    shown = blocks.table(("task", "run", "scores"), rows, names=3)
    if not rows:
        shown = element("p", "None yet.", class_="note")
    section = blocks.section("Runs that are finished", shown)
    state = f"interrupted; finished runs: {len(runs)}"
    go_on = commands.go_on(workdir)
    return run_page.make(config, state, go_on, [section], about)


def _task(result: TaskResult, columns: Sequence[Column]) -> Element:
    """Scores of the chosen setting, the other settings, pictures, what to do with the models."""
    seeds = ", ".join(str(run.seed) for run in result.chosen_runs)
    parts = [
        element("p", f"Chosen setting: {result.chosen}; seeds {seeds}."),
        _scores(columns),
    ]
    if len(result.medians) > 1:
        parts += [element("h3", "Settings searched"), _settings(result)]
    models = list(map(Workdir, result.folders))
    if pictures := _pictures(models[0]):
        parts += [
            element("h3", f"Predictions of seed {result.chosen_runs[0].seed}"),
            element("div", *pictures, class_="charts"),
        ]
    if following := commands.after_finetuning(result.task, models):
        parts.append(blocks.commands(following))
    return element("section", element("h2", foreign(result.task)), *parts)


def _scores(columns: Sequence[Column]) -> Element:
    """A line for each metric; intervals are of the mean over seeds that did not diverge."""
    rows, intervals = [], False
    for column in columns:
        summary = score_table.summarize(column.values)
        mean = comparison.summarize([value for value in column.values if math.isfinite(value)])
        bounds = None if math.isnan(mean.low) else (mean.low, mean.high)
        intervals = intervals or bounds is not None
        interval = " to ".join(_percent(bound) for bound in bounds) if bounds else ""
        numbers = (summary.median, summary.worst, summary.best)
        chart = seeds_chart(column.values, bounds) if mean.count > 1 else ""
        rows.append((column.title, *map(_percent, numbers), interval, chart))
    head = ("", "median", "worst", "best", "mean, 95% interval", "")
    if not intervals:
        head, rows = head[:2], [row[:2] for row in rows]
    shown = [blocks.table(head, rows, names=1)]
    if intervals:
        note = "A dot is a seed. The bar is the 95% interval of the mean, by Student's t, of seeds "
        shown.append(element("p", f"{note}alone: the rows are always the same.", class_="note"))
    return element("div", *shown)


def _settings(result: TaskResult) -> Element:
    """All settings, with what the chosen one was chosen by."""
    medians = result.medians
    rows = []
    for setting, median in medians.items():
        runs = runs_of(result.runs, setting)
        diverged = sum(run.diverged for run in runs)
        rows.append((str(setting), _percent(median), str(len(runs)), str(diverged or "")))
    head = ["", f"median {result.splits[0]} {result.metrics[0]}", "seeds", "diverged"]
    if not any(run.diverged for run in result.runs):
        head, rows = head[:3], [row[:3] for row in rows]
    return blocks.table(head, rows, names=1, chosen=(list(medians).index(result.chosen),))


def _pictures(model: Workdir) -> list[Element]:
    """Confusion, calibration and the like, as they were drawn beside the predictions."""
    found = model.predictions.glob("*.png")
    files = sorted(found, key=lambda path: ("confusion" not in path.name, path.name))
    return [blocks.picture(path.read_bytes(), path.stem.replace("-", ", ")) for path in files]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "diverged"
