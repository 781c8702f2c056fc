"""The end of a process in which threads of a library wait for what will not come.

Python waits for them at its end. Those of Orbax, after a save that failed, wait five minutes for
what it has not written.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

from absl import logging

_abandoned = False


def abandon_threads() -> None:
    """Says that the end of this process need not wait for threads: what they do is of no use."""
    global _abandoned
    _abandoned = True


@contextlib.contextmanager
def without_abandoned_threads() -> Iterator[None]:
    """Context around all that a program does: where threads were abandoned in it, its end is that
    of the process, with the same code and output and after the same exit functions.
    """
    try:
        yield
    except SystemExit as error:
        if not _abandoned:
            raise
        code = error.code
    except BaseException:
        if not _abandoned:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    if _abandoned:
        _end(code)


def _end(code: str | int | None) -> None:
    if isinstance(code, str):  # as sys.exit takes it
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # what Python would call next, if it came to that
    logging.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)
