"""Several processes of which one ends: the others say so in one sentence, soon, with one code."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from convbert_jax.training.environment import meeting, peers
from convbert_jax.training.environment.peers import EXIT_CODE

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
PATIENCE = 120  # seconds
# Arguments: port, processes, number of this one, and what it does once all are up.
PROGRAM = """
import sys, time
from convbert_jax import console
from convbert_jax.config import UserError
from convbert_jax.training.environment import meeting, peers
from jax.experimental import multihost_utils
port, count, index, does = sys.argv[1:]
console.set_up_logging()
place = meeting.Place(f"localhost:{port}", int(count), int(index))
try:
    with peers.together(place, patience=60, silence=10, advise=lambda missing: "start it"):
        multihost_utils.sync_global_devices("up")
        print("up", flush=True)
        time.sleep(600 if does == "wait" else 1)
        if does == "fail":
            raise UserError("its own reason.")
        if does == "be interrupted":
            raise KeyboardInterrupt
        if does == "hang":
            peers.end_of_a_hang()
except UserError as error:
    console.fail(str(error))
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def launch(*does: str, count: int, port: int | None = None, begin=0) -> list[subprocess.Popen]:
    """Starts one of `count` processes for each word, from process `begin` on."""
    port = port or free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(count), str(index), what],
            cwd=REPOSITORY,
            env=os.environ | {"XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, what in enumerate(does, start=begin)
    ]


def start(*does: str) -> list[subprocess.Popen]:
    """One process for each word, all up."""
    processes = launch(*does, count=len(does))
    for process in processes:
        wait_until_up(process)
    return processes


def wait_until_up(process) -> None:
    while line := process.stdout.readline():
        if line == "up\n":
            return
    raise AssertionError(process.communicate()[1])


def check_ended(process, by: int, count: int) -> None:
    """Code and sentence; nothing of what C++ says is a page long."""
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_CODE, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert f"process {by} of {count} has ended" in line
    assert "stack trace" not in text.partition("error: ")[0]
    assert len(text) < 3000


class Told:
    """What a process does about messages from process 1 of 3.

    Attributes:
      exits: its exit code, if it ended.
      errors: exceptions that ended a thread.
    """

    def __init__(self, monkeypatch):
        self.exits, self.errors = [], []
        monkeypatch.setattr(peers.os, "_exit", self.exits.append)
        monkeypatch.setattr(peers, "_GRACE", 0.0)
        monkeypatch.setattr(peers, "_LINGER", 0.0)
        monkeypatch.setattr(threading, "excepthook", self.errors.append)

    def hear(self, says: bytes) -> None:
        here, there = socket.socketpair()
        place = meeting.Place("localhost:80", 3, 0)
        with here, there:
            there.sendall(says)
            there.shutdown(socket.SHUT_WR)
            thread = threading.Thread(
                target=peers._Peers(place, 60.0)._listen, args=(1, meeting.Link(here))
            )
            thread.start()
            thread.join(60)
            assert not thread.is_alive()


MALFORMED = {
    "binary": bytes(range(256)),
    "not a message": b"[]",
    "deep nesting": b"[" * 50_000,
    "a huge line": b"x" * 200_000,
    "another kind": b'{"kind": "x"}',
    "a list as a kind": b'{"kind": []}',
    "no process": b'{"kind": "failed", "sentence": "x"}',
    "a word as a process": b'{"kind": "hangs", "process": "1"}',
    "a process that does not exist": b'{"kind": "ended", "process": 3}',
}


@pytest.mark.parametrize("says", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_ignored(says, monkeypatch):
    told = Told(monkeypatch)
    told.hear(says + b'\n{"kind": "beat"}\n{"kind": "done"}\n')
    assert told.exits == told.errors == []


@pytest.mark.parametrize("code", ["0", "3", "true", "[]", '"0"'])
@pytest.mark.parametrize(
    ("kind", "ends"),
    [("failed", 1), ("ended", EXIT_CODE), ("hangs", EXIT_CODE), ("silent", EXIT_CODE)],
)
def test_a_message_does_not_choose_the_exit_code(kind, ends, code, monkeypatch):
    told = Told(monkeypatch)
    told.hear(f'{{"kind": "{kind}", "process": 1, "code": {code}}}\n'.encode())
    assert (told.exits, told.errors) == ([ends], [])


def test_the_sentence_of_a_message_is_printed_as_one_line(monkeypatch, capfd):
    told = Told(monkeypatch)
    sentence = r"\u001b[2J\u001b]0;title\u0007 two\nlines \ud800"
    told.hear(f'{{"kind": "failed", "process": 1, "sentence": "{sentence}", "self": 1}}\n'.encode())
    written = capfd.readouterr().err
    assert told.errors == []
    assert written.count("\n") == 1
    assert written[:-1].isprintable()


def test_processes_meet_and_finish_among_strangers():
    port = free_port()
    (first,) = launch("end", count=2, port=port)
    with contextlib.ExitStack() as strangers:
        messages = [*MALFORMED.values(), b'{"kind": "failed", "process": 1, "code": 0}']
        for says in [*(message + b"\n" for message in messages), b"half a line", b""]:
            stranger = strangers.enter_context(connect(port))
            with contextlib.suppress(OSError):  # it may be dropped before it has sent everything
                stranger.sendall(says)
        (second,) = launch("end", count=2, port=port, begin=1)
        wait_until_up(first)
        # JAX's service has taken over the port, on loopback too: 127.0.0.2 is of this machine.
        with pytest.raises(OSError, match=r"refused|assign"):
            socket.create_connection(("127.0.0.2", port), 5).close()
        for process in (first, second):
            _, text = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, text
            assert "Traceback" not in text


def connect(port: int) -> socket.socket:
    """Connects to process 0 as soon as it listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("localhost", port), PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others(killed):
    processes = start("wait", "wait")
    began = time.monotonic()
    processes[killed].send_signal(signal.SIGKILL)
    check_ended(processes[1 - killed], killed, 2)
    assert time.monotonic() - began < 30  # less than a second on a machine that is not busy
    processes[killed].communicate()


def test_a_process_killed_while_the_others_are_done_already_ends_them():
    """Else jax would abort them after 100 s, with a trace."""
    processes = start("end", "wait")
    time.sleep(3)  # the first one is done after one
    processes[1].send_signal(signal.SIGKILL)
    check_ended(processes[0], 1, 2)
    processes[1].communicate()


def test_a_process_killed_before_all_have_come_ends_who_is_there():
    """Nobody waits out the time for the third one, which does not come either."""
    first, second = launch("wait", "wait", count=3)
    for line in second.stderr:
        if "Waiting for the others" in line:
            break
    second.kill()
    second.communicate()
    check_ended(first, 1, 3)


@pytest.mark.slow
def test_the_first_process_tells_the_third_of_the_second():
    processes = start("wait", "wait", "wait")
    processes[1].send_signal(signal.SIGKILL)
    check_ended(processes[0], 1, 3)
    check_ended(processes[2], 1, 3)
    processes[1].communicate()


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_of_one_ends_the_others(failing):
    does = ["wait", "wait"]
    does[failing] = "fail"
    processes = start(*does)
    for index, process in enumerate(processes):
        _, text = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, text  # it comes again: no launcher shall try
        whose = "" if index == failing else f"process {failing}: "
        assert f"error: {whose}its own reason.\n" in text
        assert "has ended" not in text


@pytest.mark.slow
def test_an_interrupted_one_ends_the_others_for_another_try():
    processes = start("wait", "be interrupted")
    check_ended(processes[0], 1, 2)
    _, text = processes[1].communicate(timeout=PATIENCE)
    assert processes[1].returncode == 130, text


def test_a_stopped_process_ends_the_others():
    """Its connection stands; it only says nothing any more."""
    processes = start("wait", "wait")
    processes[1].send_signal(signal.SIGSTOP)
    try:
        _, text = processes[0].communicate(timeout=PATIENCE)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert processes[0].returncode == EXIT_CODE, text
    assert "error: process 1 of 2 has given no sign of life for 10 s" in text


@pytest.mark.slow
def test_a_hang_of_one_shows_what_all_of_them_do():
    processes = start("wait", "hang", "wait")
    for index, process in enumerate(processes):
        _, text = process.communicate(timeout=PATIENCE)
        assert process.returncode == EXIT_CODE, text
        assert 'File "<string>", line' in text  # where the program stands
        assert ("error: process 1 of 3 hangs, so this one ends too" in text) == (index != 1)


@pytest.mark.slow
def test_an_error_of_all_is_said_by_all():
    for process in start("fail", "fail"):
        _, text = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, text
        assert "error: its own reason.\n" in text
        assert "has ended" not in text


@pytest.mark.slow
def test_a_run_that_is_done_ends_nobody():
    for process in start("end", "end"):
        _, text = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, text
        assert "error: " not in text
