"""What a person types: flags, config files, overrides, and --help.

request.py       `read` makes one `Request` of a command line, `describe` the text of --help
flags.py         every flag
overrides.py     --config.section.field=value
fields.py        the fields of a config, with the comments of their source
help_text.py     what --help prints

A fault here is one sentence, found before jax is loaded.
"""

from convbert_jax.command_line.request import Processes, Request, describe, read

__all__ = ["Processes", "Request", "describe", "read"]
