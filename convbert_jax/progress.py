"""Progress of long work: a bar or log lines with the time left, or the seconds so far."""

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import tqdm
from absl import logging

LOG_EVERY = 10  # seconds


@contextlib.contextmanager
def show_progress(total: int, what: str = "Tokenizing") -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes done: a bar on a terminal, otherwise log lines."""
    if sys.stderr.isatty():
        with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc=what) as bar:
            yield bar.update
        return
    state = collections.Counter()
    started = time.monotonic()

    def advance(size: int) -> None:
        state["done"] += size
        elapsed = time.monotonic() - started
        if elapsed - state["logged"] > LOG_EVERY:
            state["logged"] = elapsed
            rate = state["done"] / elapsed
            logging.info(
                "%s: %.1f of %.1f MB, %.2g MB/s, %.0f s left.",
                what,
                state["done"] / 1e6,
                total / 1e6,
                rate / 1e6,
                max(0, total - state["done"]) / rate,  # the total may be an estimate
            )

    yield advance


@contextlib.contextmanager
def log_seconds(what: str) -> Iterator[None]:
    """Logs `what` and the seconds so far, every `LOG_EVERY` seconds, while the block runs."""
    started = time.monotonic()
    done = threading.Event()

    def log() -> None:
        while not done.wait(LOG_EVERY):
            logging.info("%s (%.0f s so far).", what, time.monotonic() - started)

    thread = threading.Thread(target=log, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
