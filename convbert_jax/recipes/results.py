"""Return values of the recipes: plain data, and a report that `main.py` prints."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from convbert_jax.finetuning.run_files import TaskResult


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """Result of a pre-training run.

    Attributes:
      folder: workdir of the run.
      step: last completed step.
      metrics: one record per log interval and evaluation, in order: `step`, `split` ("train" or
        "validation") and the metrics by name, NaN if not finite. `pandas.DataFrame(run.metrics)`
        makes a table. Empty on all processes except 0.
      evaluation: held-out metrics of the last evaluation, by name; empty if there was none.
      stopped_by: name of the signal that stopped the run after saving (the same call resumes it);
        None if it reached its last step.
      curves: plot of `metrics`, if there is one.
      scores: scores of texts generated for held-out pairs, as {"validation": {"bleu": 28.5, …}};
        empty if none were generated.
      report: metrics, an example and next steps; "" if interrupted, and on all processes except 0.
    """

    folder: epath.Path
    step: int
    metrics: list[dict[str, Any]]
    evaluation: dict[str, float]
    stopped_by: str | None
    curves: epath.Path | None
    report: str
    scores: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether a signal stopped the run."""
        return self.stopped_by is not None


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Held-out metrics of a checkpoint, or of the mean of several.

    Attributes:
      folder: workdir of the run.
      step: step of the newest checkpoint used.
      values: metrics by name; NaN if undefined.
      file: JSON file with the same values, NaN as null.
      report: text that `main.py` prints; "" on all processes except 0.
      scores: scores of generated texts, see `PretrainingResult.scores`; includes test sets.
    """

    folder: epath.Path
    step: int
    values: Mapping[str, float]
    file: epath.Path
    report: str
    scores: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """All fine-tuning runs of all tasks, including runs of earlier calls.

    Attributes:
      tasks: results in the order of `config.finetune.tasks`.
      table: Markdown table of scores and published scores, same as `folder`/table.md.
      report: text that `main.py` prints; "" on all processes except 0.
    """

    folder: epath.Path
    tasks: tuple[TaskResult, ...]
    table: str
    report: str
    stopped_by = None  # an interruption raises KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class PredictionResult:
    """Number of predicted rows.

    Attributes:
      rows: rows in the output; 0 if the reader of an output pipe exited early.
      kept: rows of these that an earlier, interrupted call had written.
    """

    rows: int
    kept: int


@dataclasses.dataclass(frozen=True)
class InspectionResult:
    """Result of an inspection.

    Attributes:
      folder: folder with plots and numbers.
      report: text that `main.py` prints.
    """

    folder: epath.Path
    report: str


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """Estimated memory and time of a run on devices that are not attached.

    Attributes:
      fits: whether the unchanged config fits into memory.
      numbers: all estimates, JSON-compatible.
      report: text that `main.py` prints.
    """

    fits: bool
    numbers: Mapping[str, Any]
    report: str
