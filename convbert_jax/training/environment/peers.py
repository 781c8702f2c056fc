"""When one of several processes ends, the others say so in one sentence and end too, at once.

Left alone, jax notices after 0.4 to 100 seconds and aborts with a stack trace of C++. Here each
process keeps a connection to the first one, which the system closes when either of them ends,
however it ends; the first one tells the others.
"""

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from absl import logging
from jax._src import distributed  # its client keeps words for all processes; not public
from jax.experimental import multihost_utils

from convbert_jax import interrupts
from convbert_jax.training.environment import exchange

EXIT_CODE = interrupts.TRY_AGAIN  # the same command goes on from the last checkpoint
_KEY = "convbert_jax/peers"  # where the first process says where it listens
_START = 300  # seconds for the first process to come here, as jax gives it to come at all
_PATIENCE = 10.0  # seconds for a connection, and for a death to be told before its consequences
_GRACE = 1.0  # seconds for a process to say its own error before it ends for another's
_LINGER = 3.0  # seconds that the first process stays with its error: jax aborts those it leaves
_DONE, _FAILED, _ENDED = b".", b"!", b"-"  # one byte before a process's number


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Context in which the end of any other process ends this one, with `EXIT_CODE`.

    Call it on all processes after `jax.distributed.initialize`. An error inside is told to the
    others as well, and this process then ends without waiting for them.
    """
    peers = _Peers()
    try:
        peers.connect()
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_PATIENCE)  # the consequence of a death, which is told any moment
        peers.leave(_FAILED)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        atexit.register(_exit, code)  # runs before jax's own, which waits for all processes
        raise
    peers.leave(_DONE)


def wait_for_all(what: str) -> None:
    """Returns when all processes are here, at once if this is the only one.

    Args:
      what: the same on all; tells this place from others.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def choice_of_first(value: int) -> int:
    """The small number that the first process gave, on all; they all call it."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def is_same_on_all(text: str) -> bool:
    """Whether all processes gave the same; they all call it and get the same answer."""
    if jax.process_count() == 1:
        return True
    digests = multihost_utils.process_allgather(np.uint32(zlib.crc32(text.encode())))
    return bool((digests == digests[0]).all())


class _Peers:
    """The connections of this process: of the first one to all, of the others to the first."""

    def __init__(self):
        self._index, self._count = exchange.place()  # jax itself would look for devices
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._server: socket.socket | None = None
        self._left = False

    def connect(self) -> None:
        if self._count == 1:
            return
        client = distributed.global_state.client
        if self._index == 0:
            # A stranger's connection must not pass for a process: it does not know the word.
            word = secrets.token_hex(16)
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._server = socket.create_server(
                ("", 0), family=family, backlog=self._count, dualstack_ipv6=both
            )
            threading.Thread(target=self._accept, args=(word,), daemon=True).start()
            client.key_value_set(_KEY, f"{self._server.getsockname()[1]} {word}")
            return
        port, word = client.blocking_key_value_get(_KEY, 1000 * _START).split()
        host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
        try:
            connection = socket.create_connection((host, int(port)), _PATIENCE)
            connection.sendall(f"{word} {self._index:8}".encode())
        except OSError as error:
            logging.warning(
                "Process 0 cannot be reached at %s:%s (%s): when a process ends, jax alone will "
                "tell, after 100 seconds.",
                host,
                port,
                error.strerror or error,
            )
            return
        self._listen(connection, 0)

    def leave(self, how: bytes) -> None:
        """Says goodbye; from now on nobody's end ends this process."""
        with self._lock:
            self._left = True
            self._tell(how, self._index)
            for connection in self._connections:
                connection.close()
        if self._server:
            self._server.close()

    def _accept(self, word: str) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
                connection.settimeout(_PATIENCE)
                said, _, index = (
                    connection.recv(len(word) + 9, socket.MSG_WAITALL).decode().partition(" ")
                )
            except (OSError, UnicodeDecodeError):
                if self._left:
                    return
                continue
            if secrets.compare_digest(said.encode(), word.encode()) and index.strip().isdecimal():
                self._listen(connection, int(index))
            else:
                connection.close()

    def _listen(self, connection: socket.socket, index: int) -> None:
        connection.settimeout(None)
        # A host that is gone closes nothing: after a minute without an answer it counts as ended.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._connections.append(connection)
        threading.Thread(target=self._wait, args=(connection, index), daemon=True).start()

    def _wait(self, connection: socket.socket, index: int) -> None:
        try:
            said = connection.recv(9, socket.MSG_WAITALL)
        except OSError:
            said = b""
        how, number = said[:1] or _ENDED, said[1:].decode(errors="replace").strip()
        if how == _DONE:
            return
        if how == _FAILED:  # an error of the data or the numbers comes to all at once
            time.sleep(_GRACE)
        ended = int(number) if number.isdecimal() else index
        sentence = (
            f"error: process {ended} of {self._count} has ended, so this one ends too; its own "
            "last lines say why; start all of them again, the run goes on from the last "
            "checkpoint.\n"
        )
        with self._lock:
            if self._left:
                return
            # Straight to the file: other threads may hold what a stream waits for.
            os.write(2, sentence.encode())
            self._tell(_ENDED, ended)
            os._exit(EXIT_CODE)

    def _tell(self, how: bytes, index: int) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(how + f"{index:8}".encode())


def _exit(code: int) -> None:
    if exchange.place()[0] == 0:
        time.sleep(_LINGER)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
