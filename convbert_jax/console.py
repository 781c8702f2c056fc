"""Terminal output: log lines, progress, errors, and the message for a missing package.

Imports only the standard library at module level, because other packages may be missing.
"""

import collections
import contextlib
import logging as python_logging
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

_PACKAGE = pathlib.Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
LOG_EVERY = 10  # seconds between log lines about progress


@contextlib.contextmanager
def missing_package_message() -> Iterator[None]:
    """Turns a ModuleNotFoundError of the imports in its block into one line and exit code 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "convbert_jax":
            raise
        sys.exit(f"error: the package {error.name} is not installed in {sys.prefix}. {_advice()}")


def _advice() -> str:
    """Returns the fix: activate the checkout's inactive .venv, or install the requirements."""
    environment = _CHECKOUT / ".venv"
    if not (environment / "bin" / "activate").exists() or environment.samefile(sys.prefix):
        return (
            "Install the requirements (pip install -r requirements.txt), or activate the "
            "environment that has them."
        )
    folder = ".venv" if pathlib.Path.cwd() == _CHECKOUT else environment
    return f"Activate the environment of this checkout: source {folder}/bin/activate"


def set_up_logging() -> None:
    """Logs as `12:30:05 message`; of other libraries only warnings and errors, with their name."""
    from absl import logging

    root = python_logging.getLogger()
    for handler in root.handlers[:]:
        if handler is logging.get_absl_handler() or isinstance(handler, _AboveBars):
            root.removeHandler(handler)
    root.addHandler(make_handler())
    logging.set_verbosity(logging.INFO)


def make_handler() -> python_logging.Handler:
    """Returns a handler that writes log records to standard error in this format."""
    handler = _AboveBars()
    handler.setFormatter(_Formatter())
    handler.addFilter(_is_ours_or_serious)
    return handler


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints `error: message`, as one line, and exits."""
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)
    sys.exit(code)


def _is_ours_or_serious(record: python_logging.LogRecord) -> bool:
    return record.pathname.startswith(str(_PACKAGE)) or record.levelno >= python_logging.WARNING


class _AboveBars(python_logging.StreamHandler):
    """A handler that clears the progress bars, writes a line, and redraws the bars below it."""

    def emit(self, record: python_logging.LogRecord) -> None:
        import tqdm

        with tqdm.tqdm.external_write_mode(self.stream):
            super().emit(record)


class _Formatter(python_logging.Formatter):
    def __init__(self):
        super().__init__(datefmt="%H:%M:%S")

    def format(self, record: python_logging.LogRecord) -> str:
        level = "" if record.levelno < python_logging.WARNING else f"{record.levelname.lower()}: "
        origin = "" if record.pathname.startswith(str(_PACKAGE)) else f"({record.name}) "
        return f"{self.formatTime(record, self.datefmt)} {level}{origin}{record.getMessage()}"


@contextlib.contextmanager
def show_progress(total: int, what: str = "Tokenizing") -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes done: a bar on a terminal, otherwise log lines."""
    if sys.stderr.isatty():
        import tqdm

        with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc=what) as bar:
            yield bar.update
        return
    from absl import logging

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
    from absl import logging

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
