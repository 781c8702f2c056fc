"""Signals while the main thread is inside of a function that knows none, as a compiler is."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from convbert_jax import interrupts
from tests.launch.hearing import hear

# Minutes of hashing, in C, without a look at what Python has to do; and a handler as training has.
INSIDE = """
import hashlib, signal, threading
from convbert_jax import console, interrupts
console.set_up_logging()
with interrupts.heard(told=0.3, patience=0.5):
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(0.5, print, ("up",), {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
FREE = INSIDE.replace("    hashlib", "    with interrupts.nothing_to_save():\n        hashlib")
# A signal before there is nothing to save, of which only then something is made.
LATE = """
import signal, time
from convbert_jax import console, interrupts
console.set_up_logging()
with interrupts.heard(told=0.1, patience=0.5):
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    print("up", flush=True)
    time.sleep(3)
    with interrupts.nothing_to_save():
        time.sleep(100)
"""
QUICK = """
import time
from convbert_jax import interrupts
with interrupts.heard(told=60, patience=60):
    try:
        print("up", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        print("saved", flush=True)
"""


def start(code: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear,
    )
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_hears_none(number):
    process = start(INSIDE)
    process.send_signal(number)
    line = process.stderr.readline()
    assert f"{number.name} is heard. What runs now ends first" in line
    assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert said.endswith(f"Ended by a second {number.name}.\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("program", [FREE, LATE])
def test_a_first_one_ends_what_has_nothing_to_save(program, number, code):
    process = start(program)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"Ended by {number.name}, and nothing is lost" in said


def test_having_nothing_to_save_ends():
    with interrupts.heard(told=0.1):
        with interrupts.nothing_to_save():
            pass
        interrupts._tell(signal.SIGTERM)  # would end the tests
    with interrupts.heard(), interrupts.nothing_to_save():  # what an earlier program heard is over
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_by_itself_is_left_alone(number):
    process = start(QUICK)
    process.send_signal(number)
    assert process.communicate(timeout=30) == ("saved\n", "")
    assert process.returncode == 0


def test_an_echo_behind_the_end_does_not_kill():
    """A launcher may pass a signal on when the program that heard it has ended but for its exit."""
    process = start(QUICK + "time.sleep(1)\nprint('through', flush=True)\ntime.sleep(1.5)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "through\n"
    assert process.wait(30) == 0


def test_a_later_one_behind_the_end_kills():
    process = start(QUICK + "time.sleep(100)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saved\n"
    time.sleep(interrupts.ECHO + 0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_what_was_there_before_comes_back():
    assert signal.set_wakeup_fd(-1) == -1
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.heard():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_than_the_main_one():
    found = []

    def run():
        with interrupts.heard():
            found.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_signal_of_an_earlier_block_ends_nothing():
    with interrupts.heard():
        interrupts._tell(signal.SIGTERM)  # as the thread does after `told` seconds
    with interrupts.nothing_to_save():
        pass


def delay(*numbers: int, fails: bool = False) -> list[str]:
    """What happens, in order, if these signals arrive in a `deferred` block."""
    found = []
    try:
        with interrupts.deferred():
            for number in numbers:
                try:
                    signal.raise_signal(number)
                except KeyboardInterrupt:  # as a library that swallows it
                    found.append("raised inside")
            if fails:
                raise ValueError
            found.append("end of the block")
    except BaseException as error:
        found.append(type(error).__name__)
    return found


def test_a_delayed_signal_reaches_its_handler_at_the_end():
    assert delay() == ["end of the block"]
    assert delay(signal.SIGINT) == ["end of the block", "KeyboardInterrupt"]
    assert delay(signal.SIGINT, fails=True) == ["KeyboardInterrupt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_repeated_sigterm_is_delayed_as_well():
    """A launcher may pass on the one that the process got already."""
    with interrupts.heard():
        assert delay(signal.SIGTERM, signal.SIGTERM) == ["end of the block", "Stopped"]


def test_a_second_ctrl_c_is_not_delayed():
    expected = ["raised inside", "end of the block", "KeyboardInterrupt"]
    assert delay(signal.SIGINT, signal.SIGINT) == expected


def test_signals_that_no_handler_answers_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts.deferred():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# An interrupt in a callback of the garbage collector, as while a vocabulary is trained: Python
# prints its traceback, drops it and goes on.
DROPPED = """
import gc, time
from convbert_jax import console, interrupts
console.set_up_logging()

def callback(phase, info):
    print("up", flush=True) if phase == "start" else None
    time.sleep(100)

with interrupts.heard(told=0.3), interrupts.nothing_to_save():
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(100)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_interrupt_that_python_drops_prints_no_traceback(number, code):
    process = start(DROPPED)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    (line,) = said.splitlines()
    assert number.name in line


def test_other_faults_that_python_drops_are_shown(monkeypatch):
    class Broken:
        def __del__(self):
            raise ValueError

    seen = []
    hook = lambda unraisable: seen.append(unraisable.exc_type)  # noqa: E731
    monkeypatch.setattr(sys, "unraisablehook", hook)
    with interrupts.heard():
        Broken()
    assert seen == [ValueError]
    assert sys.unraisablehook is hook
