"""Ends the process on Ctrl-C and SIGTERM, also while the main thread runs a library.

Python calls signal handlers only between bytecode instructions. A compiler or a step that does not
return for minutes delays them, even the exit that a second Ctrl-C requests. A thread therefore
reads the numbers of the signals from a socket (`signal.set_wakeup_fd`).
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
_REPORT_AFTER = 2.0  # seconds from a first signal to a log line
_EXIT_AFTER = 5.0  # seconds from a second signal to the end of the process
# Seconds in which a second SIGTERM counts as the first one: schedulers signal every process of a
# job, and a process that started another one forwards the signal.
ECHO = 2.0
TRY_AGAIN = 75  # "temporary failure": a launcher starts the same command again


class Stopped(KeyboardInterrupt):
    """A signal requested a stop, and the work so far is saved.

    Attributes:
      by: name of the signal.
    """

    def __init__(self, by: str):
        super().__init__(by)
        self.by = by


def exit_code(by: str) -> int:
    """Returns the exit code of a program that the signal `by` stopped and that lost nothing:
    `TRY_AGAIN` after SIGTERM, which schedulers and preempted machines send; 130 after Ctrl-C.
    """
    return TRY_AGAIN if by == "SIGTERM" else 128 + signal.Signals[by]


@dataclasses.dataclass
class _State:
    """Shared by the reading thread and the program; one per process.

    Attributes:
      reported: number of a first signal that did not end the program in time.
      nothing_to_save: whether the program may exit without saving.
      first: number and `time.monotonic()` of a first signal that a handler received.
      abandon_threads: whether the process exits without waiting for threads.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    reported: int | None = None
    nothing_to_save: bool = False
    first: tuple[int, float] | None = None
    abandon_threads: bool = False


_state = _State()


@contextlib.contextmanager
def handled(report_after: float = _REPORT_AFTER, exit_after: float = _EXIT_AFTER) -> Iterator[None]:
    """Context in which SIGTERM raises `Stopped`, as Ctrl-C raises KeyboardInterrupt.

    If the program does not end after a first signal, a log line reports the signal. A second
    signal ends the process with exit code 128 plus its number, whatever the main thread runs. An
    echo of SIGTERM after the context does not end the process. In other threads than the main
    thread the context does nothing, because Python delivers no signals there.

    Args:
      report_after, exit_after: seconds after a first and a second signal. A second SIGTERM within
        `report_after` counts as the first one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.reported = _state.first = None
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(ours, report_after, exit_after), daemon=True).start()
    previous = signal.signal(signal.SIGTERM, _stop)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(_hide_interrupts, unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGTERM, _unless_echo(previous) if _state.first else previous)
        signal.set_wakeup_fd(before)
        theirs.close()  # ends the thread
        _state.reported = None  # otherwise a later `nothing_to_save` would end the process


@contextlib.contextmanager
def nothing_to_save() -> Iterator[None]:
    """Context in which a first signal ends the process within seconds, because nothing is lost.

    The exit code is 75 after SIGTERM and 130 after Ctrl-C. Outside of `handled` the context does
    nothing.
    """
    with _state.lock:
        _state.nothing_to_save = True
        if _state.reported:
            _exit_without_saving(_state.reported)
    try:
        yield
    finally:
        with _state.lock:
            _state.nothing_to_save = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block, where the first one's handler is called.

    Orbax reports any exception as an unreadable part of a checkpoint, so a KeyboardInterrupt raised
    inside Orbax would be lost. A second Ctrl-C is not delayed; within `handled` it ends the
    process.
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
    """Returns whether a second signal, `seconds` after the first, is the first one forwarded."""
    return first == second == signal.SIGTERM and seconds < within


def is_first(number: int) -> bool:
    """Returns whether a signal is not an echo, and remembers it."""
    if _state.first and is_echo(_state.first[0], number, time.monotonic() - _state.first[1]):
        return False
    _state.first = number, time.monotonic()
    return True


def abandon_threads() -> None:
    """Lets `exiting_despite_threads` exit without waiting for threads.

    Orbax's threads wait five minutes for the rest of a save that failed; Python waits for them.
    """
    _state.abandon_threads = True


@contextlib.contextmanager
def exiting_despite_threads() -> Iterator[None]:
    """Context around a whole program. If `abandon_threads` was called, the end of the context ends
    the process, with the same exit code and output, but without exit functions.
    """
    code: str | int | None = 0
    try:
        yield
    except SystemExit as error:
        if not _state.abandon_threads:
            raise
        code = error.code
    except BaseException:
        if not _state.abandon_threads:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if not _state.abandon_threads:
        return
    if isinstance(code, str):  # as sys.exit prints it
        print(code, file=sys.stderr)
        code = 1
    logging.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def _stop(number, frame):
    del frame
    if is_first(number):
        raise Stopped(signal.Signals(number).name)


def _hide_interrupts(show, unraisable):
    """Hides the traceback of an interrupt that Python raised in a callback, such as one of the
    garbage collector, and dropped; `_read` acts on its signal.
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


def _read(ours: socket.socket, report_after: float, exit_after: float) -> None:
    timers: list[threading.Timer] = []
    first, by = 0.0, 0

    def after(seconds: float, function, number: int) -> None:
        timer = threading.Timer(seconds, function, (number,))
        timer.daemon = True
        timer.start()
        timers.append(timer)

    with ours:
        while numbers := ours.recv(16):
            for number in numbers:
                if number not in _SIGNALS:
                    continue
                if not timers:
                    first, by = time.monotonic(), number
                    after(report_after, _report, number)
                elif not is_echo(by, number, time.monotonic() - first, report_after):
                    after(exit_after, _exit, number)
    for timer in timers:
        timer.cancel()


def _report(number: int) -> None:
    with _state.lock:
        if _state.nothing_to_save:
            _exit_without_saving(number)
        _state.reported = number
    name = signal.Signals(number).name
    logging.info(
        "Received %s; stopping after the current step (may take minutes during compilation). %s "
        "to exit now; saved checkpoints are kept.",
        name,
        "Press Ctrl-C again" if number == signal.SIGINT else f"Send {name} again",
    )


def _exit(number: int) -> None:
    logging.info("Exiting after a second %s.", signal.Signals(number).name)
    logging.flush()
    os._exit(128 + number)


def _exit_without_saving(number: int) -> None:
    name = signal.Signals(number).name
    logging.info(
        "Exiting after %s; nothing is lost. The same command continues from the last checkpoint if "
        "there is one.",
        name,
    )
    logging.flush()
    os._exit(exit_code(name))
