"""The process of one cell: main.py, which ends, its state saved, when the runner is no more.

python -m convbert_jax.sweeps.child FLAGS OF MAIN.PY. The runner holds the other end of standard
input and never writes: what comes is the end of it.
"""

import os
import signal
import sys
import threading

from convbert_jax import main


def _watch_runner() -> None:
    threading.Thread(target=_stop_with_runner, daemon=True).start()


def _stop_with_runner() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not by sys.stdin, whose lock the end would wait for
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main.start(beside=_watch_runner)
