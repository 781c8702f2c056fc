"""Errors that the user can fix."""

import os
import re
from typing import Any

# A long value inside of a message: a quoted text, or anything without white space.
_VALUE = re.compile(r"(?<!\w)'[^']{300,}'(?!\w)|\S{300,}")
_LONGEST = 2_000  # characters of a message


class UserError(Exception):
    """An error that the user can fix.

    `main.py` prints the message without a traceback and exits with 1, or with 2 for an error in the
    command line. Each package derives its own classes. Long values in the message are truncated.

    Args:
      message: the problem and its fix. Field, value, path and line are put in front if the message
        does not contain them: `ConfigError("must be HOST:PORT.", field="--coordinator", value="x")`
        reads "--coordinator=x must be HOST:PORT."
      field: the invalid setting, as "config.train.steps" or "--task".
      value: the invalid value.
      path: the invalid file or folder.
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
        self.field, self.value, self.line = field, value, line
        self.path = None if path is None else os.fspath(path)
        if field is not None:
            setting = field if value is None else f"{field}={_spell(value)}"
            spellings = (setting, f"{field}={value}", f"{field}={value!r}")
            if not any(spelling in message for spelling in spellings):
                message = f"{setting} {message}"
        place = [] if self.path is None or self.path in message else [self.path]
        if line is not None and f"line {line}" not in message:
            place.append(f"line {line}")
        message = f"{', '.join(place)}: {message}" if place else message
        message = _VALUE.sub(lambda value: _cut(value[0], 100, 0), message)
        super().__init__(message if len(message) <= _LONGEST else _cut(message, 1_000, 500))


class ConfigError(UserError):
    """A config that cannot run."""


class PluginError(ConfigError):
    """A mixer or optimizer that cannot be created here, although the config may be valid."""


def _spell(value: Any) -> str:
    """Formats a value as on the command line; quotes empty, unprintable or spaced texts."""
    if isinstance(value, str):
        return value if value and value.isprintable() and " " not in value else repr(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str, first: int, last: int) -> str:
    """Returns the first and last characters of a text, and its length."""
    end = f" …{text[-last:]}" if last else ""
    return f"{text[:first]}… ({len(text):,} characters){end}"
