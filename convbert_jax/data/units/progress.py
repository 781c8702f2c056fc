"""What is told while bytes are gone through: how many, how fast, how long yet."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import tqdm
from absl import logging

LOG_EVERY = 10  # seconds


@contextlib.contextmanager
def show_progress(total: int, what: str = "Tokenizing") -> Iterator[Callable[[int], object]]:
    """Gives a function to call with the bytes done: a bar on a terminal, otherwise log lines."""
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
                "%s: %.0f of %.0f MB, %.1f MB/s, %.0f s left.",
                what,
                state["done"] / 1e6,
                total / 1e6,
                rate / 1e6,
                (total - state["done"]) / rate,
            )

    yield advance
