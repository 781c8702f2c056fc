"""Connects the processes of a run, and ends all of them when one of them ends.

Each process keeps a TCP connection to process 0, from before JAX starts until it exits. The
connections carry heartbeats, errors, stop requests and small JSON values; no device is used and
nothing is compiled. JAX's own service cannot replace them (jaxlib 0.10.2 and 0.12): if a process is
missing or dies, JAX aborts the others with exit code 134 and a C++ stack trace, does not name the
process, and its `missed_heartbeat_callback` raises std::bad_cast.

Connections are not authenticated, as in JAX's service: the port needs a private network. A program
that knows the protocol can take the number of a process that has not connected yet. All other
connections are dropped, and no exit code is taken from a message.
"""

import atexit
import contextlib
import faulthandler
import ipaddress
import itertools
import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from convbert_jax import interrupts, storage
from convbert_jax.config import ConfigError, UserError
from convbert_jax.training import environment

EXIT_CODE = interrupts.TRY_AGAIN  # the same command continues from the last checkpoint
_FAILED = 1  # exit code of an error, which would happen again
_REMINDER = 30.0  # seconds between two log lines about missing processes
_RETRY = 0.5  # seconds between two attempts to reach process 0
_POLL = 0.05  # seconds that process 0 waits for a connection at a time
_GREETING = 5.0  # seconds for a new connection to send its whole greeting
_MAX_GREETINGS = 64  # connections of strangers that may be greeting at once
_MAX_BYTES = 2**20  # of a message
_MAX_PROCESSES = 2**31
_MAX_SENTENCE = 2_000  # characters
_HEARTBEAT = 2.0  # seconds between two heartbeats
_JAX_HEARTBEAT = 100  # seconds after which JAX considers a process dead, its default
_PATIENCE = 10.0  # seconds for the exit of a process to be reported before its consequences
_GRACE = 1.0  # seconds for a process to print its own error before it exits for another's
_LINGER = 3.0  # seconds that process 0 stays after an error: JAX aborts the processes it leaves
_MARGIN = 30.0  # seconds more than the timeout of process 0 for its answer to arrive
Message = Mapping[str, Any]  # "kind", and the fields of that kind
Hint = Callable[[Sequence[int]], str]  # numbers of missing processes -> a sentence: what to do
_T = TypeVar("_T")
_group: "_Group | None" = None  # of this process


class ProcessId(NamedTuple):
    """One of several processes."""

    coordinator: str  # HOST:PORT of process 0
    count: int
    index: int


class SilentProcessError(UserError):
    """Process 0 is connected, but does not answer."""


def detect_process() -> ProcessId:
    """Returns the number of this process on a TPU slice, under Slurm or Open MPI.

    Raises:
      ConfigError: none of them started this process, or the information is incomplete.
    """
    found: Sequence[Any] = (None,) * 3
    fault = "no TPU slice of several hosts, Slurm or Open MPI started this process"
    try:
        found = environment.detect_cluster()
    except (ValueError, RuntimeError, OSError) as error:
        fault = str(error).partition("\n")[0].rstrip(".")
    if None in found:
        raise ConfigError(
            f"--multihost: {fault}. Start the same command on every host of a TPU slice, with srun "
            "or with mpirun; or use --coordinator, or remove --multihost.",
            field="--multihost",
        )
    return ProcessId(*found)


@contextlib.contextmanager
def connect(process: ProcessId, *, timeout: float, silence: float, hint: Hint) -> Iterator[None]:
    """Connects all processes.

    If another process exits inside the block, this one exits too: with the error message of that
    process and exit code 1, or with `EXIT_CODE`.

    An error inside the block is sent to the others; this process then exits without waiting.

    Args:
      timeout: seconds to wait for all processes.
      silence: seconds without a heartbeat after which a process counts as lost.

    Raises:
      ConfigError: a process is missing, or cannot be part of this run.
    """
    global _group
    group = _group = _Group(process, silence)
    try:
        group.meet(timeout, hint)
        _connect_jax(process, timeout, silence)
        yield
        # Waits for all processes. JAX would do so at interpreter exit, and abort there with a
        # stack trace if one is lost meanwhile.
        jax.distributed.shutdown()
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_PATIENCE)  # a consequence of an exit that is reported any moment
        code = _FAILED
        if isinstance(error, KeyboardInterrupt):
            by = error.by if isinstance(error, interrupts.Stopped) else "SIGINT"
            code = interrupts.exit_code(by)
        group.leave({**_describe_error(error), "process": process.index})
        atexit.register(_exit, code)  # before JAX's exit function, which waits for all processes
        if process.index == 0:
            time.sleep(_LINGER)
        raise
    finally:
        _group = None
    group.leave({"kind": "done"})


def place() -> tuple[int, int]:
    """Returns the number of this process and the number of processes."""
    return (0, 1) if _group is None else (_group.process.index, _group.process.count)


def is_connected() -> bool:
    """Returns whether this process is inside of `connect`."""
    return _group is not None


def exit_after_hang() -> NoReturn:
    """Ends this process and all others with `EXIT_CODE` and the stack traces of all threads."""
    faulthandler.dump_traceback(sys.__stderr__)
    if _group:
        _group.report_hang()
    os._exit(EXIT_CODE)


def barrier(name: str) -> None:
    """Waits for all processes. `name` is the same on all processes and unique to the call site."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def broadcast_int(value: int) -> int:
    """Returns the small number of process 0; all processes call it."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def is_same_on_all(text: str) -> bool:
    """Returns on all processes whether all of them passed the same text."""
    if jax.process_count() == 1:
        return True
    digests = multihost_utils.process_allgather(np.uint32(zlib.crc32(text.encode())))
    return bool((digests == digests[0]).all())


def decide(value: object, function: Callable[[list], _T], timeout: float) -> _T:
    """Returns on all processes what `function` returns on process 0; all processes call it.

    Args:
      value: of this process, JSON-serializable.
      function: takes the values of all processes by process number, None if the value of a process
        did not arrive in time; returns a JSON-serializable answer.
      timeout: seconds to wait for the values.

    Raises:
      SilentProcessError: process 0 does not answer.
    """
    value = json.loads(json.dumps(value))  # tuples become lists, as in the other processes
    if _group is None:
        return json.loads(json.dumps(function([value])))
    return _group.decide(value, function, timeout)


def broadcast(value: object, timeout: float) -> object:
    """Returns the value of process 0; all processes call it. Raises as `decide`."""
    return decide(value, lambda values: values[0], timeout)


def name_processes(numbers: Sequence[int]) -> str:
    """Returns "process 3" or "processes 1, 2 and 5"; of many, the first ones."""
    names = [str(number) for number in numbers]
    if not names:
        return "no process"
    if len(names) == 1:
        return f"process {names[0]}"
    if len(names) > 6:
        return f"processes {', '.join(names[:5])} and {len(names) - 5} more"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"


class StopAgreement:
    """Makes all processes stop after the same step.

    A context around steps that all processes run in the same order. Nothing is sent until a process
    requests a stop. Process 0 forwards the request; each process then starts no further step and
    sends the number of the step that it runs. All stop after the largest of these numbers, so no
    process waits in a step that another one never starts. A request that is too late for one
    context applies to the next.
    """

    def __init__(self, group: "_Group | None" = None):
        """
        Args:
          group: of this process if None.
        """
        self._group = group or _group
        self._number = next(self._group.agreements)  # the same on all processes
        self._started = 0  # the step that runs, or starts without asking
        self._announced = False  # `_started` was sent
        self._lock = threading.Lock()

    def __enter__(self):
        self._group.agreement = self
        if self._group.requested():
            self.announce()
        return self

    def __exit__(self, *exception):
        self._group.agreement = None
        if exception[0] is None:
            self.announce()  # the others may ask for it later

    def request(self, by: str) -> None:
        """Asks all processes to stop. `by` is the name of a signal."""
        self._group.request_stop(by)

    def stops_after(self, done: int) -> str | None:
        """Returns the signal's name if all processes stop after step `done`, otherwise None."""
        with self._lock:
            if not self._announced:
                self._started = done + 1
                return None
        if done < self._group.last_step(self._number):
            return None
        return self._group.follow_request()

    def announce(self) -> None:
        """Sends the number of the running step; from then on, no step starts without an answer."""
        with self._lock:
            if not self._announced:
                self._announced = True
                self._group.announce(self._number, self._started)


class _Connection:
    """A TCP connection that carries lines of JSON; threads may send at the same time."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError if the connection is closed."""
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Message | None:
        """Returns the next message, None at the end of the connection.

        Raises:
          TimeoutError: it was not complete within `seconds`; the next call continues to read it.
          OSError: the connection is broken.
          ValueError: it is malformed; the next call reads what follows.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if len(self._rest) > _MAX_BYTES:
                self._rest = b""
                raise ValueError(f"more than {_MAX_BYTES:,} bytes")
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (more := self._connection.recv(2**16)):
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        message = storage.parse_json(line)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("not a message")
        return message

    def finish(self) -> None:
        """Sends nothing more. What was sent arrives, which `close` does not guarantee."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()


class _Group:
    """The connections of this process: of process 0 to all others, of the others to process 0."""

    def __init__(self, process: ProcessId, silence: float):
        self.process = process
        self.agreements = itertools.count()
        self.agreement: StopAgreement | None = None  # the current one
        self._silence = silence
        self._connections: dict[int, _Connection] = {}
        self._all_here, self._over = threading.Event(), threading.Event()
        self._leaving = threading.Lock()
        self._left = False
        self._calls = itertools.count()  # of `decide`, the same on all processes
        self._changed = threading.Condition()  # guards all below
        self._values: dict[tuple[str, int], Any] = {}  # (name, process) -> value
        self._requests: dict[int, str] = {}  # round -> signal
        self._round = 0  # requests followed so far
        self._last_steps: dict[int, int] = {}  # agreement -> step

    def meet(self, timeout: float, hint: Hint) -> None:
        """Waits for all processes."""
        process = self.process
        if process.count == 1:
            return
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        logging.info("Connecting %d processes at %s.", process.count, process.coordinator)
        if process.index:
            self.add(0, _reach(process, timeout, hint))
            logging.info("Connected to process 0; waiting for the other processes.")
            self._all_here.wait()
        else:
            _accept(process, timeout, hint, self.add)
            self.send({"kind": "all here"})

    def add(self, index: int, connection: _Connection) -> None:
        """Watches the connection to process `index`."""
        self._connections[index] = connection
        threading.Thread(target=self.listen, args=(index, connection), daemon=True).start()

    def leave(self, last: Message) -> None:
        """Sends a last message; from now on no exit of another process ends this one."""
        self._over.set()
        with self._leaving:
            self._left = True
            self.send(last)
            for connection in self._connections.values():
                connection.finish()

    def report_hang(self) -> None:
        with self._leaving:
            self.send({"kind": "hangs", "process": self.process.index})
            self._linger()

    def send(self, message: Message) -> None:
        """Sends a message to all connected processes."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.send(message)

    def take(self, name: str, processes: Sequence[int], timeout: float) -> list:
        """Waits for values; returns None for those that do not arrive in time."""
        keys = [(name, index) for index in processes]
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout)
            return [self._values.pop(key, None) for key in keys]

    def decide(self, value: object, function: Callable[[list], _T], timeout: float) -> _T:
        name = f"call {next(self._calls)}"
        if self.process.index:
            self.send({"kind": "value", "name": name, "value": value})
            (answer,) = self.take(name, [0], timeout + _MARGIN)
            if answer is None:
                raise SilentProcessError(
                    f"Process 0 of {self.process.count} has not answered for "
                    f"{timeout + _MARGIN:.0f} s. Look at its log and its host, end all processes "
                    "and start them again."
                )
            return answer[0]
        values = [value, *self.take(name, range(1, self.process.count), timeout)]
        answer = function(values)
        self.send({"kind": "value", "name": name, "value": [answer]})
        return json.loads(json.dumps(answer))

    def requested(self) -> str | None:
        """Returns the signal of a request that was not followed yet."""
        with self._changed:
            return self._requests.get(self._round)

    def request_stop(self, by: str) -> None:
        self._receive_stop({"kind": "stop", "round": self._round, "by": by})
        if self.process.index:
            self.send({"kind": "stop", "round": self._round, "by": by})

    def announce(self, agreement: int, step: int) -> None:
        if self.process.index:
            self.send({"kind": "step", "agreement": agreement, "step": step})
        else:
            self._receive_step(0, agreement, step)

    def last_step(self, agreement: int) -> int:
        """Waits until all processes have sent their step; returns the largest."""
        with self._changed:
            self._changed.wait_for(lambda: agreement in self._last_steps)
            return self._last_steps[agreement]

    def follow_request(self) -> str:
        with self._changed:
            self._round += 1
            return self._requests.pop(self._round - 1)

    def listen(self, index: int, connection: _Connection) -> None:
        """Reads the messages of process `index` until its last one, or until it is silent."""
        missed = 0  # heartbeats instead of seconds: a machine that sleeps has not waited
        while missed * _HEARTBEAT < self._silence:
            try:
                message = connection.receive(_HEARTBEAT)
            except TimeoutError:
                missed += 1
                continue
            except OSError:
                message = None
            except ValueError as error:
                _log_dropped(index, error)
                continue
            missed = 0
            match message:
                case None:
                    self._end_with({"kind": "exited", "process": index})
                    return
                case {"kind": "beat"}:
                    pass
                case {"kind": "all here"}:
                    self._all_here.set()
                case {"kind": "done"}:
                    return
                case {"kind": "value", "name": str(name), "value": value}:
                    self._store(name, index, value)
                case {"kind": "stop", "round": int(), "by": "SIGTERM" | "SIGINT"}:
                    self._receive_stop(message)
                case {"kind": "step", "agreement": int(agreement), "step": int(step)}:
                    self._receive_step(index, agreement, step)
                case {"kind": "last step", "agreement": int(agreement), "step": int(step)}:
                    self._set_last_step(agreement, step)
                case {"kind": "failed" | "hangs" | "silent" | "exited", "process": int(who)} if (
                    0 <= who < self.process.count
                ):
                    sentence = _printable(message.get("sentence"))
                    self._end_with({"kind": message["kind"], "process": who, "sentence": sentence})
                    return
                case _:
                    _log_dropped(index, "an unknown message")
        self._end_with({"kind": "silent", "process": index})

    def _store(self, name: str, index: int, value: Any) -> None:
        with self._changed:
            self._values[name, index] = value
            self._changed.notify_all()

    def _receive_stop(self, message: Message) -> None:
        with self._changed:
            known = message["round"] < self._round or message["round"] in self._requests
            if not known:
                self._requests[message["round"]] = message["by"]
        if known:
            return
        if self.process.index == 0:
            self.send(message)
        if agreement := self.agreement:
            agreement.announce()

    def _receive_step(self, index: int, agreement: int, step: int) -> None:
        """Collects the steps of all processes on process 0."""
        name, everyone = f"step {agreement}", range(self.process.count)
        with self._changed:
            self._values[name, index] = step
            if any((name, i) not in self._values for i in everyone):
                return
            last = max(self._values.pop((name, i)) for i in everyone)
        self.send({"kind": "last step", "agreement": agreement, "step": last})
        self._set_last_step(agreement, last)

    def _set_last_step(self, agreement: int, step: int) -> None:
        with self._changed:
            self._last_steps[agreement] = step
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._over.wait(_HEARTBEAT):
            self.send({"kind": "beat"})

    def _end_with(self, message: Message) -> None:
        """Ends this process because of another one."""
        self.send(message)
        failed = message["kind"] == "failed"
        if failed:  # an error of the data or the numbers occurs on all processes at once
            time.sleep(_GRACE)
        with self._leaving:
            if self._left:
                return
            # Not through a stream, whose lock another thread may hold.
            os.write(2, f"error: {self._explain(message)}\n".encode())
            if message["kind"] == "hangs":
                faulthandler.dump_traceback(2)
            self._linger()
            os._exit(_FAILED if failed else EXIT_CODE)

    def _explain(self, message: Message) -> str:
        if message["kind"] == "failed":
            return f"Process {message['process']}: {message['sentence']}"
        happened, look = {
            "hangs": ("hangs", "The stack traces of this process follow."),
            "silent": (
                f"has sent no heartbeat for {self._silence:.0f} s",
                "It is stopped, or its host or the network is down.",
            ),
        }.get(message["kind"], ("has exited", "See its log."))
        return (
            f"Process {message['process']} of {self.process.count} {happened}; this process exits "
            f"too. {look} Start all processes again to continue from the last checkpoint."
        )

    def _linger(self) -> None:
        if self.process.index == 0 and self.process.count > 2:
            time.sleep(_LINGER)


def _accept(
    process: ProcessId, timeout: float, hint: Hint, add: Callable[[int, _Connection], None]
) -> None:
    """Waits on process 0 until all other processes have connected.

    A thread reads each new connection, so a slow one delays no other.

    Args:
      add: called with the number and the connection of each process.

    Raises:
      ConfigError: a process is missing after `timeout` seconds, or the port is in use.
    """
    wait = _Wait(process, timeout, hint)
    missing, lock = set(range(1, process.count)), threading.Lock()
    slots = threading.BoundedSemaphore(_MAX_GREETINGS + process.count)
    refused = ""

    def greet(connection: _Connection) -> None:
        nonlocal refused
        try:
            message = connection.receive(_GREETING)
        except (OSError, ValueError):
            message = None
        with lock:
            index, fault = _admit(message, process, missing)
            if index is None:
                connection.close()
            else:
                answer = {"kind": "refused" if fault else "welcome", "sentence": fault}
                with contextlib.suppress(OSError):
                    connection.send(answer)
                if fault:
                    refused = f" (refused: {fault.rstrip('.')})"
                    connection.close()
                else:
                    missing.remove(index)
                    add(index, connection)
        slots.release()

    with _listen(process) as listener:
        while True:
            with lock:
                absent = sorted(missing)
            if not absent:
                return
            left = wait.check(absent, f"did not connect to {process.coordinator}", refused)
            listener.settimeout(min(_POLL, left))
            with contextlib.suppress(OSError):  # timeout, or the client closed the connection
                connection, _ = listener.accept()
                if slots.acquire(blocking=False):
                    arguments = (_Connection(connection),)
                    threading.Thread(target=greet, args=arguments, daemon=True).start()
                else:
                    connection.close()


def _reach(process: ProcessId, timeout: float, hint: Hint) -> _Connection:
    """Connects another process to process 0.

    Raises:
      ConfigError: process 0 does not answer within `timeout` seconds, or refuses this process.
    """
    wait = _Wait(process, timeout, hint)
    why = "no answer"
    while True:
        left = wait.check([0], f"does not answer at {process.coordinator}", f" ({why})")
        try:
            connection = _Connection(socket.create_connection(_address(process), timeout=left))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_RETRY)
            continue
        with contextlib.suppress(OSError, ValueError):  # another program, or one that exits
            connection.send({"kind": "here", "process": process.index, "count": process.count})
            answer = connection.receive(wait.left())
            if answer and answer["kind"] == "welcome":
                return connection
            if answer and answer["kind"] == "refused":
                raise ConfigError(_printable(answer.get("sentence")))
        connection.close()
        why = "another program uses the port, or process 0 has exited"
        time.sleep(_RETRY)


class _Wait:
    """Timeout and log lines while waiting for processes."""

    def __init__(self, process: ProcessId, timeout: float, hint: Hint):
        self._count, self._timeout, self._hint = process.count, timeout, hint
        self._began = time.monotonic()
        self._next = _REMINDER

    def left(self) -> float:
        """Returns the remaining seconds."""
        return max(0.01, self._began + self._timeout - time.monotonic())

    def check(self, missing: Sequence[int], how: str, why: str = "") -> float:
        """Returns the seconds until the next call. Raises ConfigError when the time is over."""
        passed = time.monotonic() - self._began
        who = name_processes(missing)
        sentence = (
            f"{who[0].upper()}{who[1:]} of {self._count} {how} within {passed:.0f} s{why}. "
            f"{self._hint(missing)}"
        )
        if passed >= self._timeout:
            raise ConfigError(sentence)
        if passed >= self._next:
            self._next += _REMINDER
            logging.info("Still waiting. %s", sentence)
        return max(0.01, min(self._next, self._timeout) - passed)


def _bind_host(process: ProcessId) -> str:
    """Returns the local address that process 0 listens on, "" for all interfaces.

    This is the coordinator's address. All interfaces are used if the coordinator's name means
    this machine only to others: Debian resolves a host's own name to 127.0.1.1, and no interface
    has an address that a router translates.
    """
    host, _ = _address(process)
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


def _listen(process: ProcessId) -> socket.socket:
    host, (_, port) = _bind_host(process), _address(process)
    every = not host and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if every or ":" in host else socket.AF_INET,
            backlog=process.count + 100,
            dualstack_ipv6=every,
        )
    except OSError as error:
        raise ConfigError(
            f"Process 0 cannot listen on port {port} of {host or 'this machine'}: "
            f"{error.strerror}. Stop the program that uses the port, or give all processes another "
            "port.",
            field="port",
            value=port,
        ) from error


def _admit(
    message: Message | None, process: ProcessId, missing: set[int]
) -> tuple[int | None, str]:
    """Returns the number of the process that sent a greeting and why it is refused, "" if not.

    The number is None if no process of a run sent the message.
    """
    match message:
        case {"kind": "here", "process": int(index), "count": int(count)} if (
            0 <= index < _MAX_PROCESSES and 0 <= count < _MAX_PROCESSES
        ):
            pass
        case _:
            logging.log_first_n(
                logging.WARNING,
                "Dropped a connection to %s that did not come from a process of this run; further "
                "ones are not logged.",
                1,
                process.coordinator,
            )
            return None, ""
    if count == process.count and index in missing:
        return index, ""
    fault = (
        f"Process {index} with --processes={count} cannot join: process 0 has "
        f"--processes={process.count} and waits for {name_processes(sorted(missing))}. Start the "
        "same command on every host, each with its own number."
    )
    logging.log_first_n(logging.WARNING, "%s", 10, fault)
    return index, fault


def _address(process: ProcessId) -> tuple[str, int]:
    host, _, port = process.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _connect_jax(process: ProcessId, timeout: float, silence: float) -> None:
    # JAX's preemption service would replace the handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = _bind_host(process), process.coordinator.rpartition(":")[2]
    host = f"[{host}]" if ":" in host else host
    try:
        jax.distributed.initialize(
            *process,
            coordinator_bind_address=f"{host}:{port}" if host else None,  # None: all interfaces
            initialization_timeout=int(timeout) + 1,
            heartbeat_timeout_seconds=max(_JAX_HEARTBEAT, int(2 * silence)),
        )
    except (ValueError, RuntimeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"JAX cannot connect {process.count} processes at {process.coordinator}: {first}. "
            "Start all processes again."
        ) from error


def _describe_error(error: BaseException) -> dict[str, Any]:
    """Returns the message to the other processes about the error that ends this one."""
    if isinstance(error, (KeyboardInterrupt, jax.errors.JaxRuntimeError)):
        return {"kind": "exited"}
    sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"kind": "failed", "sentence": _printable(sentence)}


def _printable(text: object) -> str:
    """Returns `text` on one line, without control characters and of limited length."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(shown.split())[:_MAX_SENTENCE]


def _log_dropped(index: int, what: object) -> None:
    logging.log_first_n(
        logging.WARNING,
        "Ignored a malformed message from process %d (%s); further ones are not logged.",
        1,
        index,
        what,
    )


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
