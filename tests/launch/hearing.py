"""Default signal handling for programs started by tests."""

import signal


def hear() -> None:
    """Restores default signal handlers; use it as `preexec_fn`.

    xdist workers ignore SIGHUP, and a shell cannot trap signals that were ignored at its start.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
