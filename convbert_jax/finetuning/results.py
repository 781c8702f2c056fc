"""What came out of runs, and the file that keeps it over kills and restarts."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from convbert_jax.finetuning.fitting import Setting
from convbert_jax.finetuning.task import Scores

RESULTS = "results.jsonl"  # in WORKDIR: one line for each finished run


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One finished run.

    `scores` is by split and metric, as fractions; NaN where the run diverged.
    """

    task: str
    setting: Setting
    seed: int
    steps: int
    loss: float  # of the last step
    scores: dict[str, Scores]
    seconds: float  # of training, of all runs that were trained together
    examples_per_second: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """All runs of a task.

    Attributes:
      metrics: the first one of the first split selected `chosen`, by its median over seeds.
      runs: every one of every setting.
      folders: of the chosen runs, by seed.
    """

    task: str
    metrics: tuple[str, ...]
    splits: tuple[str, ...]  # that have scores
    chosen: Setting
    runs: tuple[RunResult, ...]
    folders: tuple[Path, ...]

    @property
    def chosen_runs(self) -> tuple[RunResult, ...]:
        """Those of the chosen setting, by seed."""
        return runs_of(self.runs, self.chosen)


def read_results(folder: Path) -> list[RunResult]:
    """Finished runs; a line that a kill left half written is none."""
    path = folder / RESULTS
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
        lines.pop()
    results = []
    for line in lines:
        values = json.loads(line)
        values["setting"] = Setting(**values["setting"])
        values["loss"] = math.nan if values["loss"] is None else values["loss"]
        values["scores"] = {
            split: {name: math.nan if v is None else v for name, v in scores.items()}
            for split, scores in values["scores"].items()
        }
        results.append(RunResult(**values))
    return results


def runs_of(runs: Sequence[RunResult], setting: Setting) -> tuple[RunResult, ...]:
    """The runs of one setting, by seed."""
    return tuple(sorted((r for r in runs if r.setting == setting), key=lambda r: r.seed))


def append_result(folder: Path, result: RunResult) -> None:
    """Adds one line."""
    values = dataclasses.asdict(result)
    values["loss"] = _finite(result.loss)
    values["scores"] = {
        split: {name: _finite(v) for name, v in scores.items()}
        for split, scores in result.scores.items()
    }
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(values) + "\n")


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
