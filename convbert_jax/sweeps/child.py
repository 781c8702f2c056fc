"""The process of one cell: main.py, which ends, its state saved, when the runner is no more.

python -m convbert_jax.sweeps.child FLAGS OF MAIN.PY. The runner holds the other end of standard
input and never writes: what comes is the end of it.
"""

import os
import runpy
import signal
import sys
import threading


def _stop_with_runner() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not by sys.stdin, whose lock the end would wait for
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_runner, daemon=True).start()
    runpy.run_module("convbert_jax.main", run_name="__main__", alter_sys=True)
