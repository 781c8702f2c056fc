"""What is done to sources, unit by unit, into one folder: a corpus and pairs of texts alike.

A unit becomes files in the folder and then a record of it, `units/00000.json`: what has a record is
finished, and is not done again. Whoever does a unit, the files are the same.
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
    """What the units of one folder have in common: a frozen dataclass, picklable."""

    directory: Path


class Source(Protocol):
    """What has units; picklable."""

    units: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Unit `position` of the source called `source`; number `index` of all.

    `split` says what all of it is for; "" leaves that to what it is done with. `size` is in bytes
    of text.
    """

    index: int
    source: str
    position: int
    split: str
    size: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What is done to each unit; picklable.

    Attributes:
      sources: by the split that they are for.
      process: (job, index, source, unit, split) -> record, a function of a module. It writes the
        files of a unit into `job.directory`, and then the record.
    """

    job: Job
    sources: Mapping[str, Source]
    process: Callable[[Any, int, Any, Any, str], Record]

    def list_assignments(self) -> list[Assignment]:
        """All units, in order. Without a validation source what is held out is of each unit."""
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
        """Does one unit; errors as those of `process`."""
        source = self.sources[assignment.source]
        unit = source.units[assignment.position]
        return self.process(self.job, assignment.index, source, unit, assignment.split)


class Runner(Protocol):
    """Who does units."""

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """Does units, none of which is there, and returns when all have a record.

        Raises:
          DataError: the first that a unit raised; finished units are kept. Or who did it died.
        """


def do_units(
    work: Work,
    finished: Callable[[int], Record | None],
    runner: Runner,
    check: Callable[[Mapping[int, Record]], None] = lambda finished: None,
) -> list[Record]:
    """Records of all units, in order; `runner` does the missing ones.

    Args:
      finished: returns the record of a unit by its index, None if it is missing; called again for
        each unit that `runner` did.
      check: called with the records of finished units by index before more are done.

    Raises:
      DataError: as `runner` and `check` do.
    """
    remove_attempts(work.job.directory)
    assignments = work.list_assignments()
    records = {each.index: finished(each.index) for each in assignments}
    todo = [each for each in assignments if records[each.index] is None]
    if len(todo) < len(assignments):
        done = len(assignments) - len(todo)
        logging.info("%d of %d units are there already.", done, len(assignments))
        check({index: record for index, record in records.items() if record})
    if todo:
        runner.run(work, todo)
    for each in todo:
        records[each.index] = finished(each.index)
        if records[each.index] is None:
            raise DataError(
                f"{record_path(work.job.directory, each.index)} is not there, although its unit "
                "was done; start again: what was finished is kept.",
                path=record_path(work.job.directory, each.index),
            )
    return [records[each.index] for each in assignments]


def make_attempts(directory: Path) -> Path:
    """A new folder in `directory`, of its own disk, for units that may be done twice at once."""
    attempts = directory / f"{_ATTEMPTS}{uuid.uuid4().hex[:8]}"
    attempts.mkdir()
    return attempts


def remove_attempts(directory: Path) -> None:
    """Removes such folders, and takes them away from who may still write there: the name of one is
    gone before its content.
    """
    for path in directory.glob(f"{_ATTEMPTS}*"):
        with contextlib.suppress(OSError):
            gone = path.rename(path.with_name(f"{_ATTEMPTS}gone-{uuid.uuid4().hex[:8]}"))
            shutil.rmtree(gone, ignore_errors=True)


def record_path(directory: Path, index: int) -> Path:
    """Where the record of a unit is."""
    return directory / "units" / f"{index:05d}.json"
