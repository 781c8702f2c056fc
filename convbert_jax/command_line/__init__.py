"""What a person types: flags, config files, overrides, and --help.

flags.py         every flag, and `read`, which makes one `Request` of a command line
config_files.py  --config: a Python file with get_config, or the config.json of a run
overrides.py     --config.section.field=value
fields.py        the fields of a config, with the comments of their source
help.py          the text of --help

A fault here is one sentence, found before jax is loaded.
"""

from convbert_jax.command_line.flags import Request, read

__all__ = ["Request", "read"]
