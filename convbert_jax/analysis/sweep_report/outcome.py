"""Results of a sweep, the input of the report."""

import dataclasses
from collections.abc import Mapping

AXES = ("step", "tokens", "flops", "seconds")  # of a learning curve


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """Result of one run.

    Attributes:
      stage: "pretrain", or the name of the task.
      state: "finished", "failed", "started" or "new"; `why` is the error of a failed run.
      values: metric -> value, NaN if the run diverged; {} if it is not finished.
      curve: held-out metrics of pre-training in order, each point with `AXES`. Seconds exclude
        compilation, evaluation and checkpoints.
    """

    variant: str
    seed: int
    stage: str
    state: str
    why: str = ""
    seconds: float = 0.0
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.variant}/seed-{self.seed}/{self.stage}"


@dataclasses.dataclass(frozen=True)
class VariantInfo:
    """Changes of a variant as text, and its size; None without pre-training."""

    changes: str
    parameters: int | None = None
    tokens: int | None = None
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """Results of a sweep.

    Attributes:
      variants: name -> info, in order; `baseline` is one of them.
      metrics: shown for pre-training; tasks show all of theirs.
    """

    name: str
    purpose: str
    variants: Mapping[str, VariantInfo]
    baseline: str
    metrics: tuple[str, ...]
    runs: tuple[RunOutcome, ...]

    def shown(self) -> list[tuple[str, str]]:
        """The (stage, metric) pairs to show that a finished run has, in order."""
        found: dict[tuple[str, str], None] = {}
        for run in self.runs:
            for metric in run.values:
                if run.stage != "pretrain" or metric in self.metrics:
                    found[run.stage, metric] = None
        order = {metric: place for place, metric in enumerate(self.metrics)}
        stages = list(dict.fromkeys(run.stage for run in self.runs))
        return sorted(found, key=lambda key: (stages.index(key[0]), order.get(key[1], 0)))

    def values(self, variant: str, stage: str, metric: str) -> dict[int, float]:
        """Seed -> value of the finished runs."""
        return {
            run.seed: run.values[metric]
            for run in self.runs
            if (run.variant, run.stage) == (variant, stage) and metric in run.values
        }
