"""Ctrl-C and SIGTERM while the main thread is inside of a library, as a compiler is for minutes.

Python calls what a program does about a signal between two of its own instructions, so a compiler
or a step that does not return lets none of it happen, not even the end that a second Ctrl-C asks
for. The number of a signal is heard by a thread all the same.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from absl import logging

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOLD = 2.0  # seconds without an end after which a first signal is answered by a line
_PATIENCE = 5.0  # seconds that a second one leaves the program to end by itself
# Seconds in which a second SIGTERM is the first one: schedulers signal every process of a job, and
# one that has started another passes on what it hears.
ECHO = 2.0
TRY_AGAIN = 75  # "temporary failure", on which a launcher starts the same command again


class Stopped(KeyboardInterrupt):
    """A signal asked for a stop, and what was done is kept.

    Attributes:
      by: name of the signal.
    """

    def __init__(self, by: str):
        super().__init__(by)
        self.by = by


def exit_code(by: str) -> int:
    """Of a program that a signal of this name has stopped, and that lost nothing: `TRY_AGAIN` after
    SIGTERM, which schedulers send and machines that are taken away; 130 after Ctrl-C.
    """
    return TRY_AGAIN if by == "SIGTERM" else 128 + signal.Signals[by]


@dataclasses.dataclass
class _State:
    """What the listening thread and the program tell each other; one for the process.

    Attributes:
      heard: the number of a first signal that did not end the program within its time.
      free: whether the program has nothing to save.
      first: number and `time.monotonic()` of a first signal that a handler got.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    heard: int | None = None
    free: bool = False
    first: tuple[int, float] | None = None


_state = _State()


@contextlib.contextmanager
def heard(told: float = _TOLD, patience: float = _PATIENCE) -> Iterator[None]:
    """Context in which SIGTERM raises `Stopped`, as Ctrl-C does KeyboardInterrupt. A first signal
    is told of, if what runs does not end for it, and a second one ends the process, with 128 and
    its number, whatever runs. Of another thread than the main one it does nothing, as Python hears
    no signals there. An echo of SIGTERM that comes behind the context is none of its end either.

    Args:
      told, patience: seconds from a first, and from a second signal. Until then a second SIGTERM is
        the first one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.heard = _state.first = None
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(ours, told, patience), daemon=True).start()
    terminated = signal.signal(signal.SIGTERM, _stop)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(_hide_interrupts, unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGTERM, _unless_echo(terminated) if _state.first else terminated)
        signal.set_wakeup_fd(before)
        theirs.close()  # ends the thread
        _state.heard = None  # else `nothing_to_save` outside of the block would end the process


@contextlib.contextmanager
def nothing_to_save() -> Iterator[None]:
    """Context in which a first signal ends the process as well, within seconds: whoever started it
    loses nothing by it. SIGTERM ends it with 75, on which launchers start again, Ctrl-C with 130.

    It does nothing outside of `heard`.
    """
    with _state.lock:
        _state.free = True
        if _state.heard:
            _end_for_nothing(_state.heard)
    try:
        yield
    finally:
        with _state.lock:
            _state.free = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block, where the first one's handler is called.

    Orbax reports any exception as an unreadable part of a checkpoint, so a KeyboardInterrupt raised
    inside Orbax would be lost. A second Ctrl-C is not delayed; within `heard` it ends the process.
    """
    handlers, received, inside = {}, [], True

    def receive(number, frame):
        if inside and not (received and number == signal.SIGINT):
            received.append(number)
        else:
            handlers[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handlers[number] = signal.getsignal(number)
                if callable(handlers[number]):
                    signal.signal(number, receive)
        yield
    finally:
        inside = False  # first: from here on `receive` only forwards, so it may stay installed
        for number, handler in handlers.items():
            if signal.getsignal(number) is receive:
                signal.signal(number, handler)
        if received:
            handlers[received[0]](received[0], None)


def is_echo(first: int, second: int, seconds: float, within: float = ECHO) -> bool:
    """Whether a second signal, so many seconds after the first, is that one passed on."""
    return first == second == signal.SIGTERM and seconds < within


def is_first(number: int) -> bool:
    """Whether a signal that a handler got is a first one and no echo; it is remembered."""
    if _state.first and is_echo(_state.first[0], number, time.monotonic() - _state.first[1]):
        return False
    _state.first = number, time.monotonic()
    return True


def _stop(number, frame):
    del frame
    if is_first(number):
        raise Stopped(signal.Signals(number).name)


def _hide_interrupts(show, unraisable):
    """Hides the traceback of an interrupt that Python raised in a callback, such as one of the
    garbage collector, and dropped; `_listen` acts on its signal.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        show(unraisable)


def _unless_echo(handler):
    def handle(number, frame):
        del frame
        if is_first(number):
            signal.signal(number, handler)
            signal.raise_signal(number)

    return handle


def _listen(ours: socket.socket, told: float, patience: float) -> None:
    waiting: list[threading.Timer] = []
    first, by = 0.0, 0

    def after(seconds: float, do, *arguments) -> None:
        timer = threading.Timer(seconds, do, arguments)
        timer.daemon = True
        timer.start()
        waiting.append(timer)

    with ours:
        while numbers := ours.recv(16):
            for number in numbers:
                if number not in _SIGNALS:
                    continue
                if not waiting:
                    first, by = time.monotonic(), number
                elif is_echo(by, number, time.monotonic() - first, told):
                    continue
                after(*((patience, _end, number) if waiting else (told, _tell, number)))
    for timer in waiting:
        timer.cancel()


def _tell(number: int) -> None:
    with _state.lock:
        if _state.free:
            _end_for_nothing(number)
        _state.heard = number
    name = signal.Signals(number).name
    logging.info(
        "%s is heard. What runs now ends first, which takes minutes where a program is compiled; "
        "%s ends it at once; what was saved stays.",
        name,
        "Ctrl-C once more" if number == signal.SIGINT else "another one",
    )


def _end(number: int) -> None:
    logging.info("Ended by a second %s.", signal.Signals(number).name)
    logging.flush()
    os._exit(128 + number)


def _end_for_nothing(number: int) -> None:
    logging.info(
        "Ended by %s, and nothing is lost: the same command goes on from what is saved, or begins "
        "again where nothing is.",
        signal.Signals(number).name,
    )
    logging.flush()
    os._exit(exit_code(signal.Signals(number).name))
