"""The folder of a sweep: one run's folder a cell, and what is kept of each cell beside it.

WORKDIR/cells/ROW/seed-N/pretrain/     a run's folder, as of main.py
WORKDIR/cells/ROW/seed-N/TASK/         the same of each task that is fine-tuned after it
WORKDIR/cells/ROW/seed-N/pretrain.json what is kept of it: `Record`
                         pretrain.log  what it printed, of all its starts
                         pretrain.lock held as long as somebody runs it
WORKDIR/data/HASH                      tokenizer and shards, one folder for all cells that agree
WORKDIR/journal.log                    who does what, see queue.py
WORKDIR/report/                        report.md, *.csv, *.png
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
# They may change in a run, whose vocabulary is known by its content, and here tell two apart.
_VOCABULARIES = ("tokenizer.path", "parallel.target_vocabulary")
_FIELDS = {
    "cell": str,
    "state": str,
    "why": str,
    "config": dict,
    "command": list,
    "seconds": (int, float),
    "values": dict,
}


@dataclasses.dataclass(frozen=True)
class Record:
    """What is kept of a cell.

    Attributes:
      state: FINISHED, FAILED, or STARTED, also of one that was stopped or killed.
      why: one sentence of a FAILED one.
      config: as `to_dict` of it gives it.
      command: that runs it, arguments of Python.
      seconds: of all its starts that ended.
      values: what came out, by metric; null where a number was not finite.
    """

    cell: str
    state: str
    config: Mapping[str, Any]
    command: tuple[str, ...]
    why: str = ""
    seconds: float = 0.0
    values: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


class Folder:
    """Where everything of one sweep is; nothing is read or written before a method says so."""

    def __init__(self, path: str | os.PathLike):
        """Raises SweepError for a bucket, which has no locks."""
        if files.is_remote(path):
            raise SweepError(
                f"--workdir={path} is in a bucket, which has no locks; name a folder on a disk "
                "that the runners share."
            )
        self.path = pathlib.Path(files.to_path(path))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def journal(self) -> pathlib.Path:
        return self.path / "journal.log"

    @property
    def report(self) -> pathlib.Path:
        return self.path / "report"

    def run(self, cell: str) -> Workdir:
        return Workdir(self.path / "cells" / cell)

    def log(self, cell: str) -> pathlib.Path:
        return self._beside(cell, ".log")

    def record(self, cell: str) -> pathlib.Path:
        return self._beside(cell, ".json")

    def data(self, config: Config) -> pathlib.Path:
        """Tokenizer and shards of all cells whose rows are the same."""
        decides = {
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            if section in ("data", "tokenizer", *(["parallel"] if config.reads_pairs else []))
            for name, value in values.items()
            if f"{section}.{name}" in _VOCABULARIES
            or not changes.is_changeable(Config, f"{section}.{name}", config.recipe)
        }
        if config.reads_pairs:
            decides["sequence.shared_vocabulary"] = config.sequence.shared_vocabulary
        if not config.tokenizer.path:  # the vocabulary is that of the weights, if there are any
            found = {"init_from": config.init_from, "teacher": config.distillation.teacher}
            decides |= {name: path for name, path in found.items() if path}
        text = json.dumps(decides, sort_keys=True)
        return self.path / "data" / hashlib.sha256(text.encode()).hexdigest()[:8]

    def begun(self) -> list[str]:
        """The cells that have a record."""
        cells = self.path / "cells"
        return sorted(
            str(path.relative_to(cells).with_suffix("")) for path in cells.glob("*/seed-*/*.json")
        )

    def read(self, cell: str) -> Record | None:
        """What is kept of a cell; None of one that nobody began.

        Raises:
          DamagedFileError: its record is damaged.
        """
        remedy = "delete it: the cell goes on from what its folder has"
        path = self.record(cell)
        try:
            values = files.read_json(path, remedy=remedy, fields=_FIELDS)
        except FileNotFoundError:
            return None
        names = {field.name for field in dataclasses.fields(Record)}
        kept = {name: value for name, value in values.items() if name in names}
        if kept["state"] not in (FINISHED, FAILED, STARTED):
            raise files.damaged(path, f"its 'state' is {kept['state']!r}", remedy)
        for metric, value in kept["values"].items():
            if not (value is None or type(value) in (int, float)):
                raise files.damaged(path, f"its {metric!r} is {value!r}", remedy)
        return Record(**kept | {"command": tuple(kept["command"])})

    def write(self, record: Record) -> None:
        """Replaces what is kept of a cell; raises OSError where the disk is full."""
        path = self.record(record.cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, dataclasses.asdict(record))

    @contextlib.contextmanager
    def hold(self, cell: str) -> Iterator[IO | None]:
        """Has a cell for this process alone, and for those that inherit the file; None where
        somebody else has it. The system lets it go when the last of them is dead.
        """
        path = self._beside(cell, ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace", opener=links.no_follow) as file:
            if not files.try_lock(file, f"{path} cannot be locked; start one runner at a time."):
                yield None
                return
            file.truncate(0)
            file.write(me())
            file.flush()
            yield file

    @contextlib.contextmanager
    def alone(self, task: str) -> Iterator[None]:
        """Context of what one runner at a time may do; the others wait."""
        path = self.path / f"{task}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", opener=links.no_follow) as file:
            while not files.try_lock(file, f"{path} cannot be locked; start one runner at a time."):
                time.sleep(0.1)
            yield

    def holder(self, cell: str) -> str:
        """Who has a cell, in words; "" if nobody has."""
        path = self._beside(cell, ".lock")
        try:
            with path.open("r+", encoding="utf-8", errors="replace") as file:
                if files.try_lock(file, f"{path} cannot be locked; start one runner at a time."):
                    return ""
                return file.read(200).strip() or "another process"
        except FileNotFoundError:
            return ""

    def _beside(self, cell: str, suffix: str) -> pathlib.Path:
        return self.path / "cells" / f"{cell}{suffix}"


def me() -> str:
    """This process, in words."""
    return f"process {os.getpid()} on {socket.gethostname()}"
