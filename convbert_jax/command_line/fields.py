"""Types and comments of the fields of a config, read from the source of its dataclasses."""

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable

from convbert_jax.config import Config, fields

_TRAILING = re.compile(r"  # (.*)$")


def field_types(cls=Config, prefix: str = "") -> dict[str, type]:
    """Returns path, as "train.steps", -> type of every field that is not a section."""
    types = {}
    for name, field in fields.describe(cls).items():
        if dataclasses.is_dataclass(field.type):
            types |= field_types(field.type, f"{prefix}{name}.")
        else:
            types[prefix + name] = field.type
    return types


def nearest(path: str, known: Iterable[str]) -> str | None:
    """Returns the closest field: one with the same name in another section, or a similar name."""
    known = list(known)
    leaf = path.rpartition(".")[2]
    by_leaf = {field.rpartition(".")[2]: field for field in reversed(known)}
    if leaf in by_leaf:
        return by_leaf[leaf]
    if near := difflib.get_close_matches(path, known, n=1, cutoff=0.6):
        return near[0]
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)
    return by_leaf[near[0]] if near else None


def comments(cls=Config, prefix: str = "") -> dict[str, str]:
    """Returns path -> comment of every field: the lines above it, and the end of its line."""
    lines = inspect.getsource(cls).splitlines()
    known = fields.describe(cls)
    found = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        name = node.target.id
        if dataclasses.is_dataclass(known[name].type):
            found |= comments(known[name].type, f"{prefix}{name}.")
            continue
        above, number = [], node.lineno - 2
        while lines[number].strip().startswith("#"):
            above.insert(0, lines[number].strip("# "))
            number -= 1
        beside = _TRAILING.search(lines[node.end_lineno - 1])
        found[prefix + name] = " ".join([*above, *(beside.groups() if beside else ())])
    return found
