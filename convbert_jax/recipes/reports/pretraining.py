"""What a long run has learned, for a person."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.pretraining_report import Curves, Example, Number
from convbert_jax.config import Config
from convbert_jax.recipes.writing import scoring
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class PretrainingReport:
    """All that is told of a run, each number made once.

    Attributes:
      step: that it has reached.
      interrupted: before its last step; then there is no example and nothing is written.
      numbers: of the last evaluation.
      curves: of all intervals and evaluations; `picture`: whether they are drawn as a file.
      parameters: how many numbers each part of the model learns.
      warnings: (step, sentence) that the run has given; None if config.train.warn_health is off.
      example: of replaced_token.
      written: sets of pairs that the model wrote to, and `unwritten`: why there are none, if it
        should have.
    """

    config: Config
    workdir: Workdir
    step: int
    interrupted: bool
    numbers: Sequence[Number]
    curves: Curves
    picture: bool
    parameters: Mapping[str, int]
    warnings: Sequence[tuple[int, str]] | None
    example: Example | None = None
    written: Sequence[scoring.Set] = ()
    unwritten: str = ""

    @property
    def title(self) -> str:
        return f"{self.config.name}, step {self.step:,}"


def find_warnings(watch, records: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """(step, sentence) of what a run was warned of, from the lines of its metrics file.

    Args:
      watch: a fresh `HealthWatch`.
    """
    training = [record for record in records if record["split"] == "train"]
    return [(r["step"], text) for r in training for text in watch.look(r["step"], r)]


def describe(report: PretrainingReport) -> str:
    """The text that a run ends with."""
    numbers = pretraining_report.describe_numbers(report.numbers)
    lines = [f"{report.title}, on held-out text:", *(f"  {line}" for line in numbers)]
    if report.example:
        lines += ["", *pretraining_report.describe_example(report.example)]
    if report.written:
        lines += ["", *scoring.describe(report.written)]
    if report.unwritten:
        lines += ["", report.unwritten]
    curves = f"Curves: {report.workdir.curves}. " if report.picture else ""
    lines += [
        "",
        f"{curves}The same command goes on from here; for more steps add "
        f"{' '.join(more_steps(report.step))}.",
        f"Your own {'pairs' if report.config.reads_pairs else 'text'}: add "
        f"{_name_own_text(report.config)} --workdir=runs/mine",
    ]
    return "\n".join(lines)


def more_steps(step: int) -> list[str]:
    """The flags that make a run twice as long."""
    return [f"--config.train.steps={2 * step}"]


def _name_own_text(config: Config) -> str:
    if config.reads_pairs:
        return "--config.parallel.source=parallel:FILE,FILE"
    return "--config.data.source='text:FOLDER/*.txt'"
