"""Process of one run: main.py, which saves a checkpoint and exits when the worker has exited.

Usage: python -m convbert_jax.sweeps.child FLAGS_OF_MAIN. The worker holds the other end of standard
input and never writes to it, so reading ends when the worker exits.
"""

import os
import signal
import sys
import threading

from convbert_jax import main


def _watch_worker() -> None:
    threading.Thread(target=_stop_with_worker, daemon=True).start()


def _stop_with_worker() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin, whose lock the interpreter exit needs
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main.start(beside=_watch_worker)
