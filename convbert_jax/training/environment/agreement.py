"""Several processes stop after the same step, seconds after one of them is asked to.

To ask each other after every step would make all wait for the slowest, every time. So nothing is
said until one has a word to say, which a thread of each process looks for. Who hears it begins no
further step and tells the number of the last one that it has begun. All stop after the largest of
these numbers: who is behind goes on up to it, so nobody waits in a step that another never begins.
"""

import itertools
import threading

import jax

from convbert_jax.training.environment import exchange

_KEY = "convbert_jax/stop"
_PAUSE = 1.0  # seconds between two looks for a word
_SOON = 0.05  # between two looks for numbers, which come at once
_contexts = itertools.count()  # the same on all: they come to the same places in the same order
_followed = 0  # words that all have stopped for, likewise


class Agreement:
    """Context around steps that all processes take in the same order. A word that comes too late
    for one context is that of the next.
    """

    def __init__(self):
        self._index, self._count = exchange.place()
        self._context = next(_contexts)
        self._place = f"{_KEY}/{self._context}"
        self._begun = 0  # the step that the main thread has begun, or will without asking
        self._told = False  # that number is told; from now on it waits for the others' before more
        self._lock = threading.Lock()  # of both
        self._settled, self._over = threading.Event(), threading.Event()
        self._word, self._last = "", 0  # why, and after which step
        self._thread = threading.Thread(target=self._look, daemon=True, name="agreement")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._over.set()
        if exception[0] is None:  # else the first process may be gone, and would not answer
            self._thread.join()
            self._tell()  # the others may be about to ask

    def say(self, word: str) -> None:
        """Asks all processes to stop, at most once in a context; heard within seconds."""
        exchange.post(f"{_KEY}/words/{_followed}/{self._index}.{self._context}", word)

    def heard(self, done: int) -> str | None:
        """The word, if all processes stop now, after `done` steps; None if the next one begins."""
        global _followed
        with self._lock:
            if not self._told:
                self._begun = done + 1
                return None
        self._settled.wait()
        if done < self._last:
            return None
        _followed += 1
        return self._word

    def _look(self) -> None:
        try:
            while not (words := exchange.posted(f"{_KEY}/words/{_followed}")):
                if self._over.wait(_PAUSE):
                    return
            self._word = words[min(words)]
            self._tell()
            while len(numbers := exchange.posted(self._place)) < self._count:
                if self._over.wait(_SOON):
                    return
        except jax.errors.JaxRuntimeError:
            return  # the first process is gone, which peers.py tells
        self._last = max(map(int, numbers.values()))
        self._settled.set()

    def _tell(self) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        exchange.post(f"{self._place}/{self._index}", str(self._begun))
