"""Step timing, program age and profiler traces."""

import contextlib
import logging as python_logging
import time
from collections.abc import Iterator

import jax
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import TrainSection


class Clock:
    """Timer of steps that excludes evaluation, checkpoints and compilation."""

    def __init__(self):
        self.running = False
        self._begin, self._step = time.perf_counter(), 0

    def start(self, step: int) -> None:
        self.running = True
        self._begin, self._step = time.perf_counter(), step

    def lap(self, step: int) -> float | None:
        """Returns the seconds per step since the last lap, or None without steps since then."""
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
        """Excludes the step in this context from the time and the number of steps."""
        with self.paused():
            yield
        self._step += 1


class Profiler:
    """Profiler trace of config.train.profile_steps steps from profile_start on, in `folder`."""

    def __init__(self, folder: epath.Path, section: TrainSection, step: int):
        """
        Args:
          step: last completed step. Logs a warning if this run does not reach the first traced
            step and no trace exists.
        """
        first = section.profile_start
        self._written = contextlib.ExitStack()
        self._folder, self._first, self._last = folder, first, first + section.profile_steps - 1
        self._running = False
        if first and not step < first <= section.steps and not folder.exists():
            logging.warning(
                "config.train.profile_start=%d is not among the remaining steps %d to %d; no trace "
                "will be written.",
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
            place = self._written.enter_context(storage.written_locally(self._folder))
            jax.profiler.start_trace(place)
            self._running = True

    def after(self, step: int, result) -> None:
        """Stops the trace after its last step; waits for `result`, so the step is complete."""
        if self._running and step == self._last:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            self._written.close()
            logging.info("Wrote the profile from step %d on to %s.", self._first, self._folder)


def seconds_since_start() -> float:
    """Returns the age of this program, measured since the import of Python's logging.

    The age of the process can be larger: a launch script may install packages before its `exec`.
    """
    return python_logging.makeLogRecord({}).relativeCreated / 1e3


def format_seconds(seconds: float) -> str:
    """Formats a duration as `45 s`, `12 min`, `3 h 20 min` or `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
