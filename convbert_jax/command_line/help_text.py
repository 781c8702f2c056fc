"""Text of --help: modes and flags; with a config, every field with its comment and value."""

import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from absl import flags

from convbert_jax.command_line import overrides
from convbert_jax.command_line.exit_codes import EXIT_CODES
from convbert_jax.command_line.fields import comments, field_types
from convbert_jax.config import Config

_WIDTH = 100


def describe_program(
    modes: Mapping[str, str], own_flags: Iterable[flags.Flag], known: Sequence[str]
) -> str:
    """Returns the text of --help without a config: modes, flags, exit codes and config files."""
    rows = []
    for flag in own_flags:
        default = default_text(flag)
        rows.append((f"--{flag.name}", f"{flag.help} {default and f'[{default}]'}".strip()))
    return "\n".join(
        [
            "python -m convbert_jax.main --config=FILE [--config.SECTION.FIELD=VALUE ...] [flags]",
            "python -m convbert_jax.main --workdir=RUN     resumes a run",
            "",
            "--mode=",
            *_table(modes.items()),
            "",
            "Flags:",
            *_table(rows),
            "",
            "Exit codes:",
            *_table((str(code), about) for code, about in EXIT_CODES.items()),
            "",
            _fill(f"Config files: {', '.join(known)}", 0),
            "All fields of a config, with comment and value: --config=configs/small.py --help",
        ]
    )


def describe_config(config: Config, file: str) -> str:
    """Returns the text of --help with a config: every field as an override, and its comment."""
    said = comments()
    lines = [f"The fields of {file} as overrides:"]
    section = None
    for path in field_types():
        name, _, field = path.rpartition(".")
        holder = getattr(config, name) if name else config
        if name != section:
            section = name
            lines += ["", _fill(f"{name}: {first_paragraph(type(holder))}", 0)] if name else [""]
        value = overrides.to_flags({path: getattr(holder, field)})[0]
        lines.append(f"  {shlex.quote(value)}")
        if said[path]:
            lines.append(_fill(said[path], 6))
    return "\n".join(lines)


def first_paragraph(cls) -> str:
    """Returns the first paragraph of a section's docstring."""
    if not dataclasses.is_dataclass(cls) or not cls.__doc__:
        return ""
    return " ".join(inspect.cleandoc(cls.__doc__).partition("\n\n")[0].split())


def default_text(flag: flags.Flag) -> str:
    """Returns the default of a flag, or "" if it has none or its help mentions it."""
    if flag.default in (None, [], "-") or flag.name == "mode":
        return ""
    return flag.default_as_str.replace("'", "")


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [_fill(f"{name:<15} {text}", 2, 18) for name, text in rows]


def _fill(text: str, indent: int, rest: int | None = None) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if rest is None else rest),
        break_long_words=False,
        break_on_hyphens=False,
    )
