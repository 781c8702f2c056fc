"""Simulated runs that start no process."""

import threading
import time

from convbert_jax.sweeps import runner
from convbert_jax.sweeps.table import Folder


class FakeRuns:
    """Simulates the execution of sweep runs.

    Attributes:
      started: ids of started runs, in order.
      errors: run id -> output of its failure.
      seconds: duration of a run.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self.started: list[str] = []
        self.errors: dict[str, str] = {}
        self.seconds = 0.0
        self.finished: set[str] = set()

    def start(self, run, folder, lock):
        assert lock.fileno()
        self.started.append(run.id)
        end = time.monotonic() + self.seconds
        error = self.errors.get(run.id)
        if error:
            folder.file(run.id, ".log").open("a").write(f"a line\n{error}\n")
        else:
            self.finished.add(run.id)

        class Process:
            def poll(self):
                return None if time.monotonic() < end else (1 if error else 0)

        return Process()

    def read(self, run, folder):
        return self.values(run) if run.id in self.finished else None

    def values(self, run):
        return {"loss": 1.5, "odd": float("nan")}

    def work(self, runs, lines=None, **options):
        lines = [] if lines is None else lines
        options = {"start": self.start, "read": self.read, **options}
        return runner.work(runs, self.folder, log=lines.append, **options)


def in_threads(count, function) -> list:
    """Calls a function in several threads at once; returns the results."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(function())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results
