"""Who has a folder in a bucket, which has no locks: one process, and it gives signs of life.

FOLDER/.lock names the owner and has a word that changes every `SIGN_EVERY` seconds. A start that
finds it looks for another word: there is an owner then, and the start is refused; silence of `GONE`
seconds means that there is none any more. Nobody's clock is compared with another's. An owner that
is the only process of its run also says which process of which machine it is: a start on that
machine sees at once when it is gone.

Two that start within the same moment both write; the one whose name is overwritten ends at its next
sign of life or before its next checkpoint, whichever is first.
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

SIGN_EVERY = 15.0  # seconds
GONE = 120.0  # seconds; a bucket that is out of reach for a minute costs no run its folder


class OwnershipError(UserError):
    """The folder is another process's."""


def this_process() -> str:
    """Of all machines."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def wait_for_silence(place: epath.Path) -> None:
    """Returns when nobody has the folder in which `place` lies: at once where its owner was a
    process of this machine and is gone, else after `GONE` seconds if need be.

    Raises:
      OwnershipError: somebody gives a sign of life.
    """
    found = _read(place)
    if not found:
        return
    if _is_gone_from_here(found):
        logging.warning(
            "--workdir=%s was opened by %s, which is gone from this machine: this run takes the "
            "folder over.",
            place.parent,
            _name_in(found),
        )
        return
    logging.warning(
        "--workdir=%s was opened by %s and never closed; looking for a sign of life of it, for "
        "%.0f s.",
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
                f"is in use by {_name_in(now)}, which writes there every {SIGN_EVERY:.0f} "
                f"s; wait for it, stop it, or choose another --workdir: after {GONE:.0f} "
                "s of silence it counts as gone.",
                field="--workdir",
                value=str(place.parent),
            )
    logging.warning("It gave none: this run takes the folder over.")


class Owner:
    """This process, as the one that has the folder of `place`."""

    def __init__(self, place: epath.Path, *, alone: bool):
        """
        Args:
          alone: whether no other process works for the same run, and may yet when this one is gone.
        """
        self._place = place
        self._here = _describe_here() if alone else ""
        self._id = secrets.token_hex(8)
        now = datetime.datetime.now(datetime.UTC)
        self._name = f"{this_process()} since {now:%Y-%m-%d %H:%M:%S} UTC"

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context in which signs of life are given, by a thread; the folder is free at its end.

        Raises:
          OSError: the first one cannot be given.
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
            except Exception as error:  # of any library that talks to buckets
                logging.warning(
                    "%s could not be removed (%s); the next start will wait %.0f s.",
                    self._place,
                    error,
                    GONE,
                )

    def check(self) -> None:
        """
        Raises:
          OwnershipError: the folder was taken over.
        """
        found = _read(self._place)
        if not found:  # whoever took the folder over has written there, and is done
            raise OwnershipError(
                f"is no longer this process's ({self._name}): its {self._place.name} is "
                "gone, as when another run took the folder over and ended; start again, "
                "it goes on from what is there.",
                field="--workdir",
                value=str(self._place.parent),
            )
        if self._id not in found:
            raise OwnershipError(
                f"was taken over by {_name_in(found)}, as this process ({self._name}) had "
                f"given no sign of life for {GONE:.0f} s or both began at once; it writes "
                "no more checkpoints there: let one run at a time use it.",
                field="--workdir",
                value=str(self._place.parent),
            )

    def _live(self, over: threading.Event) -> None:
        while not over.wait(SIGN_EVERY):
            try:
                if not self._is_named():
                    return  # `check` will tell
                self._give_sign()
            except Exception as error:  # of any library that talks to buckets
                logging.warning("%s cannot be renewed now (%s).", self._place, error)

    def _give_sign(self) -> None:
        # Always as long: a library that remembers sizes would read a part of a longer one.
        sign = f"{self._name}\n{self._id} {secrets.token_hex(8)}\n{self._here}\n"
        self._place.write_text(sign)

    def _is_named(self) -> bool:
        return self._id in _read(self._place)


def _name_in(text: str) -> str:
    return text.partition("\n")[0]


def _is_gone_from_here(text: str) -> bool:
    """Whether its owner was a process of this machine and is none any more."""
    machine, _, of_process = "".join(text.splitlines()[2:3]).partition(", process ")
    if not machine or machine != _describe_machine():
        return False
    pid, _, began = of_process.partition(" begun ")
    try:
        os.kill(int(pid), 0)
        return _begin_of(int(pid)) != began  # the number was given again
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # of another user, or not written by us
        return False


def _describe_here() -> str:
    """This process, for others of this machine; "" where the system does not tell."""
    machine = _describe_machine()
    return machine and f"{machine}, process {os.getpid()} begun {_begin_of(os.getpid())}"


def _describe_machine() -> str:
    """Where a number means one process: a start of a machine, and a container of it."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begin_of(pid: int) -> str:
    """When a process began, in ticks since the start of the machine; of a dead one "", if only its
    parent has not asked yet how it ended.
    """
    state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _read(place: epath.Path) -> str:
    """What is written there, "" if nothing is."""
    try:
        return place.read_text()
    except FileNotFoundError:
        return ""
