"""The command line: flags, config files, overrides, and --help.

request.py       `read` parses a command line to a `Request`, `describe` returns the text of --help
flags.py         all flags
overrides.py     --config.section.field=value
exit_codes.py    exit codes and their meaning
fields.py        types and comments of the fields of a config
help_text.py     text of --help

Errors are one sentence and are raised before jax is loaded.
"""

from convbert_jax.command_line.request import Processes, Request, describe, read

__all__ = ["Processes", "Request", "describe", "read"]
