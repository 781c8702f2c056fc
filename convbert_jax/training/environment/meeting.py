"""Rendezvous of several processes before `jax.distributed` starts, which names missing processes.

All processes connect to process 0 at the coordinator's address. JAX's own service takes over the
port once all have connected; it would neither name nor count processes that are late, and its
timeout aborts with a C++ stack trace.

Connections are not authenticated, as in JAX's service: a program that knows the protocol can take
the number of a process that has not connected yet. Anything else that connects is dropped.
"""

import contextlib
import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from jax._src import clusters  # finds TPU slices, Slurm and Open MPI; not public

from convbert_jax import files
from convbert_jax.config import ConfigError
from convbert_jax.training.environment import exchange

_REMINDER = 30.0  # seconds between two lines about who is missing
_PAUSE = 0.5  # seconds between two tries to reach the first process
_POLL = 0.05  # seconds that process 0 waits for a connection before it looks at greetings
_GREETING = 5.0  # seconds for a new connection to send its whole greeting
_MOST_GREETINGS = 64  # connections, beside those of the processes, that may be greeting at once
_LONGEST = 65_536  # bytes of one word
_LARGEST = 2**31  # process numbers and counts are below
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
        """Returns the next message, None at the end of the connection.

        Raises:
          TimeoutError: it was not complete within `seconds`; the next call goes on reading it.
          OSError: the connection is broken.
          ValueError: it is malformed; the next call reads what follows.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST:
                self._rest = b""
                raise ValueError(f"a line of more than {_LONGEST:,} bytes")
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (more := self._connection.recv(4096)):
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        word = files.parse_json(line)
        if not isinstance(word, dict) or not isinstance(word.get("kind"), str):
            raise ValueError("a line that is not a message")
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
    """Waits on process 0 until all other processes have connected.

    Connections that are not one of them are dropped. Each is read by a thread of its own, so a slow
    one delays nobody.

    Args:
      patience: seconds.
      add: called with each other process's number and its connection.

    Raises:
      ConfigError: some have not connected in time, or the port is taken.
    """
    waiting = _Waiting(place, patience, advise)
    missing = set(range(1, place.count))
    greetings: queue.SimpleQueue[tuple[Link, Word | None]] = queue.SimpleQueue()
    open_greetings, refused = 0, ""
    with _listen(place) as listener:
        while missing:
            how = "has not come" if len(missing) == 1 else "have not come"
            listener.settimeout(min(_POLL, waiting.check(sorted(missing), how, refused)))
            with contextlib.suppress(OSError):  # nobody connects, or the connection is gone again
                connection, _ = listener.accept()
                if open_greetings < _MOST_GREETINGS + place.count:
                    open_greetings += 1
                    arguments = (Link(connection), greetings)
                    threading.Thread(target=_hear_greeting, args=arguments, daemon=True).start()
                else:
                    connection.close()
            while missing and not greetings.empty():
                open_greetings -= 1
                link, word = greetings.get()
                try:
                    index = _admit(link, word, place, missing)
                except ConfigError as error:
                    refused = f" (refused: {str(error).rstrip('.')})"
                    link.close()
                except ValueError:
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


def bind_host(place: Place) -> str:
    """Returns the local address that process 0 listens on, "" for all interfaces.

    This is the coordinator's address. All interfaces are used where the coordinator's name means
    this machine only to others: Debian resolves a host's own name to 127.0.1.1, and no interface
    has an address that a router translates.
    """
    host, _ = _address(place)
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in sorted(
            socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        ):
            loopback = ipaddress.ip_address(address[0]).is_loopback
            if loopback and not host.startswith(("localhost", "127.", "::1")):
                continue
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return address[0]
    return ""


def _listen(place: Place) -> socket.socket:
    host, (_, port) = bind_host(place), _address(place)
    every = not host and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if every or ":" in host else socket.AF_INET,
            backlog=place.count + 100,
            dualstack_ipv6=every,
        )
    except OSError as error:
        raise ConfigError(
            f"Process 0 cannot listen on port {port} of {host or 'this machine'}: "
            f"{error.strerror}. Stop the program that uses the port, or give all processes another "
            "port."
        ) from error


def _hear_greeting(link: Link, greetings: queue.SimpleQueue) -> None:
    try:
        word = link.hear(_GREETING)
    except (OSError, ValueError):
        word = None
    greetings.put((link, word))


def _admit(link: Link, word: Word | None, place: Place, missing: set[int]) -> int:
    """Answers a greeting and returns the number of the process that sent it.

    Raises:
      ValueError: it was not sent by a process.
      ConfigError: this process cannot be part of the run; it is told so.
    """
    match word:
        case {"kind": "here", "process": int(index), "count": int(count)} if (
            0 <= index < _LARGEST and 0 <= count < _LARGEST
        ):
            pass
        case _:
            logging.log_first_n(
                logging.WARNING,
                "Dropped a connection to %s that did not come from a process of this run; further "
                "ones are not logged.",
                1,
                place.coordinator,
            )
            raise ValueError("not a greeting")
    fault = ""
    if count != place.count:
        fault = (
            f"Process {index} was started with --processes={count}, process 0 with "
            f"--processes={place.count}. Start the same command on every host."
        )
    elif index not in missing:
        fault = (
            f"Process {index} of {count} cannot join: the number is taken or not between 1 and "
            f"{count - 1}. Give each process its own number."
        )
    with contextlib.suppress(OSError):
        link.say("refused" if fault else "welcome", sentence=fault)
    if fault:
        logging.log_first_n(logging.WARNING, "%s", 10, fault)
        raise ConfigError(fault)
    return index


def _address(place: Place) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")
    return host.strip("[]"), int(port)
