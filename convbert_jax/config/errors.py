"""Faults that the user can mend."""


class UserError(Exception):
    """Something the user can mend; the message is one sentence that names the thing, its value and
    the fix.

    `main.py` prints the message without a traceback and exits with 1, or with 2 where the command
    line is at fault. Each package derives its own kind.
    """


class ConfigError(UserError):
    """A config that cannot run."""


class PluginError(ConfigError):
    """A mixer or an optimizer that cannot be made here; the config that names it may be intact."""
