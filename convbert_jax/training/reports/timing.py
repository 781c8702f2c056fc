"""Where the time goes: seconds per step, age of the process, traces of the profiler."""

import contextlib
import logging as python_logging
import time
from collections.abc import Iterator

import jax
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import TrainSection


class Clock:
    """Seconds per step; evaluations, checkpoints and steps that are compiled are not counted."""

    def __init__(self):
        self.running = False
        self._begin, self._step = time.perf_counter(), 0

    def start(self, step: int) -> None:
        self.running = True
        self._begin, self._step = time.perf_counter(), step

    def lap(self, step: int) -> float | None:
        """Seconds per step since the last lap; None without steps in between."""
        now, steps = time.perf_counter(), step - self._step
        seconds = (now - self._begin) / steps if steps else None
        self._begin, self._step = now, step
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of a step that does not count: neither its time nor itself."""
        with self.paused():
            yield
        self._step += 1


class Profiler:
    """A trace of config.train.profile_steps steps from profile_start on, in `folder`."""

    def __init__(self, folder: epath.Path, section: TrainSection, step: int):
        """
        Args:
          step: the last one that is done; where none of those to come is the first of the trace,
            and no start before wrote one, a warning says so.
        """
        first = section.profile_start
        self._written = contextlib.ExitStack()
        self._folder, self._first, self._last = folder, first, first + section.profile_steps - 1
        self._running = False
        if first and not step < first <= section.steps and not folder.exists():
            logging.warning(
                "config.train.profile_start=%d: this start takes the steps %d to %d, so there is "
                "no trace.",
                first,
                step + 1,
                section.steps,
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stop()

    def before(self, step: int) -> None:
        if self._first and step == self._first:
            place = self._written.enter_context(files.written_locally(self._folder))
            jax.profiler.start_trace(place)
            self._running = True

    def after(self, step: int, result) -> None:
        """Waits for `result` where the trace ends, so that it holds the whole last step."""
        if self._running and step == self._last:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            self._written.close()
            logging.info("Profile from step %d on is in %s.", self._first, self._folder)


def seconds_since_start() -> float:
    """Age of this program, counted from where Python's logging was loaded, among the first modules.

    The age of the process is something else: a launch script becomes the program by `exec`, and
    what it installed before would count.
    """
    return python_logging.makeLogRecord({}).relativeCreated / 1e3


def format_seconds(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min` or `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
