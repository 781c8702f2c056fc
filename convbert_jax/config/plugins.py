"""Custom Python code that a config names as PACKAGE.MODULE:NAME, and permission to import it.

Importing a module executes it, and the config.json of a run may come from an untrusted source. A
name is therefore imported only after `allow` has received it: from the command line, from a config
file in Python, or from the caller of `convbert_jax`.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from convbert_jax.config.errors import PluginError

_FIELDS = ("mixer", "decoder_mixer", "method")  # fields that may hold such a name, in any section
_allowed: set[str] = set()
_trusts_all = contextvars.ContextVar("trusts_all", default=False)


def named(values: Any) -> Iterator[str]:
    """Yields the plug-in names in the fields of a config.

    Args:
      values: sections, stages or fields by path ("model.mixer"), nested as in configs and sweeps; a
        field may have several values.
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
    """Permits this process to import names that the user gave."""
    _allowed.update(names)


def to_flags() -> list[str]:
    """Returns the flag that permits the same names in another process of this program."""
    return [f"--plugins={','.join(sorted(_allowed))}"] if _allowed else []


@contextlib.contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Permits all imports inside the context if `trust`."""
    token = _trusts_all.set(trust or _trusts_all.get())
    try:
        yield
    finally:
        _trusts_all.reset(token)


def check_allowed(name: str, field: str) -> None:
    """Raises PluginError unless the import of `name` is permitted."""
    if _trusts_all.get():
        allow([name])
    if name not in _allowed:
        raise PluginError(
            "names Python code outside of convbert_jax, which needs permission to be imported: "
            f"review that code, then add --plugins={name} (in Python: trust_remote_code=True).",
            field=field,
            value=name,
        )


def load(name: str, field: str) -> Any:
    """Imports PACKAGE.MODULE:NAME.

    Args:
      field: the field with this name, for the error message.

    Raises:
      PluginError: the import is not permitted, or it fails.
    """
    check_allowed(name, field)
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:
        raise PluginError(
            f"cannot be imported ({first_line(error)}); start the program in the folder of the "
            "module or add it to PYTHONPATH, or use another name.",
            field=field,
            value=name,
        ) from error


def first_line(error: Exception) -> str:
    """Returns the type and the first line of an error, to be used inside a message."""
    first = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
