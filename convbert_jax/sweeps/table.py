"""The definition of a sweep, returned by `get_sweep(NAME)` of a Python file."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import Config, UserError

PRETRAIN, FINETUNE, SCRATCH = "pretrain", "finetune", "-scratch"  # stages, suffix of a stage
_NAME = re.compile(r"[A-Za-z0-9][\w.,=+-]*", re.ASCII)


class SweepError(UserError):
    """A sweep that cannot run, or not in this folder."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Config changes that one group of runs has in common.

    Attributes:
      changes: field path -> value, as `convbert_jax.load_config` takes them:
        {"model.kernel_size": 3}.
      match_flops_of: another variant; train.steps and warm-up are scaled so that both spend the
        same training FLOPs. "" keeps the steps of the config (equal tokens).
      step_fractions: path of a field that counts steps -> fraction of train.steps:
        {"objective.masked_lm_steps": 0.5}.
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    match_flops_of: str = ""
    step_fractions: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.match_flops_of and (self.step_fractions or "train.steps" in self.changes):
            raise SweepError(
                "sets the steps. Remove step_fractions and train.steps.", field="match_flops_of"
            )


@dataclasses.dataclass(frozen=True)
class Task:
    """Fine-tuning that follows each pre-training run.

    Attributes:
      config: as --config takes it: "text:trec", "glue:cola", or after span corruption a config of
        text pairs, "text_to_text:tiny".
      changes: field path -> value; these take precedence over overrides of all tasks. `seed` and
        `init_from` are set by the sweep.
    """

    config: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for path in ("seed", "init_from"):
            if path in self.changes:
                raise SweepError("is set by the sweep, not by a Task.", field=f"config.{path}")


@dataclasses.dataclass(frozen=True)
class Search:
    """Variants that Optuna chooses in addition to the given ones (`search.py`).

    Attributes:
      space: field path -> candidate values.
      trials: number of variants to find.
      metric: objective: metric of the runs of `stage`, mean over seeds.
      max_parameters, max_flops: budget of a pre-training run; 0 for no limit. Invalid configs and
        configs above the budget are skipped.
      budget_of: variant whose parameters and training FLOPs are the budget; "" for no limit.
    """

    space: Mapping[str, Sequence[Any]]
    trials: int
    metric: str
    maximize: bool
    stage: str = PRETRAIN
    max_parameters: int = 0
    max_flops: float = 0.0
    budget_of: str = ""

    def __post_init__(self):
        if self.trials < 1 or not self.space or not all(self.space.values()):
            raise SweepError(f"is empty: trials={self.trials}, space={self.space}.", field="search")
        types = field_types()
        for path in self.space.keys() - types.keys():
            hint = f"Did you mean {nearest(path, types)}?"
            raise SweepError(f"of the search does not exist. {hint}", field=f"config.{path}")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Variants x seeds, optionally with fine-tuning tasks after each pre-training run.

    Attributes:
      config: base config of all runs, as --config takes it. Pre-training: each variant and seed is
        pre-trained once, then fine-tuned on each of `tasks`. Fine-tuning: each variant and seed is
        one fine-tuning run, and `tasks` is empty.
      variants: name, which is also the folder name -> changes; in the order of the report.
      seeds: config.seed of the runs of each variant.
      changes: changes of all variants; the changes of a variant take precedence.
      tasks: name -> task.
      from_scratch: each task is also fine-tuned from random weights.
      baseline: variant that the others are compared with; "" is the first.
      metrics: pre-training metrics in the report; () is the default of the recipe.
      search: further variants, chosen by Optuna; None for no search.
      purpose: question that the sweep answers, for the report.
    """

    config: str
    variants: Mapping[str, Variant]
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Task] = dataclasses.field(default_factory=dict)
    from_scratch: bool = False
    baseline: str = ""
    metrics: tuple[str, ...] = ()
    search: Search | None = None
    purpose: str = ""

    def __post_init__(self):
        if not self.variants or not self.seeds:
            raise SweepError("Sweep has no variants or no seeds. Add at least one of each.")
        if len(set(self.seeds)) < len(self.seeds):
            raise SweepError("contains a seed twice.", field="seeds", value=self.seeds)
        for name, value in {**self.variants, **self.tasks}.items():
            if not _NAME.fullmatch(str(name)):
                raise SweepError(
                    f"{name!r} cannot be a folder name. Use letters, digits and .,=+-_", value=name
                )
            if not isinstance(value, Variant | Task):
                raise SweepError(
                    f"{name} is a {type(value).__name__}; expected a Variant or a Task.", field=name
                )
        for name in self.tasks:
            if name in (PRETRAIN, FINETUNE) or (self.from_scratch and name.endswith(SCRATCH)):
                raise SweepError(f"Task name {name!r} is reserved. Rename the task.", value=name)
        own_steps = {name for name, v in self.variants.items() if not v.match_flops_of}
        references = [("baseline", self.baseline, self.variants.keys())]
        references += [
            ("match_flops_of", v.match_flops_of, own_steps) for v in self.variants.values()
        ]
        if self.search:
            references.append(("budget_of", self.search.budget_of, self.variants.keys()))
        for field, name, known in references:
            if name and name not in known:
                raise SweepError(f"must be one of: {', '.join(known)}.", field=field, value=name)
        if any("seed" in v.changes for v in (self, *self.variants.values())):
            raise SweepError("is set by Sweep(seeds=...).", field="config.seed")

    @property
    def reference(self) -> str:
        """Name of the variant that the others are compared with."""
        return self.baseline or next(iter(self.variants))

    def varied_fields(self) -> set[str]:
        """Paths of the fields in which runs differ."""
        varied = [paths for v in self.variants.values() for paths in (v.changes, v.step_fractions)]
        return {"seed"}.union(*varied, self.search.space if self.search else ())


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      stage: "pretrain", "finetune", or the name of the task that follows pre-training.
      base: config file of main.py, and `changes`, its overrides: field path -> value.
      after: id of the run whose weights it starts from; "" if there is no such run.
    """

    variant: str
    seed: int
    stage: str
    base: str
    changes: Mapping[str, Any]
    config: Config
    after: str = ""

    @property
    def id(self) -> str:
        """Name of the run and path of its folder: "VARIANT/seed-N/STAGE"."""
        return f"{self.variant}/seed-{self.seed}/{self.stage}"
