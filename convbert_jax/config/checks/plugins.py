"""Python that a config names as PACKAGE.MODULE:NAME, and which of these names may be imported.

Importing a module executes it, and the config.json of a run may come from anyone. A name is
therefore imported only after `allow` has received it: from the command line, from a config file in
Python, or from the caller of `convbert_jax`.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from convbert_jax.config.errors import PluginError

_FIELDS = ("mixer", "decoder_mixer", "method")  # that may hold such a name, in any section
_allowed: set[str] = set()
_trusts_all = contextvars.ContextVar("trusts_all", default=False)


def named(values: Any) -> Iterator[str]:
    """The names of Python in fields of a config.

    Args:
      values: sections, stages or fields by path ("model.mixer"), nested as configs and sweeps
        are; a field may have several values.
    """
    if dataclasses.is_dataclass(values):
        values = vars(values)
    if isinstance(values, Mapping):
        for field, value in values.items():
            if str(field).rpartition(".")[2] in _FIELDS:
                texts = value if isinstance(value, list | tuple) else (value,)
                yield from (text for text in texts if isinstance(text, str) and ":" in text)
            yield from named(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from named(value)


def allow(names: Iterable[str]) -> None:
    """Permits this process to import what the user named."""
    _allowed.update(names)


def to_flags() -> list[str]:
    """The flag with which another process of this program permits the same names."""
    return [f"--plugins={','.join(sorted(_allowed))}"] if _allowed else []


@contextlib.contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Permits every name that is imported inside, if `trust`."""
    token = _trusts_all.set(trust or _trusts_all.get())
    try:
        yield
    finally:
        _trusts_all.reset(token)


def check_allowed(name: str, field: str) -> None:
    """Raises PluginError unless the user named `name`."""
    if _trusts_all.get():
        allow([name])
    if name not in _allowed:
        raise PluginError(
            "names Python outside of convbert_jax, which is imported only if you name "
            f"it: read that code, then add --plugins={name} (in Python: "
            "trust_remote_code=True).",
            field=field,
            value=name,
        )


def load(name: str, field: str) -> Any:
    """Imports PACKAGE.MODULE:NAME.

    Args:
      field: that has it, as the error calls it.

    Raises:
      PluginError: the user did not name it, or it cannot be imported.
    """
    check_allowed(name, field)
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:
        raise PluginError(
            f"cannot be imported ({first_line(error)}); start the program where Python "
            "finds it, in its folder or with PYTHONPATH, or name another one.",
            field=field,
            value=name,
        ) from error


def first_line(error: Exception) -> str:
    """The type and the first line of an error, as part of a sentence."""
    first = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
