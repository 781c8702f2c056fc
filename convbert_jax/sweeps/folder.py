"""Files of a sweep.

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
import socket
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from convbert_jax import files, links
from convbert_jax.config import Config, changes, to_dict
from convbert_jax.sweeps.table import SweepError
from convbert_jax.workdir import Workdir

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
        if files.is_remote(path):
            raise SweepError(
                "is in a bucket, which has no file locks. Use a disk that all workers share.",
                field="--workdir",
                value=str(path),
            )
        self.path = pathlib.Path(files.to_path(path))
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
        sections = ("data", "tokenizer", *(["parallel"] if config.reads_pairs else []))
        key = {
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            if section in sections
            for name, value in values.items()
            if f"{section}.{name}" in _VOCABULARIES
            or not changes.is_changeable(Config, f"{section}.{name}", config.recipe)
        }
        if config.reads_pairs:
            key["sequence.shared_vocabulary"] = config.sequence.shared_vocabulary
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
            values = files.read_json(path, remedy=remedy, fields=_FIELDS)
        except FileNotFoundError:
            return None
        if values["state"] not in (FINISHED, FAILED, STARTED):
            raise files.damaged(path, f"its 'state' is {values['state']!r}", remedy)
        for metric, value in values["values"].items():
            if not (value is None or type(value) in (int, float)):
                raise files.damaged(path, f"its {metric!r} is {value!r}", remedy)
        fields = {field.name: values[field.name] for field in dataclasses.fields(Record)}
        return Record(**fields | {"command": tuple(values["command"])})

    def write(self, record: Record) -> None:
        """Replaces the record of a run; raises OSError if the disk is full."""
        path = self.file(record.run, ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, dataclasses.asdict(record))

    @contextlib.contextmanager
    def hold(self, run: str) -> Iterator[IO | None]:
        """Locks a run; yields None if another process holds the lock.

        Processes that inherit the yielded file hold the lock too; the system releases it when the
        last of them exits.
        """
        path = self.file(run, ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace", opener=links.no_follow) as file:
            if not files.try_lock(file, f"{path} cannot be locked. Start one worker at a time."):
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
        with open(path, "a", opener=links.no_follow) as file:
            while not files.try_lock(file, f"{path} cannot be locked. Start one worker at a time."):
                time.sleep(0.1)
            yield
