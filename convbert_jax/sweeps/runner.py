"""A worker of a sweep: starts each unfinished run as a process, one at a time.

Workers that share the folder divide the runs by file locks: the lock of a run is held by the
worker and by the process of the run, and released when both have exited. A process for each run
frees accelerator and memory in between, and an out-of-memory kill ends one run only.
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
from convbert_jax import storage
from convbert_jax.command_line import overrides
from convbert_jax.config import UserError, plugins, to_dict, to_text
from convbert_jax.sweeps import results
from convbert_jax.sweeps.search import Explorer
from convbert_jax.sweeps.table import FAILED, FINISHED, STARTED, Folder, Record, Run
from convbert_jax.training.signals import StopSignals
from convbert_jax.training.timing import format_seconds

_POLL = 2.0  # seconds between two looks at the folder while other workers are busy
_SHOWN = 3  # metrics in the log line of a run that has none of the requested ones


class Process(Protocol):
    """The part of `subprocess.Popen` that a worker uses."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a worker.

    Attributes:
      finished: number of finished runs, of all workers.
      failed: id of a run -> error; includes runs whose pre-training failed.
      stopped: whether a signal stopped the worker.
    """

    finished: int
    failed: dict[str, str]
    stopped: bool


def command(run: Run, folder: Folder) -> tuple[str, ...]:
    """Returns the flags of main.py for a run."""
    flags = overrides.to_flags(run.changes)
    workdir = f"--workdir={folder.run(run.id)}"
    return (f"--config={run.base}", *flags, *plugins.to_flags(), workdir)


def start(run: Run, folder: Folder, lock: IO) -> subprocess.Popen:
    """Starts the process of a run, which inherits `lock` and appends its output to the log."""
    package = str(pathlib.Path(convbert_jax.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with open(folder.file(run.id, ".log"), "ab", opener=storage.no_follow) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "convbert_jax.sweeps.child", *command(run, folder)],
            stdin=subprocess.PIPE,  # closed when this process exits; the child exits then
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # Ctrl-C reaches the worker only, which sends SIGTERM once
        )


def work(
    runs: Sequence[Run],
    folder: Folder,
    *,
    log: Callable[[str], None],
    metrics: Sequence[str] = results.METRICS,
    explorer: Explorer | None = None,
    start: Callable[[Run, Folder, IO], Process] = start,
    read: Callable[[Run, Folder], dict[str, float] | None] = results.read_values,
) -> Summary:
    """Executes the unfinished runs, together with the other workers of `folder`.

    A run that failed before this worker started is tried once more. After SIGTERM or SIGINT the
    current run saves a checkpoint, then the worker returns.

    Args:
      log: called with each log line.
      metrics: shown in the log line of a finished run.
      explorer: adds variants of a search.
      start, read: replaced in tests.

    Raises:
      UserError: the folder, its journal or a record cannot be used.
      OSError: the disk is full.
    """
    with StopSignals() as stop:
        return _Worker(runs, folder, log, metrics, explorer, start, read, stop).work()


class _Worker:
    def __init__(self, runs, folder, log, metrics, explorer, start, read, stop):
        self._folder, self._log, self._metrics = folder, log, metrics
        self._explorer, self._start, self._read, self._stop = explorer, start, read, stop
        self._runs: dict[str, Run] = {}
        self._records: dict[str, Record | None] = {}
        self._failures: dict[str, int] = {}  # before this worker started
        self._waiting = ""
        self._add(runs)

    def _add(self, runs: Sequence[Run]) -> None:
        for run in runs:
            record = self._folder.read(run.id)
            self._runs[run.id], self._records[run.id] = run, record
            self._failures[run.id] = record.failures if record else 0

    def work(self) -> Summary:
        self._log(f"{self._count()} of {len(self._runs)} runs are finished.")
        while not self._stop.requested():
            self._refresh()
            if self._explorer:
                self._add_variants(self._explorer.sync(self._records))
            pending = self._pending()
            if any(self._try(name) for name in pending):
                continue
            if self._explorer and (new := self._explorer.propose()):
                self._add_variants(new)
            elif pending:
                self._wait(pending)
            else:
                break
        self._refresh()
        stopped = bool(self._stop.requested())
        return Summary(self._count(), self._errors(stopped), stopped)

    def _refresh(self) -> None:
        """Reads the records that another worker may have changed."""
        for name, record in self._records.items():
            if record is None or record.state != FINISHED:
                self._records[name] = self._folder.read(name)

    def _add_variants(self, runs: Sequence[Run]) -> None:
        for run in runs:
            changes = self._explorer.sweep.variants[run.variant].changes
            text = " ".join(f"{path}={to_text(value)}" for path, value in changes.items())
            self._log(f"New run {run.id}: {text}")
        self._add(runs)

    def _is(self, name: str, state: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.state == state

    def _has_failed(self, name: str) -> bool:
        """Whether a run failed since this worker started, in any worker."""
        return self._is(name, FAILED) and self._records[name].failures > self._failures[name]

    def _pending(self) -> list[str]:
        """Runs to execute, interrupted ones first."""
        pending = [
            name
            for name, run in self._runs.items()
            if not self._is(name, FINISHED)
            and not self._has_failed(name)
            and (not run.after or self._is(run.after, FINISHED))
        ]
        return sorted(pending, key=lambda name: not self._is(name, STARTED))

    def _count(self) -> int:
        return sum(self._is(name, FINISHED) for name in self._runs)

    def _errors(self, stopped: bool) -> dict[str, str]:
        errors = {}
        for name, run in self._runs.items():
            if self._has_failed(name):
                errors[name] = self._records[name].why
            elif self._has_failed(run.after) and not self._is(name, FINISHED) and not stopped:
                errors[name] = f"not started, because {run.after} failed."
        return errors

    def _try(self, name: str) -> bool:
        """Executes a run; False if another worker has it or finished it."""
        run, folder = self._runs[name], self._folder
        with folder.hold(name) as lock:
            if lock is None:
                return False
            before = self._records[name] = folder.read(name)
            if self._is(name, FINISHED) or self._has_failed(name):
                return False
            record = Record(
                run=name,
                state=STARTED,
                config=to_dict(run.config),
                command=("-m", "convbert_jax.main", *command(run, folder)),
                seconds=before.seconds if before else 0.0,
                failures=before.failures if before else 0,
            )
            folder.write(record)
            log = folder.file(name, ".log")
            verb = "Resuming" if before else "Starting"
            number = f"{self._count() + 1} of {len(self._runs)}"
            self._log(f"{verb} run {number}: {name}; output in {log}")
            began, offset = time.monotonic(), log.stat().st_size if log.exists() else 0
            code, stopped = self._wait_for(self._start(run, folder, lock))
            record = dataclasses.replace(record, seconds=record.seconds + time.monotonic() - began)
            record = self._records[name] = self._result(run, record, code, stopped, offset)
            folder.write(record)
        if record.state == FINISHED:
            self._log_finished(record)
        elif record.state == FAILED:
            self._log(f"{name} failed: {record.why}")
        else:
            self._log(f"{name} stopped; its checkpoint is saved.")
        return True

    def _wait_for(self, process: Process) -> tuple[int, bool]:
        """Returns (exit code, whether the process was asked to stop)."""
        asked = False
        while (code := process.poll()) is None:
            if not asked and self._stop.requested():
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(_POLL / 10)
        return code, asked

    def _result(self, run: Run, record: Record, code: int, stopped: bool, offset: int) -> Record:
        """Returns the record of a run whose process has exited."""
        why = ""
        try:
            values = self._read(run, self._folder)
        except UserError as error:
            why = str(error)
        else:
            if values is not None and code == 0:
                finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
                return dataclasses.replace(record, state=FINISHED, values=finite)
            if stopped:
                return record
        why = why or explain(code, _tail(self._folder.file(run.id, ".log"), offset))
        return dataclasses.replace(record, state=FAILED, why=why, failures=record.failures + 1)

    def _wait(self, pending: Sequence[str]) -> None:
        text = ", ".join(f"{name} ({self._folder.holder(name)})" for name in pending)
        if text != self._waiting:
            self._log(f"Waiting for other workers: {text}")
            self._waiting = text
        time.sleep(_POLL)

    def _log_finished(self, record: Record) -> None:
        """Logs metrics, and the remaining time if this worker were alone."""
        left = [run for name, run in self._runs.items() if not self._is(name, FINISHED)]
        finite = {name: value for name, value in record.values.items() if value is not None}
        shown = [name for name in self._metrics if name in finite] or list(finite)[:_SHOWN]
        parts = [f"{record.run} finished in {format_seconds(record.seconds)}"]
        parts += [f"{name} {finite[name]:.4g}" for name in shown]
        parts.append(f"{self._count()} of {len(self._runs)} finished")
        if left:
            parts.append(f"{format_seconds(self._remaining(left))} left for one worker")
        self._log("  ".join(parts))

    def _remaining(self, left: Sequence[Run]) -> float:
        """Seconds of the runs in `left`: the mean of finished runs of the same stage."""
        took: dict[str, list[float]] = collections.defaultdict(list)
        for name, record in self._records.items():
            if self._is(name, FINISHED):
                took[self._runs[name].stage].append(record.seconds)
        mean = statistics.fmean(seconds for found in took.values() for seconds in found)
        return sum(statistics.fmean(took.get(run.stage, [mean])) for run in left)


def explain(code: int, printed: str) -> str:
    """Returns the reason why a process failed.

    Args:
      code: exit code; -N for signal N.
      printed: the end of its output.
    """
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        memory = ", probably out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{memory}."
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return f"exit code {code}: {lines[-1][:300] if lines else 'no output'}"


def _tail(path: pathlib.Path, start: int) -> str:
    """Returns a log from byte `start` on, at most 64 KiB."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 65_536))
        return file.read().decode("utf-8", errors="replace")
