"""Errors that the user can fix."""

import os
import re
from typing import Any

# A value that a message repeats: a quoted text, or anything without white space.
_VALUE = re.compile(r"(?<!\w)'[^']{300,}'(?!\w)|\S{300,}")
_LONGEST = 2_000  # characters of a message


class UserError(Exception):
    """An error that the user can fix.

    `main.py` prints the message without a traceback and exits with 1, or with 2 if the command line
    is at fault. Each package derives its own classes. Long values in the message are cut.

    Args:
      message: one sentence that names the place, the value found there and the fix; contains all
        parts that are given.
      field: the setting at fault, as "config.train.steps" or "--task".
      value: what was found.
      path: the file or folder at fault.
      line: line or row of the file, from 1.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        value: Any = None,
        path: str | os.PathLike | None = None,
        line: int | None = None,
    ):
        message = _VALUE.sub(lambda value: _cut(value[0], 100, 0), message)
        super().__init__(message if len(message) <= _LONGEST else _cut(message, 1_000, 500))
        self.field, self.value, self.line = field, value, line
        self.path = None if path is None else os.fspath(path)


class ConfigError(UserError):
    """A config that cannot run."""


class PluginError(ConfigError):
    """A mixer or an optimizer that cannot be made here; the config that names it may be intact."""


def _cut(text: str, first: int, last: int) -> str:
    """The first and last characters of a text, and how many it has."""
    end = f" …{text[-last:]}" if last else ""
    return f"{text[:first]}… ({len(text):,} characters){end}"
