"""Terminal output: short log lines above the progress bars, and one line for an error."""

import logging as python_logging
import pathlib
import sys
from typing import NoReturn

import tqdm
from absl import logging

_PACKAGE = str(pathlib.Path(__file__).resolve().parent)


def set_up_logging() -> None:
    """Logs as `12:30:05 message`; of other libraries only warnings and errors, with their name."""
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
    return record.pathname.startswith(_PACKAGE) or record.levelno >= python_logging.WARNING


class _AboveBars(python_logging.StreamHandler):
    """A handler that clears the progress bars, writes a line, and redraws the bars below it."""

    def emit(self, record: python_logging.LogRecord) -> None:
        with tqdm.tqdm.external_write_mode(self.stream):
            super().emit(record)


class _Formatter(python_logging.Formatter):
    def __init__(self):
        super().__init__(datefmt="%H:%M:%S")

    def format(self, record: python_logging.LogRecord) -> str:
        level = "" if record.levelno < python_logging.WARNING else f"{record.levelname.lower()}: "
        origin = "" if record.pathname.startswith(_PACKAGE) else f"({record.name}) "
        return f"{self.formatTime(record, self.datefmt)} {level}{origin}{record.getMessage()}"
