"""Helpers for validation; each raises ConfigError with one sentence."""

import difflib
from typing import Any

from convbert_jax.config.errors import ConfigError


def check(condition: bool, message: str, **parts: Any) -> None:
    """Raises ConfigError(message, **parts) unless `condition`."""
    if not condition:
        raise ConfigError(message, **parts)


def check_choice(field: str, value: str, choices) -> None:
    """Raises ConfigError, which suggests the nearest name, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean '{near[0]}'? Choose" if near else "choose"
        raise ConfigError(
            f"is unknown; {hint} one of: {', '.join(choices)}.",
            field=f"config.{field}",
            value=value,
        )


def check_encoding(field: str, value: str) -> None:
    """Raises ConfigError unless `value` is an encoding that decodes the byte "\\n" as line end."""
    try:
        if b"\n".decode(value) == "\n":
            return
    except LookupError:
        raise ConfigError(
            "is unknown; use an encoding that Python supports, for example utf-8, cp1252 or gbk.",
            field=f"config.{field}",
            value=value,
        ) from None
    except UnicodeDecodeError:
        pass
    raise ConfigError(
        "is not supported, because its line ends differ from ASCII; convert the files "
        f"(iconv -f {value} -t UTF-8).",
        field=f"config.{field}",
        value=value,
    )
