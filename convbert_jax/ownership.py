"""Exclusive ownership of a folder in a bucket, which has no locks, by heartbeats.

FOLDER/.lock names the owner and contains a token that changes every `SIGN_EVERY` seconds. A new
process that finds the file watches the token: if it changes, the folder is in use and the start
fails; after `GONE` seconds without a change the owner is considered dead. Clocks are not compared
between machines. The owner also records its process id and machine if it is the only process of its
run, so a start on the same machine detects at once that it is gone.

If two processes start at the same time, both write the file. The one whose name is overwritten
stops at its next heartbeat or before its next checkpoint, whichever is first.
"""

import contextlib
import datetime
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from absl import logging
from etils import epath

from convbert_jax.config import UserError

SIGN_EVERY = 15.0  # seconds between heartbeats
GONE = 120.0  # seconds; long enough that an outage of a minute does not lose the folder


class OwnershipError(UserError):
    """Another process owns the folder."""


def this_process() -> str:
    """Returns the process id and host name."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def wait_for_silence(place: epath.Path) -> None:
    """Waits until the folder of the lock file `place` has no owner.

    Returns at once if there is no lock file or its owner was a process on this machine that ended,
    else after at most `GONE` seconds.

    Raises:
      OwnershipError: the owner is alive.
    """
    found = _read(place)
    if not found:
        return
    if _is_gone_from_here(found):
        logging.warning(
            "--workdir=%s was opened by %s, which no longer runs on this machine; taking over the "
            "folder.",
            place.parent,
            _name_in(found),
        )
        return
    logging.warning(
        "--workdir=%s was opened by %s and not closed; waiting for a heartbeat for %.0f s.",
        place.parent,
        _name_in(found),
        GONE,
    )
    begin = time.monotonic()
    while time.monotonic() - begin < GONE:
        time.sleep(min(1.0, GONE / 10))
        now = _read(place)
        if not now:
            return
        if now != found:
            raise OwnershipError(
                f"is in use by {_name_in(now)}, which sends a heartbeat every {SIGN_EVERY:.0f} "
                f"s; wait for it, stop it, or choose another --workdir. After {GONE:.0f} "
                "s without a heartbeat the folder can be used again.",
                field="--workdir",
                value=str(place.parent),
            )
    logging.warning("No heartbeat; taking over the folder.")


class Owner:
    """Ownership of the folder of a lock file by this process."""

    def __init__(self, place: epath.Path, *, alone: bool):
        """
        Args:
          place: the lock file.
          alone: whether this is the only process of the run; other processes could still write
            after this one ended.
        """
        self._place = place
        self._here = _describe_here() if alone else ""
        self._id = secrets.token_hex(8)
        now = datetime.datetime.now(datetime.UTC)
        self._name = f"{this_process()} since {now:%Y-%m-%d %H:%M:%S} UTC"

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context in which a thread sends heartbeats; its end releases the folder.

        Raises:
          OSError: the first heartbeat cannot be written.
        """
        self._give_sign()
        over = threading.Event()
        thread = threading.Thread(target=self._live, args=(over,), daemon=True, name="owner")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            try:
                if self._is_named():
                    self._place.unlink(missing_ok=True)
            except Exception as error:  # storage libraries raise different types
                logging.warning(
                    "Could not remove %s (%s); the next start will wait %.0f s.",
                    self._place,
                    error,
                    GONE,
                )

    def check(self) -> None:
        """Checks that this process still owns the folder.

        Raises:
          OwnershipError: the folder was taken over.
        """
        found = _read(self._place)
        if not found:  # another process took over the folder and ended
            raise OwnershipError(
                f"is no longer owned by this process ({self._name}): {self._place.name} was "
                "removed, probably by another run that took over the folder and ended. Start "
                "again to resume from the saved state.",
                field="--workdir",
                value=str(self._place.parent),
            )
        if self._id not in found:
            raise OwnershipError(
                f"was taken over by {_name_in(found)}: this process ({self._name}) sent no "
                f"heartbeat for {GONE:.0f} s, or both started at the same time. This process "
                "stops saving checkpoints; use the folder for one run at a time.",
                field="--workdir",
                value=str(self._place.parent),
            )

    def _live(self, over: threading.Event) -> None:
        while not over.wait(SIGN_EVERY):
            try:
                if not self._is_named():
                    return  # `check` raises the error
                self._give_sign()
            except Exception as error:  # storage libraries raise different types
                logging.warning("Could not renew %s (%s); will retry.", self._place, error)

    def _give_sign(self) -> None:
        # Constant length, because a library that caches file sizes would truncate a longer text.
        sign = f"{self._name}\n{self._id} {secrets.token_hex(8)}\n{self._here}\n"
        self._place.write_text(sign)

    def _is_named(self) -> bool:
        return self._id in _read(self._place)


def _name_in(text: str) -> str:
    return text.partition("\n")[0]


def _is_gone_from_here(text: str) -> bool:
    """Returns whether the owner was a process on this machine that has ended."""
    machine, _, of_process = "".join(text.splitlines()[2:3]).partition(", process ")
    if not machine or machine != _describe_machine():
        return False
    pid, _, began = of_process.partition(" begun ")
    try:
        os.kill(int(pid), 0)
        return _begin_of(int(pid)) != began  # another process has the same id
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # a process of another user, or another format
        return False


def _describe_here() -> str:
    """Identifies this process on this machine; "" if the system does not provide it."""
    machine = _describe_machine()
    return machine and f"{machine}, process {os.getpid()} begun {_begin_of(os.getpid())}"


def _describe_machine() -> str:
    """Identifies the scope in which process ids are unique: boot and PID namespace (container)."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begin_of(pid: int) -> str:
    """Returns the start time of a process in clock ticks since boot; "" for a zombie process."""
    state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _read(place: epath.Path) -> str:
    """Returns the content of the lock file, "" if it does not exist."""
    try:
        return place.read_text()
    except FileNotFoundError:
        return ""
