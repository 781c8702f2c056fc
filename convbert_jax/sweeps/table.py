"""The definition of a sweep, returned by `get_sweep(NAME)` of a Python file, and its folder.

WORKDIR/runs/VARIANT/seed-N/STAGE/      the folder of a run, as main.py writes it
WORKDIR/runs/VARIANT/seed-N/STAGE.json  state, metrics and command of the run: `Record`
                            STAGE.log   output of the run, of all its starts
                            STAGE.lock  locked while the process of the run is alive
WORKDIR/data/HASH                       tokenizer and shards, shared by runs with the same data
WORKDIR/journal.log                     Optuna study of a search
WORKDIR/report/                         report.md, *.csv, *.png
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from convbert_jax import storage
from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import Config, UserError, changes, to_dict
from convbert_jax.workdir import Workdir

PRETRAIN, FINETUNE, SCRATCH = "pretrain", "finetune", "-scratch"  # stages, suffix of a stage
_NAME = re.compile(r"[A-Za-z0-9][\w.,=+-]*", re.ASCII)


class SweepError(UserError):
    """A sweep that cannot run, or not in this folder."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Config changes that one group of runs has in common.

    Attributes:
      changes: field path -> value, as `convbert_jax.load_config` takes them:
        {"model.kernel_size": 3, "objective.masked_lm_steps": "50%"}.
      match_flops_of: another variant; train.steps and warm-up are scaled so that both spend the
        same training FLOPs. "" keeps the steps of the config (equal tokens).
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    match_flops_of: str = ""

    def __post_init__(self):
        if self.match_flops_of and "train.steps" in self.changes:
            raise SweepError("sets the steps. Remove train.steps.", field="match_flops_of")


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
                raise SweepError(
                    f"must be one of these variants: {', '.join(known) or 'none'}. --variants, if "
                    "given, has to include it.",
                    field=field,
                    value=name,
                )
        if any("seed" in v.changes for v in (self, *self.variants.values())):
            raise SweepError("is set by Sweep(seeds=...).", field="config.seed")

    @property
    def reference(self) -> str:
        """Name of the variant that the others are compared with."""
        return self.baseline or next(iter(self.variants))

    def varied_fields(self) -> set[str]:
        """Paths of the fields in which runs differ."""
        varied = [variant.changes for variant in self.variants.values()]
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


FINISHED, FAILED, STARTED = "finished", "failed", "started"
# May change in a run that has started, but runs with other vocabularies cannot share shards.
_VOCABULARIES = ("tokenizer.path", "parallel.target_vocabulary")
_FIELDS = {
    **{"run": str, "state": str, "why": str, "config": dict, "command": list},
    **{"seconds": (int, float), "values": dict, "failures": int},
}


@dataclasses.dataclass(frozen=True)
class Record:
    """State and result of a run.

    Attributes:
      state: FINISHED, FAILED, or STARTED (also if it was stopped or killed).
      why: error of a FAILED run.
      config: as `to_dict` returns it.
      command: arguments of Python that start the run.
      seconds: duration of all starts that ended.
      values: metrics by name; None where a value is not finite.
      failures: how often the run failed.
    """

    run: str
    state: str
    config: Mapping[str, Any]
    command: tuple[str, ...]
    why: str = ""
    seconds: float = 0.0
    values: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    failures: int = 0


class Folder:
    """The workdir of a sweep."""

    def __init__(self, path: str | os.PathLike):
        """Raises SweepError for a bucket, which has no locks."""
        if storage.is_remote(path):
            raise SweepError(
                "is in a bucket, which has no file locks. Use a disk that all workers share.",
                field="--workdir",
                value=str(path),
            )
        self.path = pathlib.Path(storage.to_path(path))
        self.journal = self.path / "journal.log"
        self.report = self.path / "report"

    def __str__(self) -> str:
        return str(self.path)

    def run(self, run: str) -> Workdir:
        return Workdir(self.path / "runs" / run)

    def file(self, run: str, suffix: str) -> pathlib.Path:
        """The .json, .log or .lock file of a run."""
        return self.path / "runs" / f"{run}{suffix}"

    def data(self, config: Config) -> pathlib.Path:
        """Folder of tokenizer and shards, the same for runs whose token rows are the same."""
        sections = ("data", "tokenizer", config.spec.data)
        key = {
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            if section in sections
            for name, value in values.items()
            if f"{section}.{name}" in _VOCABULARIES
            or not changes.is_changeable(Config, f"{section}.{name}", config.recipe)
        }
        key["two vocabularies"] = config.spec.has_two_vocabularies(config)
        if not config.tokenizer.path:  # the vocabulary comes from the weights, if there are any
            weights = {"init_from": config.init_from, "teacher": config.distillation.teacher}
            key |= {name: path for name, path in weights.items() if path}
        text = json.dumps(key, sort_keys=True)
        return self.path / "data" / hashlib.sha256(text.encode()).hexdigest()[:8]

    def recorded(self) -> list[str]:
        """Ids of the runs that have a record."""
        runs = self.path / "runs"
        return sorted(
            str(path.relative_to(runs).with_suffix("")) for path in runs.glob("*/seed-*/*.json")
        )

    def read(self, run: str) -> Record | None:
        """Reads the record of a run; None if the run never started.

        Raises:
          DamagedFileError: the record is damaged.
        """
        remedy = "delete it: the run continues from its last checkpoint"
        path = self.file(run, ".json")
        try:
            values = storage.read_json(path, remedy=remedy, fields=_FIELDS)
        except FileNotFoundError:
            return None
        if values["state"] not in (FINISHED, FAILED, STARTED):
            raise storage.damaged(path, f"its 'state' is {values['state']!r}", remedy)
        for metric, value in values["values"].items():
            if not (value is None or type(value) in (int, float)):
                raise storage.damaged(path, f"its {metric!r} is {value!r}", remedy)
        fields = {field.name: values[field.name] for field in dataclasses.fields(Record)}
        return Record(**fields | {"command": tuple(values["command"])})

    def write(self, record: Record) -> None:
        """Replaces the record of a run; raises OSError if the disk is full."""
        path = self.file(record.run, ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(path, dataclasses.asdict(record))

    @contextlib.contextmanager
    def hold(self, run: str) -> Iterator[IO | None]:
        """Locks a run; yields None if another process holds the lock.

        Processes that inherit the yielded file hold the lock too; the system releases it when the
        last of them exits.
        """
        path = self.file(run, ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace", opener=storage.no_follow) as file:
            if not storage.try_lock(file, f"{path} cannot be locked. Start one worker at a time."):
                yield None
                return
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield file

    def holder(self, run: str) -> str:
        """Process that last held a run, as "process PID on HOST"."""
        text = self.file(run, ".lock").read_text(encoding="utf-8", errors="replace")
        return text[:200].strip() or "another process"

    @contextlib.contextmanager
    def alone(self, task: str) -> Iterator[None]:
        """Context that one worker at a time enters; the others wait."""
        path = self.path / f"{task}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", opener=storage.no_follow) as file:
            while not storage.try_lock(
                file, f"{path} cannot be locked. Start one worker at a time."
            ):
                time.sleep(0.1)
            yield
