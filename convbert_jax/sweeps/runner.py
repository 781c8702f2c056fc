"""One runner: takes a cell, runs it as a process, keeps what came out, takes the next.

A process for each cell: one that is killed for memory takes no other with it, jax begins afresh (a
process has room for some thousands of compiled programs), and an accelerator is free in between.
It costs seconds of imports a cell; compiled programs come from the cache on disk.
"""

import collections
import dataclasses
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Protocol

import convbert_jax
from convbert_jax import links
from convbert_jax.command_line import overrides
from convbert_jax.config import UserError, to_dict, to_text
from convbert_jax.config.checks import plugins
from convbert_jax.sweeps import results
from convbert_jax.sweeps.cells import Cell
from convbert_jax.sweeps.folder import FAILED, FINISHED, STARTED, Folder, Record
from convbert_jax.sweeps.queue import Queue, Taken
from convbert_jax.sweeps.search import Explorer
from convbert_jax.training.environment.signals import StopSignals
from convbert_jax.training.reports.timing import format_seconds

_POLL = 0.5  # seconds between two looks at a process, or at other runners
_SHOWN = 3  # metrics of a line, where none of those that were asked for is there


class Process(Protocol):
    """What is asked of a cell's process, as `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Summary:
    """How it ended.

    Attributes:
      finished: cells that are done, whoever did them.
      failed: cell -> one sentence; of cells that never began, that what they need failed.
      stopped: a signal asked for a stop.
    """

    finished: int
    failed: dict[str, str]
    stopped: bool


def command(cell: Cell, folder: Folder) -> tuple[str, ...]:
    """The flags of main.py that make a cell."""
    flags = overrides.to_flags(cell.changed)
    workdir = f"--workdir={folder.run(cell.id)}"
    return (f"--config={cell.base}", *flags, *plugins.to_flags(), workdir)


def start(cell: Cell, folder: Folder, lock: IO) -> subprocess.Popen:
    """The process of a cell, which keeps `lock` as long as it lives and prints into the log."""
    above = str(pathlib.Path(convbert_jax.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
    with open(folder.log(cell.id), "ab", opener=links.no_follow) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "convbert_jax.sweeps.child", *command(cell, folder)],
            stdin=subprocess.PIPE,  # ends with this process, and the child with it
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # Ctrl-C is for the runner, which passes it on once
        )


def run(
    cells: Sequence[Cell],
    folder: Folder,
    *,
    tell: Callable[[str], None],
    metrics: Sequence[str] = results.METRICS,
    explorer: Explorer | None = None,
    start: Callable[[Cell, Folder, IO], Process] = start,
    read: Callable[[Cell, Folder], dict[str, float] | None] = results.read_values,
) -> Summary:
    """Does all cells that are not done, with the other runners of `folder`, until none is left.

    A cell that failed in an earlier session is tried again, once. SIGTERM and SIGINT let the cell
    that runs save its state, and end.

    Args:
      tell: gets a line for each thing that happens.
      metrics: that a line of a finished cell shows.
      explorer: finds further rows, whose cells are done too.
      start, read: of a cell; for tests.

    Raises:
      UserError: the folder, its journal or a record cannot be used.
      OSError: the disk is full.
    """
    with StopSignals() as stop:
        return _Runner(cells, folder, tell, metrics, explorer, start, read, stop).run()


class _Runner:
    def __init__(self, cells, folder, tell, metrics, explorer, start, read, stop):
        self._cells = {cell.id: cell for cell in cells}
        self._folder, self._tell, self._start, self._read = folder, tell, start, read
        self._metrics, self._explorer, self._stop = metrics, explorer, stop
        self._queue = Queue(folder)
        self._records = {name: folder.read(name) for name in self._cells}
        self._waited = ""

    def run(self) -> Summary:
        self._say_what_is_left()
        failed: set[str] = set()
        while not self._stop.requested():
            failed = self._queue.failed()
            ready = [name for name in self._cells if self._is_ready(name) and name not in failed]
            if self._grow(ready, failed):
                continue
            if not ready:
                break
            self._queue.offer(ready, lambda name: bool(self._folder.holder(name)))
            taken = self._queue.take(first=[name for name in ready if self._is_open(name)])
            if taken is None:
                self._wait_for_others(ready)
            elif taken.cell in ready:
                self._do(taken)
            else:  # of an earlier table, or done in the meantime
                self._queue.let_go(taken)
        stopped = bool(self._stop.requested())
        return Summary(self._count(FINISHED), self._why(failed, stopped), stopped)

    def _grow(self, ready: Sequence[str], failed: set[str]) -> bool:
        """Whether the search has new cells."""
        if self._explorer is None:
            return False
        idle = all(self._folder.holder(name) for name in ready)
        new = self._explorer.grow(self._records, failed, idle=idle)
        for cell in new:
            changes = self._explorer.sweep.rows[cell.row].changes
            if cell.id not in self._cells:
                text = " ".join(f"{path}={to_text(value)}" for path, value in changes.items())
                self._tell(f"new: {cell.id}: {text}")
            self._cells[cell.id] = cell
            self._records.setdefault(cell.id, self._folder.read(cell.id))
        return bool(new)

    def _state(self, name: str) -> str:
        """Of a cell, as the folder has it now; what is finished stays so."""
        record = self._records[name]
        if record is None or record.state != FINISHED:
            record = self._records[name] = self._folder.read(name)
        return record.state if record else ""

    def _is_ready(self, name: str) -> bool:
        cell = self._cells[name]
        if self._state(name) == FINISHED:
            return False
        return not cell.after or self._state(cell.after) == FINISHED

    def _is_open(self, name: str) -> bool:
        """Whether a cell was begun, and stopped or killed."""
        return self._state(name) == STARTED and not self._folder.holder(name)

    def _count(self, state: str) -> int:
        return sum(self._state(name) == state for name in self._cells)

    def _why(self, failed: set[str], stopped: bool) -> dict[str, str]:
        why = {}
        for name, cell in self._cells.items():
            record = self._records[name]
            if self._state(name) == FINISHED:
                continue
            if name in failed:
                why[name] = record.why if record else "failed"
            elif cell.after in failed and not stopped:
                why[name] = f"not begun, as {cell.after} failed."
        return why

    def _do(self, taken: Taken) -> None:
        cell, folder = self._cells[taken.cell], self._folder
        with folder.hold(cell.id) as lock:
            if lock is None or self._state(cell.id) == FINISHED:
                self._queue.let_go(taken)
                return
            kept = self._records[cell.id]
            record = Record(
                cell=cell.id,
                state=STARTED,
                config=to_dict(cell.config),
                command=("-m", "convbert_jax.main", *command(cell, folder)),
                seconds=kept.seconds if kept else 0.0,
            )
            folder.write(record)
            done = self._count(FINISHED)
            self._tell(
                f"cell {done + 1} of {len(self._cells)}: {cell.id} "
                f"{'goes on' if kept else 'begins'}; it prints to {folder.log(cell.id)}"
            )
            began, log = time.monotonic(), _size(folder.log(cell.id))
            code, stopped = self._wait(self._start(cell, folder, lock))
            seconds = record.seconds + time.monotonic() - began
            record = dataclasses.replace(record, seconds=seconds)
            record = self._judge(cell, record, code, stopped, log)
            folder.write(record)
            self._records[cell.id] = record
            # with the lock in hand: nobody takes this try for that of a dead runner
            if record.state == FINISHED:
                self._queue.finish(taken, seconds)
            elif record.state == FAILED:
                self._queue.fail(taken, record.why)
            else:
                self._queue.let_go(taken)
        if record.state == FINISHED:
            self._say_finished(record)
        elif record.state == FAILED:
            self._tell(f"{cell.id} failed: {record.why}")
        else:
            self._tell(f"{cell.id} is stopped, its state is saved.")

    def _wait(self, process: Process) -> tuple[int, bool]:
        """(exit code, whether it was asked to stop)."""
        asked = False
        while (code := process.poll()) is None:
            if not asked and self._stop.requested():
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(_POLL / 10)
        return code, asked

    def _judge(self, cell: Cell, record: Record, code: int, stopped: bool, log: int) -> Record:
        """The record of a cell whose process has ended. The folder says whether it is finished."""
        try:
            values = self._read(cell, self._folder)
        except UserError as error:
            return dataclasses.replace(record, state=FAILED, why=str(error))
        if values is not None and code == 0:
            finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
            return dataclasses.replace(record, state=FINISHED, values=finite)
        if stopped:
            return record
        why = explain(code, _tail(self._folder.log(cell.id), log))
        return dataclasses.replace(record, state=FAILED, why=why)

    def _wait_for_others(self, ready: Sequence[str]) -> None:
        held = {name: who for name in ready if (who := self._folder.holder(name))}
        text = ", ".join(f"{name} ({who})" for name, who in held.items())
        if text and text != self._waited:
            self._tell(f"waiting for what other runners do: {text}")
            self._waited = text
        time.sleep(_POLL)

    def _say_what_is_left(self) -> None:
        done = self._count(FINISHED)
        left = len(self._cells) - done
        self._tell(f"{done} of {len(self._cells)} cells are finished, {left} are left.")

    def _say_finished(self, record: Record) -> None:
        """What came out, how many cells are left and for how long, this runner alone."""
        done = self._count(FINISHED)
        left = [name for name in self._cells if self._state(name) != FINISHED]
        finite = {name: value for name, value in record.values.items() if value is not None}
        shown = [name for name in self._metrics if name in finite] or list(finite)[:_SHOWN]
        parts = [f"{record.cell} finished in {format_seconds(record.seconds)}"]
        parts += [f"{name} {finite[name]:.4g}" for name in shown]
        parts.append(f"{done} of {len(self._cells)} done")
        if left:
            seconds = self._expect(left)
            rate = 3600 * len(left) / seconds if seconds else math.inf
            parts.append(f"{rate:.3g} cells/h, {format_seconds(seconds)} left for one runner")
        self._tell("  ".join(parts))

    def _expect(self, left: Sequence[str]) -> float:
        """Seconds of some cells: for each what finished ones of its stage took in the mean."""
        took: dict[str, list[float]] = collections.defaultdict(list)
        for name, record in self._records.items():
            if record and record.state == FINISHED:
                took[self._cells[name].stage].append(record.seconds)
        every = statistics.fmean(value for found in took.values() for value in found)
        stages = [self._cells[name].stage for name in left]
        return sum(statistics.fmean(took[s]) if took.get(s) else every for s in stages)


def explain(code: int, printed: str) -> str:
    """Why a process failed, in one sentence."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        memory = ", most likely for want of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{memory}."
    if errors:
        return errors[-1]
    last = lines[-1][:300] if lines else "it printed nothing"
    return f"ended with exit code {code}: {last}"


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: pathlib.Path, start: int) -> str:
    """What a log has from a byte on, its last part if that is much."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - 65_536))
        return file.read().decode("utf-8", errors="replace")
