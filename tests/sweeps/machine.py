"""Cells that take no time, for tests of who does what."""

import time

from convbert_jax.sweeps import runner
from convbert_jax.sweeps.folder import Folder


class Machine:
    """Cells that take no time: what was started, and how each of them ends."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.started: list[str] = []
        self.ends: dict[str, str] = {}  # cell -> what it prints before it fails
        self.seconds = 0.0
        self.finished: set[str] = set()

    def start(self, cell, folder, lock):
        assert lock.fileno()
        self.started.append(cell.id)
        end = time.monotonic() + self.seconds
        why = self.ends.get(cell.id)
        if why:
            folder.log(cell.id).open("a").write(f"a line\n{why}\n")
        else:
            self.finished.add(cell.id)

        class Process:
            def poll(self):
                return None if time.monotonic() < end else (1 if why else 0)

            def send_signal(self, number):
                raise AssertionError("nobody asked for a stop")

        return Process()

    def read(self, cell, folder):
        return self.values(cell) if cell.id in self.finished else None

    def values(self, cell):
        return {"loss": 1.5, "odd": float("nan")}

    def run(self, cells, told=None, **options):
        told = [] if told is None else told
        return runner.run(
            cells, self.folder, tell=told.append, start=self.start, read=self.read, **options
        )
