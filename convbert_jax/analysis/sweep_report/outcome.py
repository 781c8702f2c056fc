"""What came out of the cells of a sweep, as the report takes it."""

import dataclasses
from collections.abc import Mapping

AXES = ("step", "tokens", "flops", "seconds")  # of a learning curve


@dataclasses.dataclass(frozen=True)
class CellOutcome:
    """One cell.

    Attributes:
      stage: "pretrain", or the name of the task.
      state: "finished", or what it is instead; `why` says more of one that failed.
      values: by metric; NaN where the run diverged. Empty of one that is not finished.
      curve: of pre-training, held-out numbers by name with the `AXES` beside them, in order.
        Seconds are those of training steps alone, without compiling, evaluations and checkpoints.
    """

    row: str
    seed: int
    stage: str
    state: str
    why: str = ""
    seconds: float = 0.0
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.row}/seed-{self.seed}/{self.stage}"


@dataclasses.dataclass(frozen=True)
class RowFacts:
    """What a row is, beside its name: `changes` as text; of pre-training the rest, else None."""

    changes: str
    parameters: int | None = None
    tokens: int | None = None
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A whole sweep.

    Attributes:
      rows: name -> facts, in order; `baseline` is one of them.
      metrics: of pre-training, to be shown; of a task all are.
    """

    name: str
    purpose: str
    rows: Mapping[str, RowFacts]
    baseline: str
    metrics: tuple[str, ...]
    cells: tuple[CellOutcome, ...]

    def shown(self) -> list[tuple[str, str]]:
        """(stage, metric) that any finished cell has and that are to be shown, in order."""
        found: dict[tuple[str, str], None] = {}
        for cell in self.cells:
            for metric in cell.values:
                if cell.stage != "pretrain" or metric in self.metrics:
                    found[cell.stage, metric] = None
        order = {metric: place for place, metric in enumerate(self.metrics)}
        stages = list(dict.fromkeys(cell.stage for cell in self.cells))
        return sorted(found, key=lambda key: (stages.index(key[0]), order.get(key[1], 0)))

    def values(self, row: str, stage: str, metric: str) -> dict[int, float]:
        """Seed -> value, of the finished cells."""
        return {
            cell.seed: cell.values[metric]
            for cell in self.cells
            if (cell.row, cell.stage) == (row, stage) and metric in cell.values
        }
