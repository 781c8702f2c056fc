"""Results of runs, and the file that preserves them across restarts."""

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from etils import epath

from convbert_jax import files
from convbert_jax.finetuning.tasks.task import Scores
from convbert_jax.workdir import Workdir

_NUMBER = (int, float)
_FIELDS = {
    "task": str,
    "setting": dict,
    "seed": int,
    "steps": int,
    "loss": (*_NUMBER, type(None)),
    "scores": dict,
    "seconds": _NUMBER,
    "examples_per_second": _NUMBER,
}
_REMEDY = "delete that line to train its run again; other runs are not affected"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hyperparameters that a search varies."""

    learning_rate: float
    epochs: float

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, {self.epochs:g} epochs"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One finished run.

    `scores` maps split and metric to a fraction, NaN if the run diverged.
    """

    task: str
    setting: Setting
    seed: int
    steps: int
    loss: float  # of the last step
    scores: dict[str, Scores]
    seconds: float  # training time, for all runs that were trained together
    examples_per_second: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """All runs of a task.

    Attributes:
      metrics: Names; the median over seeds of the first one, on the first split, selects `chosen`.
      runs: Runs of all settings.
      folders: Folders of the chosen runs, by seed.
    """

    task: str
    metrics: tuple[str, ...]
    splits: tuple[str, ...]  # splits with scores
    chosen: Setting
    runs: tuple[RunResult, ...]
    folders: tuple[epath.Path, ...]

    @property
    def chosen_runs(self) -> tuple[RunResult, ...]:
        """Return the runs of the chosen setting, by seed."""
        return runs_of(self.runs, self.chosen)

    @property
    def medians(self) -> dict[Setting, float]:
        """Return the median that selected `chosen`, for each setting."""
        settings = dict.fromkeys(run.setting for run in self.runs)
        return {
            setting: median_of(runs_of(self.runs, setting), self.splits[0], self.metrics[0])
            for setting in settings
        }


def read_results(workdir: Workdir) -> list[RunResult]:
    """Read the finished runs, and remove a partly written last line.

    Raises:
      DamagedFileError: Another line is not a result; the message names the line.
    """
    path = workdir.results
    try:
        lines = files.read_json_lines(path, remedy=_REMEDY, fields=_FIELDS)
    except FileNotFoundError:
        return []
    content = path.read_bytes()
    if not content.endswith(b"\n") and content:
        with files.replacing(path) as file:
            file.write(content[: content.rfind(b"\n") + 1])
    results = []
    for number, values in enumerate(lines, start=1):
        try:
            results.append(_to_result(values))
        except (TypeError, ValueError, AttributeError) as error:
            raise files.damaged(path, f"line {number}: {error}", _REMEDY) from None
    return results


def check_scores(
    workdir: Workdir, runs: Sequence[RunResult], splits: Sequence[str], metrics: Sequence[str]
) -> None:
    """Check that results have all scores of the task.

    Raises:
      DamagedFileError: A score is missing; the message names the run.
    """
    for run in runs:
        lacks = [f"{s} {m}" for s in splits for m in metrics if m not in run.scores.get(s, {})]
        if lacks:
            what = f"the result of {run.task}, seed {run.seed}, {run.setting} has no {lacks[0]}"
            raise files.damaged(workdir.results, what, _REMEDY)


def _to_result(values: dict[str, Any]) -> RunResult:
    """Parse a result; raises TypeError, ValueError or AttributeError for an invalid value."""
    setting = Setting(**values["setting"])
    for value in dataclasses.astuple(setting):
        if not isinstance(value, _NUMBER):
            raise TypeError(f"{value!r} is not a number")
    scores = {
        split: {name: _number(value) for name, value in found.items()}
        for split, found in values["scores"].items()
    }
    return RunResult(
        **values | {"setting": setting, "loss": _number(values["loss"]), "scores": scores}
    )


def _number(value: Any) -> float:
    """Return the number; None stands for NaN, which JSON does not have."""
    if value is not None and not isinstance(value, _NUMBER):
        raise TypeError(f"{value!r} is not a number")
    return math.nan if value is None else value


def runs_of(runs: Sequence[RunResult], setting: Setting) -> tuple[RunResult, ...]:
    """Return the runs of one setting, by seed."""
    return tuple(sorted((r for r in runs if r.setting == setting), key=lambda r: r.seed))


def median_of(runs: Sequence[RunResult], split: str, metric: str) -> float:
    """Return the median over seeds; diverged runs count as -inf, the worst score."""
    values = [run.scores[split][metric] for run in runs]
    return statistics.median(-math.inf if math.isnan(value) else value for value in values)


def append_result(workdir: Workdir, result: RunResult) -> None:
    """Append the result as one line."""
    values = dataclasses.asdict(result)
    values["loss"] = _finite(result.loss)
    values["scores"] = {
        split: {name: _finite(v) for name, v in scores.items()}
        for split, scores in result.scores.items()
    }
    with contextlib.closing(files.Lines(workdir.results)) as lines:
        lines.append(json.dumps(files.seal(values)))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
