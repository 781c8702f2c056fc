"""Ends a run on SIGTERM, SIGINT, preemption notices of Compute Engine, and hangs."""

import contextlib
import http.client
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from convbert_jax import interrupts
from convbert_jax.machine import find_accelerators
from convbert_jax.training import distributed, environment

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_METADATA_HOST = "GCE_METADATA_HOST"  # as Google's own libraries read it
# Key of the metadata server -> its value before the machine is taken away.
_NOTICES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}

_POLL = 60  # seconds that the server holds a request without news
_RETRY = 10.0  # seconds after a failed request


class StopSignals:
    """Context in which the first signal or preemption notice requests a stop.

    A second SIGTERM ends the process at once, unless it is an echo of the first
    (`interrupts.ECHO`); a second Ctrl-C raises KeyboardInterrupt, so that a notebook survives. A
    SIGTERM after a preemption notice counts as the first one.

    Notices are read if this machine has a TPU or GCE_METADATA_HOST names a server.
    """

    def __init__(self):
        self._received: str | None = None
        self._previous = {}
        several = distributed.place()[1] > 1
        self._agreement = distributed.StopAgreement() if several else None
        self._requested = False
        self._over = threading.Event()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        else:
            logging.warning("Not in the main thread: the run cannot stop cleanly on signals.")
        if self._agreement:
            self._agreement.__enter__()
        if os.environ.get(_METADATA_HOST) or find_accelerators().chips:
            for key in _NOTICES:
                threading.Thread(
                    target=self._read_notices, args=(key,), daemon=True, name=f"notice {key}"
                ).start()
        return self

    def __exit__(self, *exception):
        self._over.set()
        self._restore_handlers()
        if self._agreement:
            if exception[0] is None:
                self._request()
            self._agreement.__exit__(*exception)

    def requested(self, done: int = 0) -> str | None:
        """Returns the signal's name if the run stops before its next step, otherwise None.

        With several processes, a signal to any of them stops all of them after the same step.

        Args:
          done: steps so far, the same count on all processes; each calls this after every step.
        """
        if self._agreement is None:
            return self._received
        self._request()
        return self._agreement.stops_after(done)

    def _request(self) -> None:
        if self._received and not self._requested:
            self._requested = True
            self._agreement.request(self._received)

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number).name
        self._restore_handlers()
        interrupts.is_first(number)

        def end(second, frame):
            if interrupts.is_first(second):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)

    def _restore_handlers(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _notice(self, what: str):
        logging.info("Compute Engine is reclaiming this machine (%s): stopping.", what)
        self._received = self._received or signal.SIGTERM.name

    def _read_notices(self, key: str) -> None:
        host = os.environ.get(_METADATA_HOST) or "metadata.google.internal"
        address = f"http://{host}/computeMetadata/v1/instance/{key}?wait_for_change=true"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        etag = "0"  # answered at once with the current value
        while not self._over.is_set():
            request = urllib.request.Request(
                f"{address}&timeout_sec={_POLL}&last_etag={etag}",
                headers={"Metadata-Flavor": "Google"},
            )
            try:
                with opener.open(request, timeout=2 * _POLL) as answer:
                    value = answer.read().decode(errors="replace").strip()
                    etag = answer.headers.get("ETag", "0")
            except (OSError, http.client.HTTPException):
                self._over.wait(_RETRY)
                continue
            if value == _NOTICES[key] and not self._over.is_set():
                self._notice(f"{key}={value}")
                return
            if etag == "0":  # a server without change tags answers at once
                self._over.wait(_RETRY)


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
            with environment.compiling(what):
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

    def forget(self) -> None:
        """Prepares for another program: its first call compiles."""
        self._compiled.clear()

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
