"""Units of work: parts of a source, each processed by one process; shared by corpora and pairs.

A unit produces files in the folder and then its record, `units/00000.json`. Units with a record are
finished and not processed again. The files do not depend on the runner.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from convbert_jax import storage
from convbert_jax.console import show_progress
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


_REMEDY = (
    "Free some space or use another config.data.directory, then run again; completed work is kept"
)


def write_record(
    path: Path,
    content: Mapping[str, Any],
    *,
    field: str = "config.data.directory",
    remedy: str = _REMEDY,
) -> None:
    """Atomically writes a JSON object and its checksum, which `files.read_json` compares.

    The checksum detects damage that is still valid JSON, for example a changed digit.

    Raises:
      DataError: the file cannot be written; an existing file is unchanged.
    """
    try:
        storage.write_json(path, storage.seal(content))
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror}). {remedy}.", field=field, path=path
        ) from None


_STARTING = threading.Lock()  # held while the main script is hidden, see `_without_script`


@dataclasses.dataclass(frozen=True)
class Processes:
    """A `Runner` that uses processes of this machine.

    Attributes:
      workers: number of processes; 0: one per core. A single one is the calling process.
      activity: title of the progress line.
    """

    workers: int
    activity: str = "Tokenizing"

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """Processes units as `Runner.run`. Raises DataError also if a process was killed."""
        workers = min(self.workers or _cores(), len(assignments))
        total = sum(each.size for each in assignments)
        with show_progress(total, self.activity) as advance:
            if workers <= 1:
                for each in assignments:
                    work.do(each)
                    advance(each.size)
                return
            with _pool(workers, work) as pool:
                with _without_script():  # submitting may start a worker
                    waiting = {pool.submit(_do, each): each for each in assignments}
                for task in futures.as_completed(waiting):
                    task.result()
                    advance(waiting[task].size)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def _pool(workers: int, work: Work) -> Iterator[futures.Executor]:
    others = multiprocessing.active_children()
    # Spawn: the parent may have started jax, whose threads do not survive a fork.
    pool = futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work,),
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "A tokenizing process was killed, probably out of memory. Start again with fewer "
            "--config.data.workers; finished units are kept.",
            field="config.data.workers",
        ) from None
    except KeyboardInterrupt:  # do not wait for unfinished units, unlike after a DataError
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Prevents processes that are spawned in the block from running the user's script again.

    A spawned process first imports the main module, in case its data is defined there. This package
    sends no such data, and a script without `if __name__ == "__main__":` would start over in each
    process.
    """
    main = sys.modules["__main__"]
    with _STARTING:  # a second thread would save and restore the hidden state
        hidden = {
            name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            del main.__spec__
            vars(main).update(hidden)


# --- In a worker process ---

_work: Work | None = None


def _start_worker(work: Work) -> None:
    """Initializes a worker: stores `work`, ignores Ctrl-C, and exits with the parent."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _do(assignment: Assignment) -> None:
    _work.do(assignment)
