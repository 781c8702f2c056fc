"""Signals as a program at a terminal gets them."""

import signal


def hear() -> None:
    """For `preexec_fn`: nothing is ignored. Workers of xdist ignore SIGHUP, and what is ignored
    when a shell begins, its traps never hear.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
