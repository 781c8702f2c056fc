"""Command-line overrides, checked against the schema of `config/` before ml_collections sees
them.

ml_collections refuses an unknown field inside a long traceback, does not read `1e5` as an integer,
and knows no other section when a field is asked for in the wrong one. Here each of these is one
sentence, or simply works.
"""

import dataclasses
import difflib
import re
import typing

from convbert_jax.config import Config, ConfigError

_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
_NUMBER = re.compile(r"([+-]?\d[\d_]*\.?\d*(?:e[+-]?\d+)?)([kmb]?)", re.IGNORECASE)


def normalize(arguments: list[str]) -> list[str]:
    """Checks the `--config.a.b=value` among command-line arguments and rewrites short numbers.

    `100k`, `1e5` and `100_000` become 100000 for an integer field; everything else is passed on as
    it is.

    Raises:
      ConfigError: the field does not exist (the nearest one is named) or the value is not of its
      type.
    """
    fields = _field_types(Config)
    result = []
    for argument in _join_values(arguments):
        name, equals, value = argument.partition("=")
        path = name.lstrip("-").removeprefix("config.")
        if not re.match(r"--?config\.", name):
            result.append(argument)
            continue
        if path not in fields:
            raise ConfigError(_describe_unknown(path, fields))
        if not equals:
            raise ConfigError(f"{name} has no value; write {name}=VALUE.")
        result.append(f"--config.{path}={_parse(name, value, fields[path])}")
    return result


def _join_values(arguments: list[str]) -> list[str]:
    """`--config.a.b value` as `--config.a.b=value`."""
    joined, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        is_override = re.fullmatch(r"--?config\.[\w.]+", argument)
        if is_override and rest and not rest[0].startswith("--"):
            argument = f"{argument}={rest.pop(0)}"
        joined.append(argument)
    return joined


def _field_types(cls, prefix: str = "") -> dict[str, type]:
    types = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            types |= _field_types(kind, f"{prefix}{name}.")
        else:
            types[prefix + name] = kind
    return types


def _describe_unknown(path: str, fields: dict[str, type]) -> str:
    leaf = path.rpartition(".")[2]
    same_leaf = [field for field in fields if field.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(path, fields, n=1, cutoff=0.6)
    if not near:
        by_leaf = {field.rpartition(".")[2]: field for field in fields}
        near = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)]
    if any(field.startswith(path + ".") for field in fields):
        inside = [field for field in fields if field.startswith(path + ".")]
        return f"--config.{path} is a section; set one of its fields: {', '.join(inside)}."
    hint = f"did you mean --config.{near[0]}?" if near else "see convbert_jax/config/ for all."
    return f"--config.{path} does not exist; {hint}"


def _parse(name: str, value: str, kind: type) -> str:
    """`value` in the spelling that ml_collections reads for `kind`; a list is `a,b,c`."""
    if typing.get_origin(kind) is tuple:
        item, parts = typing.get_args(kind)[0], [p.strip() for p in value.strip("()[]").split(",")]
        parsed = [_parse(name, part.strip("'\""), item) for part in parts if part]
        quoted = [repr(part) if item is str else part for part in parsed]
        return f"({''.join(f'{part}, ' for part in quoted).strip()})"
    wrong = ConfigError(f"{name}={value} must be of type {kind.__name__}.")
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError(f"{name}={value} must be true or false.")
        return str(value.lower() in ("true", "1", "yes"))
    if kind not in (int, float):
        return value
    match = _NUMBER.fullmatch(value.strip())
    if not match:
        raise wrong
    number = float(match[1].replace("_", "")) * _MULTIPLES[match[2].lower()]
    if kind is float:
        return repr(number)
    if number != int(number):
        raise wrong
    return str(int(number))
