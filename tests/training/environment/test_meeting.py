"""Threads play processes that find each other, or wait in vain."""

import contextlib
import ipaddress
import re
import socket
import struct
import threading
import time

import pytest

from convbert_jax.config import ConfigError
from convbert_jax.training.environment import meeting
from convbert_jax.training.environment.meeting import Place


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def advise(missing) -> str:
    return f"start {missing}"


class First:
    """`gather` in a thread."""

    def __init__(self, count: int, patience: float = 60.0):
        self.place = Place(free_address(), count, 0)
        self.links, self.fault = {}, None
        self._patience = patience
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            meeting.gather(self.place, self._patience, advise, self.links.__setitem__)
        except ConfigError as error:
            self.fault = str(error)

    def end(self) -> str | None:
        """What was wrong."""
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self.fault

    def reach(self, index: int, count: int | None = None) -> meeting.Link:
        place = Place(self.place.coordinator, count or self.place.count, index)
        return meeting.reach(place, 60.0, advise)

    def connect(self) -> socket.socket:
        """A stranger's connection."""
        host, _, port = self.place.coordinator.partition(":")
        while True:
            try:
                return socket.create_connection((host, int(port)), 60)
            except ConnectionRefusedError:  # it does not listen yet
                time.sleep(0.01)


def test_all_find_each_other_and_words_go_both_ways():
    first = First(3)
    links = {index: first.reach(index) for index in (2, 1)}
    assert first.end() is None
    assert sorted(first.links) == [1, 2]
    for index, link in links.items():
        link.say("it is", process=index)
        assert first.links[index].hear(60) == {"kind": "it is", "process": index}
        first.links[index].say("so")
        first.links[index].finish()
        assert link.hear(60) == {"kind": "so"}
        assert link.hear(60) is None
    with pytest.raises(TimeoutError):
        first.links[1].hear(0.01)


def test_the_address_is_free_again_for_jax():
    first = First(2)
    link = first.reach(1)
    assert first.end() is None
    port = int(first.place.coordinator.rpartition(":")[2])
    socket.create_server(("", port)).close()
    link.close()


def test_who_has_not_come_is_named_while_it_lasts_and_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_REMINDER", 0.2)
    caplog.set_level("INFO", logger="absl")
    first = First(4, patience=6.0)
    first.reach(2)
    assert first.end() == "processes 1 and 3 of 4 have not come within 6 s; start [1, 3]."
    said = r"Still waiting: processes 1 and 3 of 4 have not come within \d s; start \[1, 3\]"
    assert re.search(said, caplog.text)


def test_a_first_process_that_is_not_there_is_named():
    place = Place(free_address(), 2, 1)
    with pytest.raises(ConfigError, match=f"process 0 of 2 does not answer at {place.coordinator}"):
        meeting.reach(place, 0.5, advise)


@pytest.mark.parametrize(("count", "index"), [(3, 1), (2, 1), (3, 0), (3, 3)])
def test_a_process_that_cannot_join_is_refused_and_the_others_still_meet(count, index, caplog):
    first = First(3)
    first.reach(1)
    with pytest.raises(ConfigError) as refused:
        first.reach(index, count)
    first.reach(2)
    assert first.end() is None
    assert sorted(first.links) == [1, 2]
    assert str(refused.value) in caplog.text


def test_the_last_refusal_is_named_when_a_process_has_not_come():
    first = First(2, patience=3.0)
    with pytest.raises(ConfigError):
        first.reach(1, count=7)
    assert "--processes=7" in first.end()


@pytest.fixture
def thread_errors(monkeypatch):
    """Exceptions that ended a thread."""
    found = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


ATTACKS = {
    "another protocol": b"GET / HTTP/1.1\r\n",
    "another message": b'{"kind": "beat"}\n',
    "not a message": b"[]\n",
    "binary": bytes(range(256)) + b"\n",
    "half a line": b'{"kind": "here", "proc',
    "nothing": b"",
    "a huge line": b"x" * 1_000_000,
    "deep nesting": b"[" * 50_000 + b"\n",
    "a list as a number": b'{"kind": "here", "process": [1], "count": 2}\n',
    "a huge number": b'{"kind": "here", "process": ' + b"9" * 9_000 + b', "count": 2}\n',
    "another run": b'{"kind": "here", "process": 1, "count": 999}\n',
    "a number that is taken": b'{"kind": "here", "process": 0, "count": 2}\n',
    "an end": b'{"kind": "failed", "code": 0, "process": 1, "sentence": ""}\n',
}


@pytest.mark.parametrize("ends", ["waits", "closes", "resets"])
@pytest.mark.parametrize("says", ATTACKS.values(), ids=ATTACKS)
def test_a_stranger_is_dropped(says, ends, thread_errors):
    first = First(2)
    with first.connect() as stranger:
        with contextlib.suppress(OSError):  # it may be dropped before it has sent everything
            stranger.sendall(says)
            if ends == "closes":
                stranger.shutdown(socket.SHUT_WR)
            if ends == "resets":
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.close()
        first.reach(1)
        assert first.end() is None
    assert not thread_errors


def test_slow_strangers_delay_nobody(monkeypatch, thread_errors):
    monkeypatch.setattr(meeting, "_GREETING", 60.0)
    first = First(2, patience=30.0)
    with contextlib.ExitStack() as strangers:
        for _ in range(10):
            strangers.enter_context(first.connect()).sendall(b"{")
        first.reach(1)
        assert first.end() is None
    assert not thread_errors


def test_a_greeting_that_comes_byte_by_byte_has_one_deadline(monkeypatch):
    monkeypatch.setattr(meeting, "_GREETING", 0.5)
    first = First(2)
    # Process 0 closes the connection.
    with first.connect() as stranger, contextlib.suppress(ConnectionError):
        for _ in range(100):
            stranger.sendall(b" ")
            time.sleep(0.1)
        pytest.fail("the connection is still open")
    first.reach(1)
    assert first.end() is None


def test_a_flood_of_connections_is_bounded(monkeypatch, thread_errors):
    monkeypatch.setattr(meeting, "_MOST_GREETINGS", 3)
    monkeypatch.setattr(meeting, "_GREETING", 0.5)
    first = First(2)
    with contextlib.ExitStack() as strangers:
        before = threading.active_count()
        for _ in range(50):
            strangers.enter_context(first.connect())
        assert threading.active_count() <= before + 3 + 2
        first.reach(1)
        assert first.end() is None
    assert not thread_errors


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_local_run_listens_on_loopback_only(host):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert ipaddress.ip_address(meeting.bind_host(Place(f"{host}:80", 2, 0))).is_loopback


def test_another_address_of_this_machine_is_not_listened_on():
    first = First(2)
    first.connect().close()
    port = int(first.place.coordinator.rpartition(":")[2])
    with pytest.raises(OSError, match=r"refused|assign"):  # 127.0.0.2 is of this machine too
        socket.create_connection(("127.0.0.2", port), 5).close()
    first.reach(1)
    assert first.end() is None


def test_a_run_of_several_hosts_listens_at_the_address_of_the_coordinator(monkeypatch):
    """On all interfaces if its name means something else here than on the other hosts."""
    found = {
        "node-1": "127.0.0.1",  # as Debian's /etc/hosts says of a machine's own name
        "node-2": "192.0.2.1",  # an address that no interface of this machine has
        "127.0.0.1": "127.0.0.1",
    }

    def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert meeting.bind_host(Place("127.0.0.1:80", 2, 0)) == "127.0.0.1"
    assert meeting.bind_host(Place("node-1:80", 2, 0)) == ""
    assert meeting.bind_host(Place("node-2:80", 2, 0)) == ""


def test_another_program_at_the_port_is_told():
    with socket.create_server(("", 0)) as taken:
        place = Place(f"localhost:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ConfigError, match="cannot listen on port"):
            meeting.gather(place, 60.0, advise, dict().__setitem__)


def test_without_a_cluster_there_is_no_place(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"--multihost: no TPU slice .* leave --multihost out"):
        meeting.find_place()
