"""Runs jobs within a fixed time in separate processes and records their results at once."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

LEAST = 15.0  # seconds; a job with less time before its grace is skipped
POLL = 0.2
SHOWN = 300  # characters shown from a failed job's log
ARCHIVES, ARCHIVE_BYTES = 8, 15_000_000


@dataclasses.dataclass(frozen=True)
class Job:
    """A process with a time limit.

    Attributes:
      name: name in the results and of the log.
      seconds: time limit.
      reserve: seconds that must remain for later jobs when it ends.
      background: whether the next jobs start while it runs.
      alone: whether it waits for all background jobs.
      grace: seconds between SIGTERM and the time limit, at which it is killed.
    """

    name: str
    command: Sequence[str]
    seconds: float
    reserve: float = 0.0
    background: bool = False
    alone: bool = False
    grace: float = 0.0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Results:
    """JSON lines {"job", "kind", ...}; the kind of a job's last line is "end"."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._path = folder / "results.jsonl"

    def write(self, job: str, kind: str, **fields) -> None:
        line = json.dumps({"job": job, "kind": kind, **fields})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line[:SHOWN], flush=True)

    def read(self) -> Iterator[dict]:
        """Yields all lines; skips a line truncated by a kill."""
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)

    def done(self) -> set[str]:
        """Returns the jobs that ended without an error."""
        return {line["job"] for line in self.read() if line.get("status") == "done"}

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Holds a lock so that only one process measures times."""
        with open(self.folder / "timing.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Process:
    """A started job; `run` uses only these methods."""

    def __init__(self, job: Job, folder: pathlib.Path):
        self._log = folder / "logs" / f"{job.name.replace(' ', '_')}.log"
        self._log.parent.mkdir(exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | job.environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-SHOWN:]


@dataclasses.dataclass
class _Running:
    job: Job
    process: Process
    started: float
    deadline: float
    status: str = ""  # reason why it was stopped


def run(
    jobs: Sequence[Job],
    results: Results,
    end: float,
    *,
    start: Callable[[Job, pathlib.Path], Process] = Process,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Runs the jobs in order; skips jobs that an earlier call finished.

    Args:
      end: time by `clock` at which all jobs have ended.
      after_each: called after each job.
    """
    done, running = results.done(), []

    def supervise(until_ended):
        while any(one in running for one in until_ended):
            for one in list(running):
                _stop_late(one, clock())
                if (code := one.process.poll()) is not None:
                    running.remove(one)
                    _record(one, code, clock(), results)
                    after_each()
            sleep(POLL)

    try:
        for job in jobs:
            if job.name in done:
                continue
            if job.alone:
                supervise(list(running))
            left = end - clock() - job.reserve
            if left < LEAST + job.grace:
                results.write(job.name, "end", status="skipped", left=left)
                continue
            now = clock()
            running.append(
                _Running(job, start(job, results.folder), now, now + min(job.seconds, left))
            )
            if not job.background:
                supervise(running[-1:])
        supervise(list(running))
    finally:
        for one in running:
            one.process.send(signal.SIGKILL)


def _stop_late(one: _Running, now: float) -> None:
    if now >= one.deadline and one.status != "killed":
        one.status = "killed"
        one.process.send(signal.SIGKILL)
    elif one.job.grace and now >= one.deadline - one.job.grace and not one.status:
        one.status = "stopped"
        one.process.send(signal.SIGTERM)


def _record(one: _Running, code: int, now: float, results: Results) -> None:
    status = one.status or ("failed" if code else "done")
    fields = {} if status in ("done", "stopped") else {"code": code, "log": one.process.tail()}
    results.write(one.job.name, "end", status=status, seconds=round(now - one.started, 1), **fields)


def pack(folder: pathlib.Path, large: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Packs the results into FOLDER/archives: at most ARCHIVES files of ARCHIVE_BYTES.

    results.tar.gz has the results and the ends of all logs. The files and folders `large` become
    large.tar.gz.0, .1, …, to be joined by `cat`; they are left out if too large.
    """
    archives = folder / "archives"
    archives.mkdir(exist_ok=True)
    for old in archives.iterdir():
        old.unlink()

    def bound(member):
        """Excludes large files, such as the log of a job that repeats a warning."""
        return member if member.size < ARCHIVE_BYTES // 3 else None

    first = archives / "results.tar.gz"
    with tarfile.open(first, "w:gz") as tar:
        patterns = ("*.json*", "*/*.json*", "*/*.html", "logs/*", "profiles/**/*.xplane.pb")
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            tar.add(path, path.relative_to(folder), filter=bound)
    whole = archives / "large.tar.gz"
    with tarfile.open(whole, "w:gz", compresslevel=1) as tar:
        for path in large:
            tar.add(path, path.relative_to(folder))
    parts = -(-whole.stat().st_size // ARCHIVE_BYTES)
    if large and parts < ARCHIVES:
        with open(whole, "rb") as file:
            for part in range(parts):
                (archives / f"{whole.name}.{part}").write_bytes(file.read(ARCHIVE_BYTES))
    elif large:
        print(f"{whole.stat().st_size} bytes of weights exceed the limit; not packed.", flush=True)
    whole.unlink()
    return sorted(archives.iterdir())
