"""What recipes return: plain data, and a text for a person that `main.py` prints."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from convbert_jax.finetuning.results import TaskResult


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """How a pre-training run ended.

    Attributes:
      folder: of the run.
      step: that it has reached.
      metrics: one record for each log interval and evaluation, in order: `step`, `split` ("train"
        or "validation") and the numbers by name, NaN where one was not finite;
        `pandas.DataFrame(run.metrics)` is a table of them. Of several processes, the first one's.
      evaluation: the held-out numbers of the last evaluation, by name; empty if there was none.
      stopped_by: name of the signal that stopped it, with its state saved, and the same call goes
        on; None of one that reached its last step.
      curves: picture of `metrics`, if there was anything to draw.
      scores: of what the model wrote to held-out pairs, as {"validation": {"bleu": 28.5, …}}; empty
        where it wrote nothing.
      report: numbers, an example and what to do next; "" of a run that was interrupted, and on all
        processes but the first.
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
        """Whether a signal stopped it."""
        return self.stopped_by is not None


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """A checkpoint on held-out text, or the mean of several.

    Attributes:
      step: of the last one that counts.
      values: by name; NaN where there is no number.
      file: JSON with the same, null in place of NaN.
      report: what `main.py` prints; "" on all processes but the first.
      scores: of what a translator or its like wrote, as `PretrainingResult.scores`, of test sets
        too.
    """

    folder: epath.Path
    step: int
    values: Mapping[str, float]
    file: epath.Path
    report: str
    scores: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """All runs of all tasks, those of earlier starts too.

    Attributes:
      tasks: in the order of `config.finetune.tasks`.
      table: scores beside published ones, Markdown; as in `folder`/table.md.
      report: what `main.py` prints; "" on all processes but the first.
    """

    folder: epath.Path
    tasks: tuple[TaskResult, ...]
    table: str
    report: str


@dataclasses.dataclass(frozen=True)
class PredictionResult:
    """How many rows of the input have their prediction in the output.

    Attributes:
      rows: all of them; 0 where whoever reads the output, a pipe, had enough before its end.
      kept: those of `rows` that an earlier call, which was stopped, had written.
    """

    rows: int
    kept: int


@dataclasses.dataclass(frozen=True)
class InspectionResult:
    """What the layers of a model do.

    Attributes:
      folder: of the pictures and numbers.
      report: what `main.py` prints.
    """

    folder: epath.Path
    report: str


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """What a run would take of devices that are not here.

    Attributes:
      fits: whether the config as it is does.
      numbers: all that was found, for JSON.
      report: a text for a person.
    """

    fits: bool
    numbers: Mapping[str, Any]
    report: str
