"""What may change between two starts of one run, said at each field as its type.

    steps: Changeable[int] = 1_000_000

Speed, reporting, and how long and how fast a run learns may change; what the numbers so far were
made with (the network, the data, the batch, the objective) is fixed from the first checkpoint on.
Of fine-tuning, what is finished stays as it is: tasks and seeds may be added, the optimizer that
all runs are compared under may not change.
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
    """Whether a run that has begun may go on with another value of a field.

    Args:
      cls: the dataclass that `path` begins in, `Config`.
      path: of the field, "train.steps".
      recipe: `config.recipe` of the run.

    Raises:
      ConfigError: there is no such field.
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
    """Path -> (old, new) of every field in which two configs differ, as `to_dict` gives them."""
    old, new = flatten(old), flatten(new)
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}


def describe(changes: Mapping[str, tuple[object, object]]) -> str:
    """What `differences` found, in words."""
    return ", ".join(
        f"config.{name} was {old!r}, now {new!r}" for name, (old, new) in changes.items()
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Path -> value of every field of a config, as `to_dict` gives it."""
    flat = {}
    for name, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
