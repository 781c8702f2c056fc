"""Ends a run that hangs, as one whose devices or network do not answer any more."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from convbert_jax.training.environment import compilation, peers

_FIRST = 3_600.0  # seconds, at the least, for restoring, compiling and the first step


class Watchdog:
    """Wants to hear a `beat` every so often, and the first one within an hour at the latest; so
    within `patient`.
    """

    def __init__(self, seconds: float):
        """
        Args:
          seconds: `config.train.hang_seconds`; 0: it never bites.
        """
        self._seconds = seconds
        self._last = 0.0
        self._limit = max(seconds, _FIRST)
        self._patient = False
        self._compiled: set[tuple] = set()  # shapes of batches

    def beat(self) -> None:
        """Says that the run goes on."""
        self._last, self._limit = time.monotonic(), self._seconds

    @contextlib.contextmanager
    def patient(self, what: str) -> Iterator[None]:
        """Context in which something is compiled: silence may last as long as at the beginning, and
        `what` is logged with the seconds so far.
        """
        self._patient = True
        try:
            with compilation.compiling(what):
                yield
        finally:
            self.beat()
            self._patient = False

    def call(
        self, program: Callable, *arguments: Any, batch: Any, what: str = "the training step"
    ) -> Any:
        """What `program(*arguments)` gives. The first `batch` of its shapes among them compiles it:
        that call is waited for, also until the other processes have compiled theirs.
        """
        if not self.compiles(batch):
            return program(*arguments)
        with self.patient(f"Compiling {what}"):
            outputs = jax.block_until_ready(program(*arguments))
        self._compiled.add(_shapes_of(batch))
        return outputs

    def compiles(self, batch: Any) -> bool:
        """Whether the next `call` with this batch is the first one of its shapes."""
        return _shapes_of(batch) not in self._compiled

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which silence ends the process with `peers.EXIT_CODE`, on which launchers
        start again, with the stacks of all threads on standard error, and all other processes,
        with theirs.
        """
        if not self._seconds:
            yield
            return
        self._last = time.monotonic()
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), daemon=True, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(min(10.0, self._seconds / 4)):
            limit = max(self._seconds, _FIRST) if self._patient else self._limit
            if time.monotonic() - self._last > limit:
                logging.error(
                    "Nothing has moved for %g s (config.train.hang_seconds=%g): a device, another "
                    "process or the storage does not answer. What every thread does is below; the "
                    "same command goes on from the last checkpoint.",
                    limit,
                    self._seconds,
                )
                logging.flush()
                peers.end_of_a_hang()


def _shapes_of(batch: Any) -> tuple:
    return tuple(x.shape for x in jax.tree.leaves(batch))
