"""Processing of sources, unit by unit, into one folder; shared by corpora and parallel text.

A unit produces files in the folder and then its record, `units/00000.json`. Units with a record are
finished and not processed again. The files do not depend on the runner.
"""

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from convbert_jax.data.errors import DataError

Record = dict[str, Any]
_ATTEMPTS = "attempts-"


class Job(Protocol):
    """Settings shared by all units of a folder: a frozen dataclass, picklable."""

    directory: Path


class Source(Protocol):
    """A source that is divided into units; picklable."""

    units: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A unit to process.

    Attributes:
      index: number among the units of all sources.
      source: name of its source.
      position: number among the units of this source.
      split: split of all its texts; "": texts are assigned to splits by their hash.
      size: bytes of text.
    """

    index: int
    source: str
    position: int
    split: str
    size: int


@dataclasses.dataclass(frozen=True)
class Work:
    """A function and the sources whose units it processes; picklable.

    Attributes:
      sources: sources by split.
      process: module-level function (job, index, source, unit, split) -> record. It writes the
        files of a unit to `job.directory`, then the record.
    """

    job: Job
    sources: Mapping[str, Source]
    process: Callable[[Any, int, Any, Any, str], Record]

    def list_assignments(self) -> list[Assignment]:
        """Lists all units in order; without a validation source, each holds out some texts."""
        split = {name: name if "validation" in self.sources else "" for name in self.sources}
        places = [
            (name, position, unit.size)
            for name, source in self.sources.items()
            for position, unit in enumerate(source.units)
        ]
        return [
            Assignment(index, name, position, split[name], size)
            for index, (name, position, size) in enumerate(places)
        ]

    def do(self, assignment: Assignment) -> Record:
        """Processes one unit; raises the errors of `process`."""
        source = self.sources[assignment.source]
        unit = source.units[assignment.position]
        return self.process(self.job, assignment.index, source, unit, assignment.split)


class Runner(Protocol):
    """Processes units."""

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """Processes unfinished units and returns when all have a record.

        Raises:
          DataError: the first error of a unit (finished units are kept), or a worker died.
        """


def do_units(
    work: Work,
    finished: Callable[[int], Record | None],
    runner: Runner,
    check: Callable[[Mapping[int, Record]], None] = lambda finished: None,
) -> list[Record]:
    """Processes the missing units with `runner` and returns the records of all units, in order.

    Args:
      finished: returns the record of a unit by index, or None; called again for each unit that
        `runner` processed.
      check: called with the records of finished units, by index, before `runner`.

    Raises:
      DataError: an error of `runner` or `check`.
    """
    remove_attempts(work.job.directory)
    assignments = work.list_assignments()
    records = {each.index: finished(each.index) for each in assignments}
    todo = [each for each in assignments if records[each.index] is None]
    if len(todo) < len(assignments):
        done = len(assignments) - len(todo)
        logging.info("%d of %d units are already finished.", done, len(assignments))
        check({index: record for index, record in records.items() if record})
    if todo:
        runner.run(work, todo)
    for each in todo:
        records[each.index] = finished(each.index)
        if records[each.index] is None:
            raise DataError(
                f"{record_path(work.job.directory, each.index)} is missing although its unit was "
                "processed. Start again; finished units are kept.",
                path=record_path(work.job.directory, each.index),
            )
    return [records[each.index] for each in assignments]


def make_attempts(directory: Path) -> Path:
    """Creates a folder in `directory` for concurrent attempts, on the same disk for renaming."""
    attempts = directory / f"{_ATTEMPTS}{uuid.uuid4().hex[:8]}"
    attempts.mkdir()
    return attempts


def remove_attempts(directory: Path) -> None:
    """Removes the folders of `make_attempts`.

    Renames each first, so that attempts that are still running fail.
    """
    for path in directory.glob(f"{_ATTEMPTS}*"):
        with contextlib.suppress(OSError):
            gone = path.rename(path.with_name(f"{_ATTEMPTS}gone-{uuid.uuid4().hex[:8]}"))
            shutil.rmtree(gone, ignore_errors=True)


def record_path(directory: Path, index: int) -> Path:
    """Returns the path of the record of a unit."""
    return directory / "units" / f"{index:05d}.json"
