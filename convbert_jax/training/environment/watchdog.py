"""Ends a run that hangs because devices, network or storage do not respond."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from convbert_jax.training import distributed
from convbert_jax.training.environment import compilation

_FIRST = 3_600.0  # seconds, at least, for restoring, compiling and the first step


class Watchdog:
    """Timer that ends a run without a `beat` for `seconds` (`config.train.hang_seconds`; 0: never).

    The limit is at least an hour before the first beat and within `patient`.
    `faulthandler.dump_traceback_later` exits with code 1, but launchers restart only on 75.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._last = 0.0
        self._limit = max(seconds, _FIRST)
        self._patient = False
        self._compiled: set[tuple] = set()  # shapes of batches

    def beat(self) -> None:
        """Reports progress."""
        self._last, self._limit = time.monotonic(), self._seconds

    @contextlib.contextmanager
    def patient(self, what: str) -> Iterator[None]:
        """Allows an hour for a block that compiles, and logs `what` with the seconds so far."""
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
        """Returns `program(*arguments)`.

        The first call with the shapes of `batch` compiles: it may take an hour, and blocks.
        """
        if not self.compiles(batch):
            return program(*arguments)
        with self.patient(f"Compiling {what}"):
            outputs = jax.block_until_ready(program(*arguments))
        self._compiled.add(_shapes_of(batch))
        return outputs

    def compiles(self, batch: Any) -> bool:
        """Returns whether the next `call` with this batch is the first one of its shapes."""
        return _shapes_of(batch) not in self._compiled

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Ends all processes with `distributed.EXIT_CODE` if a beat is missing within the block.

        Launchers restart on this code. Stack traces of all threads are printed to standard error.
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
                    "No progress for %g s (config.train.hang_seconds=%g): a device, another "
                    "process or the storage does not respond. Stack traces of all threads follow. "
                    "The same command continues from the last checkpoint.",
                    limit,
                    self._seconds,
                )
                logging.flush()
                distributed.exit_after_hang()


def _shapes_of(batch: Any) -> tuple:
    return tuple(x.shape for x in jax.tree.leaves(batch))
