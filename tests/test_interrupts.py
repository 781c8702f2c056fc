"""Signals while the main thread runs C code, such as a compiler, that handles no signals."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from convbert_jax import interrupts
from tests.launch.hearing import hear

BEGIN = """
import gc, hashlib, signal, threading, time
from convbert_jax import console, interrupts
console.set_up_logging()
"""
# Hashing in C for minutes, with the signal handler of training.
INSIDE = f"""{BEGIN}
with interrupts.handled(report_after=0.3, exit_after=0.5):
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(0.5, print, ("up",), {{"flush": True}}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
FREE = INSIDE.replace("    hashlib", "    with interrupts.nothing_to_save():\n        hashlib")
# A signal before there is state to save.
LATE = f"""{BEGIN}
with interrupts.handled(report_after=0.1, exit_after=0.5):
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    print("up", flush=True)
    time.sleep(2)
    with interrupts.nothing_to_save():
        time.sleep(100)
"""
# An interrupt in a garbage-collector callback: Python prints its traceback and drops it.
DROPPED = f"""{BEGIN}
def callback(phase, info):
    print("up", flush=True) if phase == "start" else None
    time.sleep(100)

with interrupts.handled(report_after=0.3), interrupts.nothing_to_save():
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(100)
"""
QUICK = f"""{BEGIN}
with interrupts.handled(report_after=60, exit_after=60):
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
def test_a_second_signal_ends_a_function_that_handles_none(number):
    process = start(INSIDE)
    process.send_signal(number)
    assert number.name in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(number)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    (line,) = log.splitlines()
    assert number.name in line


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (FREE, signal.SIGINT, 130),
        (LATE, signal.SIGTERM, 75),
        (DROPPED, signal.SIGINT, 130),
        (DROPPED, signal.SIGTERM, 75),
    ],
    ids=["in C, SIGINT", "before, SIGTERM", "dropped, SIGINT", "dropped, SIGTERM"],
)
def test_a_first_signal_ends_a_program_that_has_nothing_to_save(program, number, code):
    process = start(program)
    process.send_signal(number)
    _, log = process.communicate(timeout=30)
    assert process.returncode == code
    assert all(number.name in line for line in log.splitlines()), log  # no traceback
    assert log


def test_a_program_that_ends_by_itself_is_left_alone():
    process = start(QUICK)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("saved\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "code"), [(0.0, 0), (interrupts.ECHO + 0.1, -signal.SIGTERM)], ids=["echo", "later"]
)
def test_an_echo_of_sigterm_after_the_end_does_not_kill_and_a_later_one_does(seconds, code):
    """A launcher may forward a signal while the program is exiting."""
    process = start(QUICK + "time.sleep(4)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saved\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code


def test_handlers_and_state_are_restored():
    assert signal.set_wakeup_fd(-1) == -1
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.handled(report_after=0.1):
        assert signal.getsignal(signal.SIGTERM) != before
        with interrupts.nothing_to_save():
            pass
        interrupts._report(signal.SIGTERM)  # called by the thread; would otherwise end the tests
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    with interrupts.nothing_to_save():  # signals of an earlier block do not count
        pass
    with interrupts.handled(), interrupts.nothing_to_save():
        pass


def test_other_threads_run_the_block():
    found = []

    def run():
        with interrupts.handled():
            found.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


RAISED, END = "raised inside", "end of the block"


@pytest.mark.parametrize(
    ("numbers", "fails", "expected"),
    [
        ((), False, [END]),
        ((signal.SIGINT,), False, [END, "KeyboardInterrupt"]),
        ((signal.SIGINT,), True, ["KeyboardInterrupt"]),
        # A launcher may forward a signal that the process has already received.
        ((signal.SIGTERM, signal.SIGTERM), False, [END, "Stopped"]),
        # A second Ctrl-C is not delayed.
        ((signal.SIGINT, signal.SIGINT), False, [RAISED, END, "KeyboardInterrupt"]),
    ],
)
def test_deferred_signals_reach_their_handler_at_the_end(numbers, fails, expected):
    found = []
    with interrupts.handled(report_after=1_000, exit_after=1_000):
        try:
            with interrupts.deferred():
                for number in numbers:
                    try:
                        signal.raise_signal(number)
                    except KeyboardInterrupt:  # like a library that swallows it
                        found.append(RAISED)
                if fails:
                    raise ValueError
                found.append(END)
        except BaseException as error:
            found.append(type(error).__name__)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert found == expected


def test_signals_without_a_handler_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts.deferred():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_errors_that_python_drops_are_shown(monkeypatch):
    class Broken:
        def __del__(self):
            raise ValueError

    seen = []
    hook = lambda unraisable: seen.append(unraisable.exc_type)  # noqa: E731
    monkeypatch.setattr(sys, "unraisablehook", hook)
    with interrupts.handled():
        Broken()
    assert seen == [ValueError]
    assert sys.unraisablehook is hook


def test_a_program_exits_without_waiting_for_abandoned_threads():
    for program, code, out, error in (
        ("print('done')", 0, "done\n", ""),
        ("sys.exit('reason')", 1, "", "reason"),
        ("sys.exit(75)", 75, "", ""),
        ("1 / 0", 1, "", "ZeroDivisionError"),
    ):
        source = f"""
import sys, threading
from convbert_jax import interrupts
with interrupts.exiting_despite_threads():
    threading.Thread(target=threading.Event().wait).start()
    interrupts.abandon_threads()
    {program}
"""
        end = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
        )
        assert (end.returncode, end.stdout) == (code, out)
        assert error in end.stderr
        assert bool(error) == bool(end.stderr)
