"""Text and page at the end of a pre-training run."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax import drawing
from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.pretraining_report import Cloze, Curves, Number, Panel, Suspects
from convbert_jax.config import Config
from convbert_jax.recipes.reports import commands, page
from convbert_jax.recipes.writing import scoring
from convbert_jax.training.reports.reporting import HealthWatch
from convbert_jax.workdir import Workdir

_MOST_VALUES = 60  # rows of the table below a figure


@dataclasses.dataclass(frozen=True)
class PretrainingReport:
    """Results of a pre-training run.

    Attributes:
      step: last completed step.
      interrupted: whether the run ended before its last step; then cloze, suspects and written are
        missing.
      numbers: metrics of the last evaluation, at step `evaluated`; empty if there was none.
      curves: metrics of all logged steps and evaluations.
      failed: the error that ended the run; "" for a signal or no interruption.
      picture: whether the curves were also written to curves.png.
      cloze: predictions for masked tokens, by the generator for config.recipe=replaced_token.
      suspects: predicted replacements, for config.recipe=replaced_token.
      written: sets of pairs with the texts that the model generated for them.
      unwritten: reason why a recipe that generates texts has no `written` sets, or "".
    """

    config: Config
    workdir: Workdir
    step: int
    interrupted: bool
    numbers: Sequence[Number]
    evaluated: int
    curves: Curves
    failed: str = ""
    picture: bool = False
    cloze: Cloze | None = None
    suspects: Suspects | None = None
    written: Sequence[scoring.Set] = ()
    unwritten: str = ""

    @property
    def title(self) -> str:
        return f"{self.config.name}, step {self.step:,}"


def describe(report: PretrainingReport, *, page: bool) -> str:
    """Returns the text for the terminal.

    Args:
      page: whether report.html was written.
    """
    numbers = pretraining_report.describe_numbers(report.numbers)
    lines = [f"{report.title}, {_describe_evaluation(report)}", *(f"  {line}" for line in numbers)]
    if report.cloze:
        lines += ["", *pretraining_report.describe_cloze(report.cloze)]
    if report.suspects:
        lines += ["", *pretraining_report.describe_suspects(report.suspects)]
    if report.written:
        lines += ["", *scoring.describe(report.written)]
    if report.unwritten:
        lines += ["", report.unwritten]
    lines.append("")
    if report.picture:
        lines.append(f"Curves: {report.workdir.curves}")
    what = "pairs" if report.config.reads_pairs else "text"
    lines += [
        f"To train longer, repeat the command with {commands.more_steps(report.step)}",
        f"To train on your own {what}, add {commands.own_text(report.config)}",
    ]
    if page:
        lines.append(f"Full report for a browser: {report.workdir.report}")
    return "\n".join(lines)


def _describe_evaluation(report: PretrainingReport) -> str:
    """Names the step of the numbers; a run may be ended at a step without an evaluation."""
    if report.evaluated == report.step:
        return "on held-out text:"
    found = f"on held-out text at step {report.evaluated:,}" if report.numbers else "not evaluated"
    return f"{found}; to evaluate now: {commands.resume(report.workdir, '--mode=eval')}"


def make_page(
    report: PretrainingReport,
    about: page.About,
    *,
    parameters: Mapping[str, int],
    warnings: Sequence[tuple[int, str]] | None,
) -> str:
    """Returns report.html.

    Args:
      parameters: part of the model -> number of parameters.
      warnings: (step, text); None if config.train.warn_health is False.
    """
    config, following = report.config, []
    state, resume = f"finished at step {report.step:,}", ""
    if report.interrupted:
        how = "ended by an error" if report.failed else "interrupted"
        state = f"{how} after step {report.step:,} of {config.train.steps:,}"
        resume = commands.resume(report.workdir)
    else:
        following = commands.after_pretraining(config, report.workdir, report.step)
    counts = [*parameters.items(), ("all", sum(parameters.values()))]
    return page.render(
        "pretraining.html",
        config,
        about,
        state=state,
        resume=resume,
        report=report,
        charts=[_chart(p, report.curves) for p in pretraining_report.choose_panels(report.curves)],
        cloze_summary=report.cloze and pretraining_report.count_right(report.cloze),
        suspects_summary=report.suspects and pretraining_report.count_found(report.suspects),
        written=list(map(_describe_set, report.written)),
        warnings=warnings and [(f"{step:,}", text) for step, text in warnings],
        parameters=[(name, f"{count:,}") for name, count in counts],
        following=following,
    )


def find_warnings(
    watch: HealthWatch, records: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str]]:
    """Returns (step, text) of the warnings that a run logged, from its metrics records."""
    training = [record for record in records if record["split"] == "train"]
    return [(r["step"], text) for r in training for text in watch.look(r["step"], r)]


def _chart(panel: Panel, curves: Curves) -> dict[str, Any]:
    """Returns the figure of a panel and its held-out values, (step, a value for each name)."""
    draw = functools.partial(pretraining_report.draw_panel, panel=panel, curves=curves)
    found = {
        name: dict(points)
        for name, points in curves.get("validation", {}).items()
        if name in panel.metrics
    }
    steps = sorted(set().union(*found.values()))
    points = [
        (f"{step:,}", *(f"{c[step]:.4g}" if step in c else "" for c in found.values()))
        for step in steps[-_MOST_VALUES:]
    ]
    return {
        "svg": drawing.to_svg(draw, (3.7, 2.6), f"{panel.title}, over steps"),
        "header": ["step", *(name.replace("_", " ") for name in found)],
        "points": points,
    }


def _describe_set(found: scoring.Set) -> dict[str, Any]:
    return {
        "name": found.name,
        "pairs": len(found.written),
        "scores": scoring.list_scores(found),
        "settings": scoring.list_settings(found),
        "warnings": scoring.list_warnings(found),
        "examples": scoring.choose_examples(found),
        "folder": str(found.file.parent),
    }
