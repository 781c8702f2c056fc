"""When one of several processes ends, the others say so in one sentence and end too, at once.

Left alone, jax notices after 0.4 to 100 seconds and aborts with a stack trace of C++. Here each
process keeps a connection to the first one, from before jax begins. The system closes it when
either of them ends, however it ends; a thread of each says now and then that it is there, which a
process that is stopped, or whose host is gone, does not. The first one tells the others.
"""

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from convbert_jax import interrupts
from convbert_jax.config import ConfigError, UserError
from convbert_jax.training.environment import meeting
from convbert_jax.training.environment.meeting import Advice, Link, Place, Word

EXIT_CODE = interrupts.TRY_AGAIN  # the same command goes on from the last checkpoint
_FAILED = 1  # exit code of an error, which would come again
_PATIENCE = 10.0  # seconds for a death to be told before its consequences
_GRACE = 1.0  # seconds for a process to say its own error before it ends for another's
_LINGER = 3.0  # seconds that the first process stays with an error: jax aborts those it leaves
_BEAT = 2.0  # seconds between two signs of life
_JAX_PATIENCE = 100  # seconds after which jax takes a process for dead, its default
_LONGEST = 2_000  # characters of a sentence
_here: "_Peers | None" = None  # of this process


@contextlib.contextmanager
def together(place: Place, *, patience: float, silence: float, advise: Advice) -> Iterator[None]:
    """Context in which all processes are here, jax has connected them, and the end of any other
    ends this one: with the sentence and the code of what has failed there, else with `EXIT_CODE`.

    An error inside is told to the others, and this process then ends without waiting for them.

    Args:
      patience: seconds to wait for all to come.
      silence: seconds without a sign of life after which a process counts as lost.

    Raises:
      ConfigError: not all have come, or they do not fit together.
    """
    global _here
    peers = _here = _Peers(place, silence)
    try:
        peers.meet(patience, advise)
        _connect_jax(place, patience, silence)
        yield
        # Waits for all, which jax would do at the end of Python: there it aborts, with a trace,
        # where one is lost meanwhile.
        jax.distributed.shutdown()
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_PATIENCE)  # the consequence of a death, which is told any moment
        code = _FAILED
        if isinstance(error, KeyboardInterrupt):
            by = error.by if isinstance(error, interrupts.Stopped) else "SIGINT"
            code = interrupts.exit_code(by)
        peers.leave(_describe(error) | {"process": place.index})
        # Runs before jax's own, which waits for all processes.
        atexit.register(_exit, code, _LINGER if place.index == 0 else 0.0)
        raise
    finally:
        _here = None
    peers.leave({"kind": "done"})


def end_of_a_hang() -> NoReturn:
    """Ends this process and all others with `EXIT_CODE` and the stacks of all their threads."""
    faulthandler.dump_traceback(sys.__stderr__)
    if _here:
        _here.tell_of_a_hang()
    os._exit(EXIT_CODE)


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

    def __init__(self, place: Place, silence: float):
        self._place, self._silence = place, silence
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._all_here, self._over = threading.Event(), threading.Event()
        self._left = False

    def meet(self, patience: float, advise: Advice) -> None:
        """Returns when all processes have come; who ends meanwhile ends all, as later."""
        place = self._place
        if place.count == 1:
            return
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        logging.info("%d processes meet at %s.", place.count, place.coordinator)
        if place.index:
            self._watch(0, meeting.reach(place, patience, advise))
            logging.info("Waiting for the others.")
            self._all_here.wait()
        else:
            meeting.gather(place, patience, advise, self._watch)
            self._tell({"kind": "all here"})

    def leave(self, last: Word) -> None:
        """Says a last word; from now on nobody's end ends this process."""
        self._over.set()
        with self._lock:
            self._left = True
            self._tell(last)
            for link in self._links:
                link.finish()

    def tell_of_a_hang(self) -> None:
        with self._lock:
            self._tell({"kind": "hangs", "process": self._place.index})
            self._linger()

    def _watch(self, index: int, link: Link) -> None:
        with self._lock:
            self._links.append(link)
        threading.Thread(target=self._listen, args=(index, link), daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            self._tell({"kind": "beat"})

    def _listen(self, index: int, link: Link) -> None:
        """Reads the messages of process `index` until its last one, or until it falls silent."""
        missed = 0  # beats, and not the clock: a machine that sleeps has not been waiting
        while missed * _BEAT < self._silence:
            try:
                word = link.hear(_BEAT)
            except TimeoutError:
                missed += 1
                continue
            except OSError:
                word = None
            except ValueError as error:
                _log_dropped(index, error)
                continue
            missed = 0
            match word:
                case None:
                    self._end_with({"kind": "ended", "process": index})
                    return
                case {"kind": "beat"}:
                    pass
                case {"kind": "all here"}:
                    self._all_here.set()
                case {"kind": "done"}:
                    return
                case {"kind": "failed" | "hangs" | "silent" | "ended", "process": int(who)} if (
                    0 <= who < self._place.count
                ):
                    sentence = _printable(word.get("sentence"))
                    self._end_with({"kind": word["kind"], "process": who, "sentence": sentence})
                    return
                case _:
                    _log_dropped(index, "an unknown message")
        self._end_with({"kind": "silent", "process": index})

    def _end_with(self, word: Word) -> None:
        """Ends this process because of what happened to another one."""
        self._tell(word)
        failed = word["kind"] == "failed"
        if failed:  # an error of the data or the numbers comes to all at once
            time.sleep(_GRACE)
        with self._lock:
            if self._left:
                return
            # Straight to the file: other threads may hold what a stream waits for.
            os.write(2, f"error: {self._explain(word)}\n".encode())
            if word["kind"] == "hangs":
                faulthandler.dump_traceback(2)
            self._linger()
            os._exit(_FAILED if failed else EXIT_CODE)

    def _explain(self, word: Word) -> str:
        who = f"process {word['process']}"
        if word["kind"] == "failed":
            return f"{who}: {word['sentence']}"
        happened, look = {
            "hangs": ("hangs", "what every thread does is below"),
            "silent": (
                f"has given no sign of life for {self._silence:.0f} s",
                "it is stopped, or its host or the network does not answer",
            ),
        }.get(word["kind"], ("has ended", "its own last lines say why"))
        return (
            f"{who} of {self._place.count} {happened}, so this one ends too; {look}; start all of "
            "them again, the run goes on from the last checkpoint."
        )

    def _linger(self) -> None:
        if self._place.index == 0 and self._place.count > 2:
            time.sleep(_LINGER)

    def _tell(self, word: Word) -> None:
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.say(**word)


def _connect_jax(place: Place, patience: float, silence: float) -> None:
    # jax's own service would hear SIGTERM and keep it to itself until the run listens.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = meeting.bind_host(place), place.coordinator.rpartition(":")[2]
    host = f"[{host}]" if ":" in host else host
    try:
        jax.distributed.initialize(
            *place,
            coordinator_bind_address=f"{host}:{port}" if host else None,  # None: all interfaces
            initialization_timeout=int(patience) + 1,
            heartbeat_timeout_seconds=max(_JAX_PATIENCE, int(2 * silence)),
        )
    except (ValueError, RuntimeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"jax cannot bring {place.count} processes together at {place.coordinator}: {first}; "
            "start all of them again."
        ) from error


def _describe(error: BaseException) -> Word:
    """The message to the other processes about the error that ends this one."""
    if isinstance(error, (KeyboardInterrupt, jax.errors.JaxRuntimeError)):
        return {"kind": "ended"}
    sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"kind": "failed", "sentence": _printable(sentence)}


def _printable(text: object) -> str:
    """`text` on one line, without control characters and of limited length."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(shown.split())[:_LONGEST]


def _log_dropped(index: int, what: object) -> None:
    logging.log_first_n(
        logging.WARNING,
        "Ignored a malformed message from process %d (%s); further ones are not logged.",
        1,
        index,
        what,
    )


def _exit(code: int, linger: float) -> None:
    time.sleep(linger)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
