"""What a section says as it goes: lines of JSON in a file, the same readably on stdout."""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

LONGEST = 400  # characters of an error


class Session:
    """One section, or a part of it, in a process of its own.

    Each line of the file is an object with `section`, `kind` and `name`; of the kind

      figures: what was measured, the rest of its keys;
      error: `error` says why there is nothing;
      plan: `cases` are the names that are to follow;
      left_out: a case of the plan that did not come, and why: `error`.

    Args:
      part: of the section.
      until: `time.time()` after which no further case begins.
    """

    def __init__(self, section: str, path: str, until: float, part: str = ""):
        self.section, self.part = section, part
        self._path = path
        self._until = until

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While something is compiled or compared: other parts may do so as well."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """`together`, for three fifths of the time at most: those who are through wait to be timed.
        What compiles longer ends this process.
        """

        def give_up():
            self.write("error", self.part or self.section, error="it compiled for too long")
            os._exit(1)

        watch = threading.Timer(0.6 * (self._until - time.time()), give_up)
        watch.daemon = True
        watch.start()
        try:
            with self.together():
                yield
        finally:
            watch.cancel()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While something is timed: no other part compiles or runs anything."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with open(self._path, "rb") as file:  # which every part has; a lock ends with its process
            fcntl.flock(file, how)
            yield

    def plan(self, names: Iterable[str]) -> None:
        """What is to follow; whoever started this process says which of it did not come."""
        self.write("plan", self.part, cases=list(names))

    def has_time(self) -> bool:
        return time.time() < self._until

    def run(self, name: str, measure: Callable[[], dict]) -> None:
        """Writes what `measure` returns, or its error; nothing at all when the time is over."""
        if not self.has_time():
            return
        print(f"... {self.section}: {name}", file=sys.stderr, flush=True)
        try:
            self.write("figures", name, **measure())
        except Exception as error:
            self.write("error", name, error=sentence(error))

    def prepare(
        self, cases: dict[str, Callable[[], Callable]], count: int | None = None
    ) -> dict[str, Callable]:
        """What each case makes, ready to be timed; errors are written, and none begins too late.

        Args:
          count: of those that are made at the same time; None: as many as the cores can.
        """

        def make(name):
            if not self.has_time():
                return None
            print(f"... {self.section}: {name}", file=sys.stderr, flush=True)
            try:
                return cases[name]()
            except Exception as error:
                self.write("error", name, error=sentence(error))
                return None

        with concurrent.futures.ThreadPoolExecutor(count or at_once()) as pool:
            made = dict(zip(cases, pool.map(make, cases), strict=True))
        return {name: run for name, run in made.items() if run}

    def write(self, kind: str, name: str, **more) -> None:
        line = {"section": self.section, "kind": kind, "name": name, **more}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if kind != "plan":
            print(readable(line), flush=True)


def at_once() -> int:
    """How many programs are compiled at the same time; each compiler has threads of its own."""
    return max(1, (os.cpu_count() or 1) // 2)


def readable(line: dict) -> str:
    """A line of the table."""
    figures = {k: v for k, v in line.items() if k not in ("section", "kind", "name")}
    if line["kind"] in ("error", "left_out"):
        said = f"{line['kind'].replace('_', ' ')}: {figures.pop('error')}"
        return f"{line['section']:10} {line['name']:58} {said}"
    shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    return f"{line['section']:10} {line['name']:58} {'  '.join(shown)}"


def sentence(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:LONGEST]


def missing_cases(path: str, start: int, part: str = "") -> Sequence[str]:
    """The planned cases of a part, of the lines behind the byte `start`, that have no line."""
    planned, there = [], set()
    with open(path, "rb") as file:
        file.seek(start)
        for text in file:
            line = json.loads(text)
            if line["kind"] != "plan":
                there.add(line["name"])
            elif line["name"] == part:
                planned += line["cases"]
    return [name for name in planned if name not in there]
