"""Changes of a config: which fields may change when a run is resumed, and differences."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convbert_jax.config import fields
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.recipes import RECIPES


def is_changeable(cls: type, path: str, recipe: str) -> bool:
    """Returns whether a run may be resumed with another value of a field, see `fields.py`.

    Args:
      cls: the dataclass that `path` starts from, `Config`.
      path: path of the field, as "train.steps".
      recipe: `config.recipe` of the run.

    Raises:
      ConfigError: the field does not exist.
    """
    name, _, rest = path.partition(".")
    field = fields.describe(cls).get(name)
    if field is None:
        raise ConfigError("does not exist.", field=f"config.{path}")
    if rest and dataclasses.is_dataclass(field.type):
        return is_changeable(field.type, rest, recipe)
    in_pretraining = fields.IN_PRETRAINING in field.marks and RECIPES[recipe].data != "task"
    return fields.ALWAYS in field.marks or in_pretraining


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Returns path -> (old, new) of the fields that differ between two configs from `to_dict`."""
    old, new = flatten(old), flatten(new)
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}


def describe(changes: Mapping[str, tuple[object, object]]) -> str:
    """Formats the result of `differences` for a message."""
    return ", ".join(
        f"config.{name} was {old!r}, now {new!r}" for name, (old, new) in changes.items()
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Returns path -> value of every field of a config from `to_dict`."""
    flat = {}
    for name, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
