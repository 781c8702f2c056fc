"""Stopping when asked: SIGTERM (preemption, schedulers) and SIGINT (Ctrl-C)."""

import signal
import threading

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context in which the first signal asks for a stop; a second one does what it did before, at
    once: SIGTERM ends the process, Ctrl-C is KeyboardInterrupt, after which a notebook lives on.
    """

    def __init__(self):
        self._received: str | None = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        else:
            logging.warning("Not in the main thread: signals will not stop this run cleanly.")
        return self

    def __exit__(self, *exception):
        self._put_back()

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number).name
        self._put_back()

    def _put_back(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self, *, agree: bool) -> str | None:
        """Name of the signal if the run should stop before its next step, else None.

        Every process must stop at the same step. With several, a signal to any of them counts, and
        they ask each other only where `agree` is True, as that makes all wait.
        """
        if jax.process_count() == 1:
            return self._received
        if not agree:
            return None
        code = signal.Signals[self._received].value if self._received else 0
        codes = multihost_utils.process_allgather(np.int32(code))
        return signal.Signals(int(codes.max())).name if codes.any() else None
