"""Faults that the user can mend."""

import re

# A value that a message repeats: a quoted text, or anything without white space.
_VALUE = re.compile(r"(?<!\w)'[^']{300,}'(?!\w)|\S{300,}")
_LONGEST = 2_000  # characters of a message


class UserError(Exception):
    """Something the user can mend; the message is one sentence that names the thing, its value and
    the fix.

    `main.py` prints the message without a traceback and exits with 1, or with 2 where the command
    line is at fault. Each package derives its own kind. Long values in the message are cut.
    """

    def __init__(self, message: str = ""):
        message = _VALUE.sub(lambda value: _cut(value[0], 100, 0), message)
        super().__init__(message if len(message) <= _LONGEST else _cut(message, 1_000, 500))


class ConfigError(UserError):
    """A config that cannot run."""


class PluginError(ConfigError):
    """A mixer or an optimizer that cannot be made here; the config that names it may be intact."""


def _cut(text: str, first: int, last: int) -> str:
    """The first and last characters of a text, and how many it has."""
    end = f" …{text[-last:]}" if last else ""
    return f"{text[:first]}… ({len(text):,} characters){end}"
