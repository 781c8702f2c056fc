"""A sweep as data, written in a Python file whose `get_sweep(NAME)` returns it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax.config import Config, UserError


class SweepError(UserError):
    """A sweep that cannot be run, or not in this folder."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one row of the table changes in the config of the sweep.

    Attributes:
      changes: path of a field -> value, as `convbert_jax.load_config` takes them:
        {"model.kernel_size": 3}.
      flops_of: another row, whose training FLOPs this one spends: train.steps and the warm-up are
        scaled by the FLOPs of a step. "": as many steps as the config says, so equal tokens.
      parts: path of a field that counts steps -> its part of train.steps, however many these are:
        {"objective.masked_lm_steps": 0.5}.
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flops_of: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """What each pre-trained model is fine-tuned on.

    Attributes:
      config: as --config takes it, "text:trec" or "glue:cola"; after span corruption one of pairs
        of texts, "text_to_text:tiny".
      changes: as of `Row`, before what is said for all tasks; `init_from` is the pre-trained cell.
    """

    config: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Search:
    """Rows that Optuna chooses (`search.py`), beside those that are given.

    Attributes:
      space: path of a field -> the values that it is chosen from.
      rows: how many are to be found.
      metric: that decides, of the cells of `stage`, mean over seeds.
      most_parameters, most_flops: of a pre-training cell; 0 is no limit. Configs that cannot be are
        left out as those over the budget are.
      within: a row of the table: none that is found has more parameters or training FLOPs than it;
        "" is no limit.
    """

    space: Mapping[str, Sequence[Any]]
    rows: int
    metric: str
    maximize: bool
    stage: str = "pretrain"
    most_parameters: int = 0
    most_flops: float = 0.0
    within: str = ""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Rows x seeds, and tasks after each of them.

    Attributes:
      config: what all cells start from, as --config takes it. Of pre-training: each row and seed is
        pre-trained once, then fine-tuned on each of `tasks`. Of fine-tuning: each row and seed is
        one fine-tuning run, and `tasks` is empty.
      rows: name, which becomes a folder's, -> what it changes; in the order of the report.
      seeds: config.seed of the cells of each row.
      changes: of all rows, as of `Row`; a row's own come after them.
      tasks: name -> task.
      from_scratch: each task is fine-tuned from random weights of the same sizes too.
      baseline: the row that the others are compared with; "" is the first.
      metrics: what the report shows of pre-training, by name; (): what the recipe measures.
      search: further rows, which Optuna chooses; None is a table as it stands.
      purpose: what is asked, one sentence for the report.
    """

    config: str
    rows: Mapping[str, Row]
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Task] = dataclasses.field(default_factory=dict)
    from_scratch: bool = False
    baseline: str = ""
    metrics: tuple[str, ...] = ()
    search: Search | None = None
    purpose: str = ""

    @property
    def compared_with(self) -> str:
        """The row that the others are compared with."""
        return self.baseline or next(iter(self.rows))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
      stage: "pretrain", "finetune", or the name of the task that follows pre-training.
      base: config file, and `changed`, path -> value: what main.py is started with.
      after: id of the cell whose weights it starts from; "" is none.
    """

    row: str
    seed: int
    stage: str
    base: str
    changed: Mapping[str, Any]
    config: Config
    after: str = ""

    @property
    def id(self) -> str:
        """Its name in the sweep, and of its folder."""
        return f"{self.row}/seed-{self.seed}/{self.stage}"
