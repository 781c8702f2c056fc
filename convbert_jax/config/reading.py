"""Conversion of configs from and to nested mappings: ConfigDict, JSON."""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Collection, Mapping
from typing import Any

from convbert_jax.config import checks, fields, lengths
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.run import Config


def to_config_dict(config: Config | None = None):
    """Returns `config` (default: all defaults) as a locked ConfigDict for a config file."""
    from ml_collections import config_dict

    values = dataclasses.asdict(config or Config())
    # Not type-safe, because a field may be a bool or "auto"; `from_config_dict` checks types.
    return config_dict.ConfigDict(values, type_safe=False).lock()


def to_dict(config: Config) -> dict[str, Any]:
    """Returns a nested dict of JSON types (tuples as lists), the inverse of `from_config_dict`."""

    def plain(pairs):
        return {key: list(value) if isinstance(value, tuple) else value for key, value in pairs}

    return dataclasses.asdict(config, dict_factory=plain)


def decided_by_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a stored config without `train.compile_cache`.

    XLA executes the programs in that folder, so the user of this machine must choose it, not the
    author of the run.
    """
    train = values.get("train")
    if not isinstance(train, Mapping):
        return dict(values)
    return {**values, "train": {k: v for k, v in train.items() if k != "compile_cache"}}


def describe_fields(config: Config, leave_out: Collection[str] = ()) -> list[str]:
    """Returns one line per section with the values of its fields.

    Args:
      leave_out: "section" or "section.field" to omit.
    """
    sections = {name: value for name, value in to_dict(config).items() if name not in leave_out}
    top = {name: value for name, value in sections.items() if not isinstance(value, dict)}
    lines = []
    for name, values in {"config": top, **sections}.items():
        if isinstance(values, dict):
            fields = (
                f"{field}={value!r}"
                for field, value in values.items()
                if f"{name}.{field}" not in leave_out
            )
            lines.append(f"{name}: {' '.join(fields)}")
    return lines


def from_config_dict(values: Mapping[str, Any], *, check: bool = True) -> Config:
    """Reads and validates a config.

    Args:
      values: nested mapping with the sections of `Config`; missing fields take their defaults.
      check: False for a partial config: names and types are checked, but not combinations.

    Raises:
      ConfigError: a field does not exist (the nearest name is suggested), a value has the wrong
        type, or values are incompatible.
    """
    config = _from_mapping(Config, values, path="")
    if check:
        checks.check(config)
    return config


def to_text(value: Any) -> str:
    """Formats a value as in an override: lists as `a,b`, or as JSON if they contain sections or
    texts that `a,b` cannot represent.
    """
    if not isinstance(value, tuple | list):
        return str(value)
    if all(_is_plain(part) for part in value):
        return ",".join(map(str, value))
    return json.dumps([_given(part) for part in value], ensure_ascii=False)


def _is_plain(part) -> bool:
    if not isinstance(part, str):
        return isinstance(part, int | float)
    ends = part[:1] + part[-1:]
    return bool(ends) and "," not in part and not any(c.isspace() or c in "()[]'\"" for c in ends)


def _given(section) -> Any:
    """Returns the first field of a section and those that differ from their defaults.

    Values that are not sections are returned unchanged.
    """
    if not dataclasses.is_dataclass(section):
        return section
    first, *rest = dataclasses.fields(section)
    kept = [first, *(f for f in rest if getattr(section, f.name) != f.default)]
    return {field.name: getattr(section, field.name) for field in kept}


def _from_mapping(cls, values: Mapping[str, Any], path: str):
    known = fields.describe(cls)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = (
                f"did you mean config.{path}{near[0]}?"
                if near
                else f"fields here: {', '.join(known)}."
            )
            raise ConfigError(f"does not exist; {hint}", field=f"config.{path}{key}")
    arguments = {}
    for key, value in values.items():
        kind = known[key].type
        if dataclasses.is_dataclass(kind):
            if not hasattr(value, "items"):
                raise ConfigError(
                    "is a section, not a value; set one of its fields.", field=f"config.{path}{key}"
                )
            arguments[key] = _from_mapping(kind, value, path=f"{path}{key}.")
            continue
        arguments[key] = _to_type(value, kind, f"config.{path}{key}")
    return cls(**arguments)


def _to_type(value, kind, name: str):
    """Converts `value` to the type of a field; lists, as in JSON, become tuples."""
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(
                f"must be a list, not {type(value).__name__}.", field=name, value=value
            )
        item = typing.get_args(kind)[0]
        if dataclasses.is_dataclass(item):
            return tuple(
                _from_item(item, part, name, f"{name}[{i}]") for i, part in enumerate(value)
            )
        return tuple(_to_type(part, item, f"{name}[{i}]") for i, part in enumerate(value))
    if kind == fields.AutoBool:
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError("must be true, false or 'auto'.", field=name, value=value)
        return value
    if kind == fields.INT_OR_TEXT:
        if isinstance(value, str):
            lengths.parse(value, name)
            return value
        kind = int
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if type(value) is not kind:
        raise ConfigError(
            f"must be of type {kind.__name__}, not {type(value).__name__}.", field=name, value=value
        )
    if kind is str and ("\0" in value or not _is_text(value)):
        raise ConfigError(
            "contains NUL or is not valid Unicode; write it in UTF-8.", field=name, value=value
        )
    return value


def _from_item(cls, value, field: str, name: str):
    """Reads one section of a field with a list of sections."""
    if not hasattr(value, "items"):
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        raise ConfigError(
            f"contains {value!r}; expected an object with fields {names}.", field=field
        )
    return _from_mapping(cls, value, path=f"{name.removeprefix('config.')}.")


def _is_text(value: str) -> bool:
    """Returns False for an unpaired surrogate, as in arguments with bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
