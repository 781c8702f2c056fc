"""Which fields may change when a run is resumed, declared by the type of each field.

    steps: Changeable[int] = 1_000_000

Settings of speed, reporting, duration and learning rate may change. Network, data, batch size and
objective, which determine the results so far, are fixed from the first checkpoint on. In
fine-tuning, tasks and seeds may be added; the optimizer may not change, because finished and new
runs are compared.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from convbert_jax.config.errors import ConfigError

_T = TypeVar("_T")
_ALWAYS, _PRETRAINING = "changeable", "changeable in pre-training"

Changeable = Annotated[_T, _ALWAYS]
ChangeableInPretraining = Annotated[_T, _PRETRAINING]


def is_changeable(cls: type, path: str, recipe: str) -> bool:
    """Returns whether a run may be resumed with another value of a field.

    Args:
      cls: the dataclass that `path` starts from, `Config`.
      path: path of the field, as "train.steps".
      recipe: `config.recipe` of the run.

    Raises:
      ConfigError: the field does not exist.
    """
    name, _, rest = path.partition(".")
    kinds = typing.get_type_hints(cls, include_extras=True)
    if name not in kinds:
        raise ConfigError("does not exist.", field=f"config.{path}")
    kind = kinds[name]
    if rest and dataclasses.is_dataclass(kind):
        return is_changeable(kind, rest, recipe)
    said = getattr(kind, "__metadata__", ())
    return _ALWAYS in said or (_PRETRAINING in said and recipe != "finetune")


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
