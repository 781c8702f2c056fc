"""The fields of a config, read off its dataclasses: types, values, comments."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable

from convbert_jax.config import Config


def field_types(cls=Config, prefix: str = "") -> dict[str, type]:
    """Path, as "train.steps", -> type of every field that holds a value."""
    types = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            types |= field_types(kind, f"{prefix}{name}.")
        else:
            types[prefix + name] = kind
    return types


def nearest(path: str, fields: Iterable[str]) -> str | None:
    """The field that was meant by `path`: of the same name elsewhere, or of one like it."""
    fields = list(fields)
    leaf = path.rpartition(".")[2]
    by_leaf = {field.rpartition(".")[2]: field for field in reversed(fields)}
    if leaf in by_leaf:
        return by_leaf[leaf]
    if near := difflib.get_close_matches(path, fields, n=1, cutoff=0.6):
        return near[0]
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)
    return by_leaf[near[0]] if near else None
