"""Stopping when asked: SIGTERM (schedulers), SIGINT (Ctrl-C), notice that a machine goes."""

import signal
import threading

from absl import logging

from convbert_jax import interrupts
from convbert_jax.training.environment import exchange, preemption
from convbert_jax.training.environment.agreement import Agreement

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context in which the first signal asks for a stop; a second one is not saved for: SIGTERM
    ends the process at once, but for one that only echoes the first (`interrupts.ECHO`); Ctrl-C is
    KeyboardInterrupt, after which a notebook lives on.
    A notice of preemption asks as SIGTERM does, and the SIGTERM that follows it is a first one.
    """

    def __init__(self):
        self._received: str | None = None
        self._previous = {}
        self._agreement = Agreement() if exchange.place()[1] > 1 else None
        self._said = False
        self._over = threading.Event()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        else:
            logging.warning("Not in the main thread: signals will not stop this run cleanly.")
        if self._agreement:
            self._agreement.__enter__()
        preemption.listen(self._notice, self._over)
        return self

    def __exit__(self, *exception):
        self._over.set()
        self._put_back()
        if self._agreement:
            if exception[0] is None:
                self._say()
            self._agreement.__exit__(*exception)

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number).name
        self._put_back()
        interrupts.is_first(number)

        def end(second, frame):
            if interrupts.is_first(second):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)

    def _notice(self, what: str):
        logging.info("Compute Engine takes this machine away (%s): stopping.", what)
        self._received = self._received or signal.SIGTERM.name

    def _put_back(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self, done: int = 0) -> str | None:
        """Name of the signal if the run should stop before its next step, else None.

        With several processes a signal to any of them counts for all, which stop after the same
        step, a second or so later.

        Args:
          done: steps so far, which all processes count alike; each asks after every step.
        """
        if self._agreement is None:
            return self._received
        self._say()
        return self._agreement.heard(done)

    def _say(self) -> None:
        if self._received and not self._said:
            self._said = True
            self._agreement.say(self._received)
