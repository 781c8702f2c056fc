"""Threads play processes that find each other, or wait in vain."""

import contextlib
import re
import socket
import threading

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
                continue


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


@pytest.mark.parametrize(
    ("count", "index", "says"),
    [
        (3, 1, "process 1 of 3 is here twice; give each a number of its own."),
        (2, 1, "process 1 is one of 2, process 0 one of 3; start the same command"),
    ],
)
def test_one_that_cannot_be_is_told_on_both_sides(count, index, says):
    first = First(3)
    first.reach(1)
    with pytest.raises(ConfigError) as refused:
        first.reach(index, count)
    assert says in str(refused.value)
    assert first.end() == str(refused.value)


@pytest.mark.parametrize(
    "says", [b"GET / HTTP/1.1\r\n", b'{"kind": "beat"}\n', b"[]\n", b"\xff\n", b"", b"x" * 100_000]
)
def test_a_stranger_is_sent_away(says):
    first = First(2)
    with first.connect() as stranger:
        with contextlib.suppress(OSError):  # it may be sent away before it has said all
            stranger.sendall(says)
            if not says.endswith(b"\n"):
                stranger.shutdown(socket.SHUT_WR)
        first.reach(1)
        assert first.end() is None


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
