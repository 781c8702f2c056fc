"""Several processes find each other, before jax does: who is missing is named.

All connect to the first one at the address of jax's coordinator, where jax itself listens only
when all have come. Of those who are late jax would say nothing, not even how many they are, and
its own end of the wait is a trace of C++. Like jax's service it trusts whoever reaches it.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from jax._src import clusters  # finds TPU slices, Slurm and Open MPI; not public

from convbert_jax.config import ConfigError
from convbert_jax.training.environment import exchange

_REMINDER = 30.0  # seconds between two lines about who is missing
_PAUSE = 0.5  # seconds between two tries to reach the first process
_GREETING = 5.0  # seconds for a stranger to say who it is
_LONGEST = 65_536  # bytes of one word
Word = Mapping[str, Any]  # what one process says to another: "kind", and fields of that kind
Advice = Callable[[Sequence[int]], str]  # numbers of missing processes -> what to do


class Place(NamedTuple):
    """One of several processes."""

    coordinator: str  # HOST:PORT of the first one
    count: int
    index: int


class Link:
    """A connection to another process: lines of JSON both ways, from any thread."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._rest = b""
        self._sending = threading.Lock()

    def say(self, kind: str, **fields: Any) -> None:
        """Raises OSError where nobody listens any more."""
        with self._sending:
            self._connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def hear(self, seconds: float) -> Word | None:
        """The next word, None at the end.

        Raises:
          TimeoutError: there is none within so many seconds.
          OSError: the connection is broken.
          ValueError: what came is no word.
        """
        self._connection.settimeout(seconds)
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST:
                raise ValueError("a line without an end")
            if not (more := self._connection.recv(4096)):
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        word = json.loads(line)
        if not isinstance(word, dict) or not isinstance(word.get("kind"), str):
            raise ValueError("no word")
        return word

    def finish(self) -> None:
        """Says nothing more; what was said arrives, which closing would not promise."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()


def find_place() -> Place:
    """This process as a TPU slice, Slurm or Open MPI has started it.

    Raises:
      ConfigError: none of them has, or it does not say all.
    """
    found: Sequence[Any] = (None,) * 3
    fault = "no TPU slice of several hosts, Slurm or Open MPI has started this process"
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, 300
        )[:3]
    except (ValueError, RuntimeError, OSError) as error:
        fault = str(error).partition("\n")[0].rstrip(".")
    if None in found:
        raise ConfigError(
            f"--multihost: {fault}; start the same command on every host of a TPU slice, with srun "
            "or with mpirun, name the processes with --coordinator, or leave --multihost out."
        )
    return Place(*found)


def gather(place: Place, patience: float, advise: Advice, add: Callable[[int, Link], None]) -> None:
    """Returns on the first process when all others have come.

    Args:
      patience: seconds.
      add: is called with the number of each other process and the connection to it.

    Raises:
      ConfigError: some have not come in time, one is no part of this, or the port is taken.
    """
    waiting = _Waiting(place, patience, advise)
    missing = set(range(1, place.count))
    with _listen(place) as listener:
        while missing:
            how = "has not come" if len(missing) == 1 else "have not come"
            listener.settimeout(waiting.check(sorted(missing), how))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            link = Link(connection)
            index = _greet(link, place, missing)
            if index is None:
                link.close()
            else:
                missing.remove(index)
                add(index, link)


def reach(place: Place, patience: float, advise: Advice) -> Link:
    """The connection of another process to the first one.

    Args:
      patience: seconds.

    Raises:
      ConfigError: the first process does not answer in time, or has no place for this one.
    """
    waiting = _Waiting(place, patience, advise)
    host, port = _address(place)
    why = "no answer"
    while True:
        left = waiting.check([0], f"does not answer at {place.coordinator}", f" ({why})")
        try:
            link = Link(socket.create_connection((host, port), timeout=left))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_PAUSE)
            continue
        with contextlib.suppress(OSError, ValueError):  # another program, or one that ends
            link.say("here", process=place.index, count=place.count)
            answer = link.hear(waiting.left())
            if answer and answer["kind"] == "welcome":
                return link
            if answer and answer["kind"] == "refused":
                raise ConfigError(str(answer.get("sentence")))
        link.close()
        why = "another program is there, or it has ended"
        time.sleep(_PAUSE)


class _Waiting:
    """How long one waits, and what is said of it."""

    def __init__(self, place: Place, patience: float, advise: Advice):
        self._count, self._patience, self._advise = place.count, patience, advise
        self._began = time.monotonic()
        self._next = _REMINDER

    def left(self) -> float:
        """Seconds."""
        return max(0.01, self._began + self._patience - time.monotonic())

    def check(self, missing: Sequence[int], how: str, why: str = "") -> float:
        """Seconds until the next call is due. Raises ConfigError where the time is up."""
        past = time.monotonic() - self._began
        sentence = (
            f"{exchange.by_number(missing)} of {self._count} {how} within {past:.0f} s{why}; "
            f"{self._advise(missing)}."
        )
        if past >= self._patience:
            raise ConfigError(sentence)
        if past >= self._next:
            self._next += _REMINDER
            logging.info("Still waiting: %s", sentence)
        return max(0.01, min(self._next, self._patience) - past)


def _listen(place: Place) -> socket.socket:
    _, port = _address(place)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=place.count, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen on port {port} of this machine ({error.strerror}); end the "
            "run or the program that has it, or name another port to all processes."
        ) from error


def _greet(link: Link, place: Place, missing: set[int]) -> int | None:
    """The number of the process at the other end, None if it is no process.

    Raises:
      ConfigError: one that cannot be, which is told to it too.
    """
    try:
        word = link.hear(_GREETING)
    except (OSError, ValueError):
        return None
    if not word or word["kind"] != "here":
        return None
    index, count, fault = word.get("process"), word.get("count"), ""
    if count != place.count:
        fault = (
            f"process {index} is one of {count}, process 0 one of {place.count}; start the same "
            "command on every host."
        )
    elif index not in missing:
        fault = f"process {index} of {count} is here twice; give each a number of its own."
    with contextlib.suppress(OSError):
        link.say("refused" if fault else "welcome", sentence=fault)
    if fault:
        raise ConfigError(fault)
    return index


def _address(place: Place) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")
    return host.strip("[]"), int(port)
