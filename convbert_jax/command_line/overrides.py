"""Command-line overrides of config fields, checked against the schema of `config/`.

`100k`, `1e5` and `100_000` are the same integer. A list is `a,b,c` or JSON; a list of sections is
JSON. The error for a field in the wrong section suggests the right one.
"""

import dataclasses
import decimal
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax import storage
from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import ConfigError, lengths, to_text
from convbert_jax.config.fields import INT_OR_TEXT, AutoBool

_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
_NUMBER = re.compile(
    r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kmb]?)", re.IGNORECASE | re.ASCII
)
_MOST_DIGITS = 40  # of an integer; the bounds of each field are checked later


def take(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Separates `--config.a.b=value` from the other command-line arguments.

    Returns:
      path of a field -> value (the last one if a field is set twice), and the other arguments.

    Raises:
      ConfigError: the field does not exist (the nearest is suggested), or the value has the wrong
        type.
    """
    types = field_types()
    values, rest = {}, []
    for argument in _join_values(arguments):
        name, equals, value = argument.partition("=")
        if not re.match(r"--?config\.", name):
            rest.append(argument)
            continue
        path = name.lstrip("-").removeprefix("config.")
        if path not in types:
            raise ConfigError(_describe_unknown(path, types), field=f"--config.{path}")
        if not equals:
            raise ConfigError(f"has no value; write {name}=VALUE.", field=name)
        values[path] = _parse(name, value, types[path])
    return values, rest


def to_flags(overrides: Mapping[str, Any]) -> list[str]:
    """Returns the command-line arguments for these overrides, the inverse of `take`."""
    return [f"--config.{path}={to_text(value)}" for path, value in overrides.items()]


def _join_values(arguments: Sequence[str]) -> list[str]:
    """Rewrites `--config.a.b value` to `--config.a.b=value`."""
    joined, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        is_override = re.fullmatch(r"--?config\.[\w.]+", argument)
        if is_override and rest and not rest[0].startswith("--"):
            argument = f"{argument}={rest.pop(0)}"
        joined.append(argument)
    return joined


def _describe_unknown(path: str, types: Mapping[str, type]) -> str:
    inside = [field for field in types if field.startswith(path + ".")]
    if inside:
        return f"--config.{path} is a section; set one of its fields: {', '.join(inside)}."
    near = nearest(path, types)
    hint = f"did you mean --config.{near}?" if near else "--config=FILE --help lists all."
    return f"--config.{path} does not exist; {hint}"


def _parse_json(name: str, value: str) -> tuple:
    """Parses a JSON list of sections; `config` validates them."""
    try:
        found = storage.parse_json(value or "[]")
    except ValueError as error:
        raise ConfigError(
            f"is not valid JSON ({error}); write a list of objects.", field=name, value=value
        ) from None
    if not isinstance(found, list):
        raise ConfigError("must be a list of objects.", field=name, value=value)
    return tuple(found)


def _parse_texts(value: str) -> tuple[str, ...] | None:
    """Parses a JSON list of texts, which may contain commas; returns None if it is not one."""
    try:
        found = storage.parse_json(value)
    except ValueError:
        return None
    is_texts = isinstance(found, list) and all(isinstance(part, str) for part in found)
    return tuple(found) if is_texts else None


def _inside(value: str, pairs: Sequence[str]) -> str:
    """Returns `value` without enclosing brackets or quotes."""
    around = value[:1] + value[-1:]
    return value[1:-1] if len(value) > 1 and around in pairs else value


def _parse(name: str, value: str, kind: type):
    """Converts the text `value` to the type of a field."""
    if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(typing.get_args(kind)[0]):
        return _parse_json(name, value)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if item is str and (texts := _parse_texts(value)) is not None:
            return texts
        parts = [part.strip() for part in _inside(value.strip(), ("()", "[]")).split(",")]
        return tuple(_parse(name, _inside(part, ("''", '""')), item) for part in parts if part)
    if kind == AutoBool:
        if value.lower() == "auto":
            return "auto"
        kind = bool
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError("must be true or false.", field=name, value=value)
        return value.lower() in ("true", "1", "yes")
    if kind not in (int, float, INT_OR_TEXT):
        return value
    match = _NUMBER.fullmatch(value.strip())
    if kind == INT_OR_TEXT:
        if not match:
            lengths.parse(value, name)
            return value
        kind = int
    if not match:
        raise ConfigError(f"must be of type {kind.__name__}.", field=name, value=value)
    # Decimal, because a float cannot represent every seed exactly, and overflows for 1e400.
    number = decimal.Decimal(match[1].replace("_", ""))
    if number.adjusted() > _MOST_DIGITS or len(match[1]) > 10 * _MOST_DIGITS:
        raise ConfigError("is too large.", field=name, value=value[:60])
    number *= _MULTIPLES[match[2].lower()]
    if kind is float:
        return float(number)
    if number != int(number):
        raise ConfigError("must be of type int.", field=name, value=value)
    return int(number)
