"""Threads play processes that may be some steps apart and wait for each other's steps."""

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.training.environment import agreement, exchange


class Board:
    """The coordination service, for threads."""

    def __init__(self):
        self._texts, self._lock = {}, threading.Lock()
        self.me = threading.local()

    def post(self, key, text):
        with self._lock:
            assert key not in self._texts
            self._texts[key] = text

    def posted(self, folder):
        with self._lock:
            found = {k: v for k, v in self._texts.items() if k.startswith(folder + "/")}
        return {key.rpartition("/")[2]: text for key, text in found.items()}


def play(count, steps, seed, words, ahead=2, slow=None):
    """(step after which each process stopped, what it heard).

    Args:
      words: (process, step) of who asks.
      ahead: steps that a process may begin before the others have.
      slow: a process that takes long.
    """
    board, begun, moved = Board(), [0] * count, threading.Condition()
    ends = [None] * count

    def run(index):
        board.me.place = index, count
        random = np.random.default_rng((seed, index))
        with agreement.Agreement() as agreed:
            for step in range(1, steps + 1):
                with moved:
                    begun[index] = step
                    moved.notify_all()
                    assert moved.wait_for(lambda step=step: min(begun) >= step - ahead, timeout=20)
                time.sleep(0.1 if index == slow else random.uniform(0, 0.004))
                if (index, step) in words:
                    agreed.say(f"of {index}")
                if word := agreed.heard(step):
                    ends[index] = step, word
                    return
            ends[index] = steps, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "post", board.post)
        patch.setattr(exchange, "posted", board.posted)
        patch.setattr(exchange, "place", lambda: board.me.place)
        patch.setattr(agreement, "_contexts", itertools.repeat(0))
        patch.setattr(agreement, "_followed", 0)
        patch.setattr(agreement, "_PAUSE", 0.01)
        patch.setattr(agreement, "_SOON", 0.001)
        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    return ends


@settings(max_examples=30)
@given(
    count=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    first=st.integers(1, 40),
    sayers=st.sets(st.integers(0, 1), min_size=1),
)
def test_all_stop_after_the_same_step_or_none_does(count, seed, first, sayers):
    """Also where the word comes near the end, when some have begun their last step."""
    ends = play(count, 40, seed, {(index, first) for index in sayers})
    (step,) = {step for step, _ in ends}
    assert first <= step <= 40
    heard = {word for _, word in ends}
    assert heard == {None} or None not in heard
    assert heard <= {None, *(f"of {index}" for index in sayers)}


def test_a_word_is_heard_long_before_the_end():
    ends = play(3, 3_000, 0, {(1, 2)})
    assert ends[0][0] < 1_500
    assert ends == [(ends[0][0], "of 1")] * 3


def test_who_has_left_keeps_nobody_waiting():
    assert play(2, 5, 0, {(1, 2)}, ahead=9, slow=1) == [(5, None)] * 2


def test_without_a_word_nobody_stops():
    assert play(3, 20, 0, set()) == [(20, None)] * 3
