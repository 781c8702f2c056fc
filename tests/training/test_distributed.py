"""Several processes: connecting, exchanging values, stopping and ending together.

Threads simulate the processes unless a test needs a process to end.
"""

import concurrent.futures
import contextlib
import ipaddress
import itertools
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import Config, ConfigError
from convbert_jax.training import consistency, distributed
from convbert_jax.training.distributed import EXIT_CODE, ProcessId
from tests.refusals import refused

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def hint(missing) -> str:
    return f"start {missing}"


def connect_to(port: int) -> socket.socket:
    """Connects an unknown client to process 0 once it listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("localhost", port), PATIENCE)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# Threads


class Meeting:
    """Groups of simulated processes in threads; process 0 waits from the start."""

    def __init__(self, count: int, timeout: float = 60.0):
        self.port, self._count = free_port(), count
        self._first = self.start(0, timeout=timeout)

    def start(self, index, count=None, timeout=60.0) -> concurrent.futures.Future:
        """Starts a simulated process in a thread; returns a future of its group."""
        process = ProcessId(f"localhost:{self.port}", count or self._count, index)

        future = concurrent.futures.Future()

        def meet():
            group = distributed._Group(process, 60.0)
            try:
                group.meet(timeout, hint)
                future.set_result(group)
            except ConfigError as error:
                group.leave({"kind": "done"})
                future.set_exception(error)

        threading.Thread(target=meet, daemon=True).start()  # a thread may wait forever
        return future

    @contextlib.contextmanager
    def all(self):
        """Returns the groups of all processes once all are connected."""
        futures = [self._first, *(self.start(i) for i in range(1, self._count))]
        groups = [future.result(PATIENCE) for future in futures]
        yield groups
        for group in groups:
            group.leave({"kind": "done"})

    def join(self, index: int):
        """Connects the last process; returns the group of process 0."""
        self.start(index)
        return self._first.result(PATIENCE)

    def fault(self) -> ConfigError:
        """Returns the error of process 0."""
        return self._first.exception(PATIENCE)


@pytest.fixture(autouse=True)
def thread_errors(monkeypatch):
    """Fails if a thread ends with an exception."""
    found = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found
    assert not found


def in_threads(function, *arguments):
    """Returns results of concurrent calls of `function`, one per argument tuple."""
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(lambda each: function(*each), arguments))


def test_processes_exchange_values():
    """Process 0 decides from all values; a process that is too late counts as None."""
    with Meeting(3).all() as groups:

        def decide(group, timeout):
            if group.process.index == 2 and timeout < 1:
                time.sleep(0.5)
            return group.decide(("of", group.process.index), lambda values: values, timeout)

        everything = [["of", 0], ["of", 1], ["of", 2]]
        assert in_threads(decide, *((g, 60.0) for g in groups)) == [everything] * 3
        everything[2] = None
        assert in_threads(decide, *((g, 0.1) for g in groups)) == [everything] * 3
    assert distributed.decide({"a": (1, 2)}, lambda values: values, 1.0) == [{"a": [1, 2]}]


def test_a_missing_process_is_named_while_waiting_and_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(distributed, "_REMINDER", 0.2)
    caplog.set_level("INFO", logger="absl")
    meeting = Meeting(4, timeout=3.0)
    present = meeting.start(2)
    with refused(ConfigError, "1 and 3 of 4", 3, hint([1, 3])):
        raise meeting.fault()
    reminders = [r for r in caplog.records if hint([1, 3]) in r.getMessage()]
    assert reminders[-1].levelname == "INFO"
    with pytest.raises(concurrent.futures.TimeoutError):  # process 0 sends no confirmation
        present.result(0.1)


def test_an_absent_process_0_is_named():
    place = ProcessId(f"localhost:{free_port()}", 2, 1)
    with refused(ConfigError, "0 of 2", place.coordinator, hint([0])):
        distributed._Group(place, 60.0).meet(0.5, hint)


def test_a_process_that_cannot_join_is_refused_and_the_others_still_meet(caplog):
    """A process with another process count, or an index that is taken or too large."""
    meeting = Meeting(3)
    twins = [meeting.start(1), meeting.start(1)]  # the one that connects second is refused
    (second,), (first,) = concurrent.futures.wait(
        twins, PATIENCE, concurrent.futures.FIRST_COMPLETED
    )
    outside = [meeting.start(index, count) for count, index in ((2, 2), (3, 3))]
    for future, count, index in ((second, 3, 1), (outside[0], 2, 2), (outside[1], 3, 3)):
        with refused(ConfigError, index, f"--processes={count}"):
            if error := future.exception(PATIENCE):
                raise error
    assert sorted(meeting.join(2)._connections) == [1, 2]
    assert first.result(PATIENCE)
    assert [r.levelname for r in caplog.records if "--processes=2" in r.getMessage()]


def test_the_last_refusal_is_named_when_a_process_is_missing():
    meeting = Meeting(2, timeout=3.0)
    assert meeting.start(1, count=7).exception(PATIENCE)
    with refused(ConfigError, "--processes=7"):
        raise meeting.fault()


ATTACKS = [
    b"GET / HTTP/1.1\r\n",
    b'{"kind": "beat"}\n',
    b"[]\n",
    bytes(range(256)) + b"\n",
    b'{"kind": "here", "proc',
    b"",
    b"x" * 3_000_000,
    b"[" * 50_000 + b"\n",
    b'{"kind": "here", "process": [1], "count": 2}\n',
    b'{"kind": "here", "process": ' + b"9" * 9_000 + b', "count": 2}\n',
    b'{"kind": "here", "process": 1, "count": 999}\n',
    b'{"kind": "here", "process": 0, "count": 2}\n',
    b'{"kind": "failed", "code": 0, "process": 1, "sentence": ""}\n',
]


def test_strangers_are_dropped():
    meeting = Meeting(2)
    with contextlib.ExitStack() as strangers:
        for message, ends in itertools.product(ATTACKS, ("waits", "closes", "resets")):
            stranger = strangers.enter_context(connect_to(meeting.port))
            with contextlib.suppress(OSError):  # the connection may be dropped early
                stranger.sendall(message)
                if ends == "closes":
                    stranger.shutdown(socket.SHUT_WR)
                if ends == "resets":
                    now = struct.pack("ii", 1, 0)
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                    stranger.close()
        with meeting.all():
            pass


def test_many_slow_strangers_delay_no_process(monkeypatch):
    """Each greeting has one deadline, and few are read concurrently."""
    monkeypatch.setattr(distributed, "_MAX_GREETINGS", 3)
    monkeypatch.setattr(distributed, "_GREETING", 0.5)
    meeting = Meeting(2)
    with contextlib.ExitStack() as strangers:
        before = threading.active_count()
        for _ in range(50):
            strangers.enter_context(connect_to(meeting.port)).sendall(b"{")
        assert threading.active_count() <= before + 3 + 3
        slow = strangers.enter_context(connect_to(meeting.port))
        with contextlib.suppress(ConnectionError):  # process 0 closes the connection
            for _ in range(100):
                slow.sendall(b" ")
                time.sleep(0.1)
            pytest.fail("the connection is still open")
        with meeting.all():
            pass


def test_a_local_run_listens_on_loopback_only():
    for host in ("localhost", "127.0.0.1", *["[::1]"] * socket.has_dualstack_ipv6()):
        address = distributed._bind_host(ProcessId(f"{host}:80", 2, 0))
        assert ipaddress.ip_address(address).is_loopback


def test_a_run_of_several_hosts_listens_at_the_address_of_the_coordinator(monkeypatch):
    """Listens on all interfaces if the name resolves differently here and on other hosts."""
    found = {
        "node-1": "127.0.0.1",  # Debian's /etc/hosts maps a machine's hostname like this
        "node-2": "192.0.2.1",  # an address of no local interface
        "127.0.0.1": "127.0.0.1",
    }

    def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    hosts = {name: distributed._bind_host(ProcessId(f"{name}:80", 2, 0)) for name in found}
    assert hosts == {"node-1": "", "node-2": "", "127.0.0.1": "127.0.0.1"}


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with refused(ConfigError, field="port", value=port):
            distributed._Group(ProcessId(f"localhost:{port}", 2, 0), 60.0).meet(60.0, hint)


def test_a_process_that_no_cluster_started_is_refused(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with refused(ConfigError, "--coordinator", field="--multihost"):
        distributed.detect_process()


class Listening:
    """Process 0 of 3, reading messages of process 1.

    Attributes:
      exits: exit codes of process 0.
    """

    def __init__(self, monkeypatch):
        self.exits = []
        monkeypatch.setattr(distributed.os, "_exit", self.exits.append)
        monkeypatch.setattr(distributed, "_GRACE", 0.0)
        monkeypatch.setattr(distributed, "_LINGER", 0.0)

    def receive(self, messages: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(messages)
            there.shutdown(socket.SHUT_WR)
            group = distributed._Group(ProcessId("localhost:80", 3, 0), 60.0)
            group.listen(1, distributed._Connection(here))


MALFORMED = [
    bytes(range(256)),
    b"[]",
    b"[" * 50_000,
    b"x" * 60_000,
    b'{"kind": "x"}',
    b'{"kind": []}',
    b'{"kind": "failed", "sentence": "x"}',
    b'{"kind": "hangs", "process": "1"}',
    b'{"kind": "exited", "process": 3}',
    b'{"kind": "stop", "round": 0, "by": "SIGKILL"}',
    b'{"kind": "stop", "round": [], "by": "SIGTERM"}',
    b'{"kind": "step", "agreement": {}, "step": 1}',
]


def test_malformed_messages_are_ignored(monkeypatch):
    listening = Listening(monkeypatch)
    for message in MALFORMED:
        listening.receive(message + b'\n{"kind": "beat"}\n{"kind": "done"}\n')
    assert listening.exits == []


def test_a_message_does_not_choose_the_exit_code(monkeypatch):
    for code in ("0", "3", "true", "[]", '"0"'):
        listening = Listening(monkeypatch)
        for kind in ("failed", "exited", "hangs", "silent"):
            listening.receive(f'{{"kind": "{kind}", "process": 1, "code": {code}}}\n'.encode())
        assert listening.exits == [1, EXIT_CODE, EXIT_CODE, EXIT_CODE]


def test_the_sentence_of_a_message_is_printed_as_one_line(monkeypatch, capfd):
    sentence = r"\u001b[2J\u001b]0;title\u0007 two\nlines \ud800"
    Listening(monkeypatch).receive(
        f'{{"kind": "failed", "process": 1, "sentence": "{sentence}", "self": 1}}\n'.encode()
    )
    written = capfd.readouterr().err
    assert written.count("\n") == 1
    assert written[:-1].isprintable()


def play(count, steps, seed, requests, *, ahead=2, contexts=1):
    """Simulates contexts that stop; returns [(last step, signal) per context] per process.

    Args:
      requests: (process, context, step) of each stop request.
      ahead: maximum lead of a process in steps.
    """
    started, moved = [0] * count, threading.Condition()

    def run(group):
        index, ends = group.process.index, []
        wait = itertools.cycle((0.0, 0.001 * ((seed + index) % 4), 0.002))
        for context in range(contexts):
            with distributed.StopAgreement(group) as agreement:
                for step in range(1, steps + 1):
                    with moved:
                        started[index] += 1
                        own = started[index]
                        moved.notify_all()
                        assert moved.wait_for(
                            lambda own=own: all(
                                e or s >= own - ahead for s, e in zip(started, over, strict=True)
                            ),
                            timeout=20,
                        )
                    time.sleep(next(wait))
                    if (index, context, step) in requests:
                        agreement.request("SIGTERM")
                    if by := agreement.stops_after(step):
                        break
                ends.append((step, by))
        with moved:
            over[index] = True
            moved.notify_all()
        return ends

    over = [False] * count
    with Meeting(count).all() as groups:
        return in_threads(run, *((group,) for group in groups))


@settings(max_examples=15)
@given(
    count=st.integers(2, 3),
    seed=st.integers(0, 10**6),
    first=st.integers(1, 20),
    askers=st.sets(st.integers(0, 1), min_size=1),
    context=st.integers(0, 1),
)
def test_all_stop_after_the_same_step(count, seed, first, askers, context):
    """A request near the end of a context stops the next context."""
    ends = play(count, 20, seed, {(i, context, first) for i in askers}, contexts=2)
    assert ends == [ends[0]] * count
    before, stopped = ends[0]
    if context or before == (20, None):
        assert before == (20, None)
        assert stopped[1] == "SIGTERM" or (context == 1 and first >= 18)
    else:
        assert (first <= before[0], before[1]) == (True, "SIGTERM")
        assert stopped == (20, None)


def test_a_request_stops_all_long_before_the_end_and_no_request_stops_none():
    ends = play(3, 3_000, 0, {(1, 0, 2)})
    assert ends == [ends[0]] * 3
    assert ends[0][0][0] < 1_500
    assert play(3, 20, 0, set()) == [[(20, None)]] * 3


VALUES = st.fixed_dictionaries(
    {"a": st.integers(0, 2), "b": st.sampled_from(["x", "y"])}, optional={"c": st.just(1)}
)
RECORDS = st.lists(
    st.none() | st.fixed_dictionaries({"versions": VALUES, "command": VALUES}),
    min_size=1,
    max_size=5,
).filter(lambda records: records[0] is not None)


@given(RECORDS)
def test_a_difference_names_exactly_the_processes_and_fields_that_differ(records):
    difference = consistency.find_difference(records, 5.0)
    if None in records:
        silent = [i for i, record in enumerate(records) if record is None]
        assert distributed.name_processes(silent)[1:] in difference["message"]
    elif all(record == records[0] for record in records):
        assert difference is None
    else:
        part = next(p for p in records[0] if any(r[p] != records[0][p] for r in records))
        message = difference["message"]
        assert message.endswith(consistency.FIXES[part])
        for name in ("a", "b", "c"):
            values = [record[part].get(name, "none") for record in records]
            assert (f" {name}=" in message) == (len(set(values)) > 1)
            for value in set(values) - {values[0]}:
                who = [i for i, each in enumerate(values) if each == value]
                assert distributed.name_processes(who)[1:] in message
                assert f" {name}={value}" in message
        assert f" {difference['field']}=" in message
        assert len(message.splitlines()) == 1


def test_long_values_and_many_fields_stay_one_short_sentence():
    first = {f"config.f{i}": "v" * 500 for i in range(90)}
    other = {name: f"w{'v' * 500}" for name in first}
    message = consistency.find_difference([{"command": first}, {"command": other}], 5.0)["message"]
    assert len(message) < 800
    assert "87 more" in message


def test_a_single_process_compares_nothing(caplog, monkeypatch):
    consistency.check_flags({"--mode": "train"})
    consistency.check_start(Config())
    consistency.check_data(Config(), "0" * 64)
    assert not caplog.records
    monkeypatch.setattr(distributed.jax.distributed, "is_initialized", lambda: True)
    with refused(consistency.InconsistencyError, "--multihost", "--coordinator"):
        consistency.check_data(Config(), "0" * 64)


# Processes

# Arguments: port, process count, process index, statements before and after the checks.
PROGRAM = """
import dataclasses, sys, time
import jax
from convbert_jax import console
from convbert_jax.config import Config, UserError
from convbert_jax.training import consistency, distributed
port, count, index, before, after = sys.argv[1:]
console.set_up_logging()
process = distributed.ProcessId(f"localhost:{port}", int(count), int(index))
config, versions = Config(), consistency.versions()
def backends():
    from jax._src import xla_bridge
    return sorted(xla_bridge._backends)
try:
    with distributed.connect(process, timeout=60, silence=10, hint=lambda missing: "start it"):
        exec(before)
        consistency.versions = lambda: versions
        consistency.check_flags({"--mode": "train"})
        consistency.check_start(config)
        consistency.check_data(config, "f" * 64)
        distributed.barrier("up")
        print("up", flush=True)
        exec(after)
except UserError as error:
    print("backends", backends())
    console.fail(str(error))
"""
WAIT = "time.sleep(600)"
FAIL = "time.sleep(1); raise UserError('its own reason.')"


def launch(*after, before=(), count=None, port=None, begin=0) -> list[subprocess.Popen]:
    """Starts one process per text of statements, counting from index `begin`."""
    port = port or free_port()
    before = before or ("",) * len(after)
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(count or len(after)), str(index),
             before[index - begin], what],
            cwd=REPOSITORY,
            env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, what in enumerate(after, start=begin)
    ]  # fmt: skip


def start(*after: str) -> list[subprocess.Popen]:
    """Starts one process per text of statements and waits until all are running."""
    processes = launch(*after)
    for process in processes:
        wait_until_up(process)
    return processes


def wait_until_up(process) -> None:
    while line := process.stdout.readline():
        if line == "up\n":
            return
    raise AssertionError(process.communicate()[1])


def end(process) -> tuple[int, str, str]:
    """Returns (exit code, error, rest of the output)."""
    out, err = process.communicate(timeout=PATIENCE)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) <= 1, err
    assert "Check failure" not in err.partition("error: ")[0]
    return process.returncode, "".join(errors), out + err


def check_ended(process, by: int, count: int) -> None:
    """Checks for one sentence and the exit code, without a C++ stack trace."""
    code, error, text = end(process)
    assert code == EXIT_CODE, text
    assert f"rocess {by} of {count}" in error
    assert len(text) < 3_000


def test_processes_meet_and_finish_among_strangers():
    port = free_port()
    (first,) = launch("", count=2, port=port)
    with contextlib.ExitStack() as strangers:
        for message in ATTACKS:
            stranger = strangers.enter_context(connect_to(port))
            with contextlib.suppress(OSError):
                stranger.sendall(message)
        (second,) = launch("", count=2, port=port, begin=1)
        wait_until_up(first)
        # JAX's service now owns the port, including loopback; 127.0.0.2 is this machine.
        with pytest.raises(OSError, match=r"refused|assign"):
            socket.create_connection(("127.0.0.2", port), 5).close()
        ends = [end(first), end(second)]
    assert [each[:2] for each in ends] == [(0, "")] * 2, ends
    assert "Traceback" not in str(ends)
    assert sum("2 x 1 cpu" in text for _, _, text in ends) == 1


@pytest.mark.parametrize(
    ("after", "killed"),
    [
        ((WAIT, WAIT), 1),
        (("", WAIT), 1),  # the other process has finished; JAX would abort it after 100 s
        pytest.param((WAIT, WAIT), 0, marks=pytest.mark.slow),
        pytest.param((WAIT, WAIT, WAIT), 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_others(after, killed):
    processes = start(*after)
    time.sleep(1)
    began = time.monotonic()
    processes[killed].send_signal(signal.SIGKILL)
    processes[killed].communicate()
    for index, process in enumerate(processes):
        if index != killed:
            check_ended(process, killed, len(processes))
    assert time.monotonic() - began < 30  # takes less than a second on an idle machine


def test_a_process_killed_before_all_have_come_ends_the_present_ones():
    """The connected processes do not wait for the missing third one."""
    first, second = launch(WAIT, WAIT, count=3)
    while "process 0" not in (line := second.stderr.readline()):
        assert line
    second.kill()
    second.communicate()
    check_ended(first, 1, 3)


def test_a_stopped_process_ends_the_others():
    """Its connection stays open but silent."""
    processes = start(WAIT, WAIT)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        code, error, text = end(processes[0])
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert code == EXIT_CODE, text
    assert "rocess 1 of 2" in error
    assert " 10 s" in error


@pytest.mark.parametrize(
    "failing",
    [(1,), *(pytest.param(who, marks=pytest.mark.slow) for who in ((0,), (0, 1)))],
)
def test_an_error_of_one_ends_the_others_and_all_print_it(failing):
    processes = start(*(FAIL if index in failing else WAIT for index in range(2)))
    for index, process in enumerate(processes):
        code, error, text = end(process)
        assert code == 1, text  # the error would recur, so launchers must not retry
        assert error.endswith("its own reason.")
        assert (f"rocess {failing[0]}" in error) == (index not in failing)


@pytest.mark.slow
def test_an_interrupted_process_ends_the_others_for_another_try():
    processes = start(WAIT, "time.sleep(1); raise KeyboardInterrupt")
    check_ended(processes[0], 1, 2)
    assert end(processes[1])[0] == 130


@pytest.mark.slow
def test_a_hang_of_one_shows_the_stacks_of_all():
    for index, process in enumerate(
        start(WAIT, "time.sleep(1); distributed.exit_after_hang()", WAIT)
    ):
        code, error, text = end(process)
        assert code == EXIT_CODE, text
        assert 'File "<string>", line' in text  # stack trace of the program
        assert ("rocess 1 of 3" in error) == (index != 1)


@pytest.mark.parametrize(
    ("before", "mentions"),
    [
        (("", "versions['jaxlib'] = '0.0.1'"), ("rocess 1 ", "jaxlib=0.0.1")),
        pytest.param(
            ("", *["config = dataclasses.replace(config, seed=7)"] * 2),
            ("rocesses 1 and 2 ", "config.seed=7", " 0."),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_difference_ends_all_before_devices_are_initialized(before, mentions):
    ends = [end(process) for process in launch(*[""] * len(before), before=before)]
    assert [code for code, _, _ in ends] == [1] * len(before), ends
    assert len({error for _, error, _ in ends}) == 1
    assert all(each in ends[0][1] for each in mentions)
    if "jaxlib" in mentions[1]:
        assert all("backends []" in text for _, _, text in ends)


@pytest.mark.slow
def test_another_number_of_processes_is_refused():
    """Rejected before JAX connects; process 0 keeps waiting for the expected process."""
    port = free_port()
    (first,), (second,) = launch("", count=2, port=port), launch("", count=3, port=port, begin=1)
    for process, mentions in ((second, ()), (first, ("rocess 1 of 2",))):
        code, error, text = end(process)
        assert code == 1, text
        assert all(each in error for each in ("--processes=3", "--processes=2", *mentions))


@pytest.mark.slow
def test_a_silent_process_is_named():
    soon = "consistency._READ_TIMEOUT, distributed._MARGIN = 6.0, 9.0"
    processes = launch("", "", "", before=(soon, f"{soon}; time.sleep(14)", soon))
    for code, error, text in [end(process) for process in processes][::2]:
        assert code == 1, text
        assert "rocess 1 of 3" in error
        assert " 6 s" in error
