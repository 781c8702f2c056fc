"""What there is to tell of a long run, and the text that it ends with."""

import dataclasses
from collections.abc import Sequence

from convbert_jax.analysis import held_out_text, pretraining_report
from convbert_jax.analysis.held_out_text import Cloze, Suspects
from convbert_jax.analysis.pretraining_report import Curves, Number
from convbert_jax.config import Config
from convbert_jax.recipes.reports import commands
from convbert_jax.recipes.writing import scoring
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class PretrainingReport:
    """What a run has learned, each number made once.

    Attributes:
      step: that it has reached.
      interrupted: before its last step; then there is no example and nothing is written.
      failed: the error that did it, "" where it was a signal.
      numbers: of the last evaluation, which was at step `evaluated`; none without one.
      curves: of all intervals and evaluations; `picture`: whether they are drawn as a file.
      cloze: of masked words, a generator's too; `suspects`: of replaced_token.
      written: sets of pairs that the model wrote to, and `unwritten`: why there are none, if it
        should have.
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
    """The text that a run ends with.

    Args:
      page: whether there is one that says more.
    """
    numbers = pretraining_report.describe_numbers(report.numbers)
    lines = [f"{report.title}, {_when(report)}", *(f"  {line}" for line in numbers)]
    if report.cloze:
        lines += ["", *held_out_text.describe_cloze(report.cloze)]
    if report.suspects:
        lines += ["", *held_out_text.describe_suspects(report.suspects)]
    if report.written:
        lines += ["", *scoring.describe(report.written)]
    if report.unwritten:
        lines += ["", report.unwritten]
    curves = f"Curves: {report.workdir.curves}. " if report.picture else ""
    what = "pairs" if report.config.reads_pairs else "text"
    lines += [
        "",
        f"{curves}The same command goes on from here; for more steps add "
        f"{commands.more_steps(report.step)}.",
        f"Your own {what}: add {commands.own_text(report.config)}",
    ]
    if page:
        lines.append(f"All of it for a browser, and what to do next: {report.workdir.report}")
    return "\n".join(lines)


def _when(report: PretrainingReport) -> str:
    """Of which step the numbers are: a run may end without an evaluation, where it is made to end
    at a step that it has reached already.
    """
    if report.evaluated == report.step:
        return "on held-out text:"
    found = f"on held-out text at step {report.evaluated:,}" if report.numbers else "not evaluated"
    return f"{found}; {commands.go_on(report.workdir, '--mode=eval')} measures it now:"
