"""Checks the parts of errors instead of their wording."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from convbert_jax.config import UserError


@contextlib.contextmanager
def refused(
    kind: type[UserError] = UserError,
    *mentions: Any,
    field: str | None = None,
    value: Any = None,
    path: str | os.PathLike | None = None,
    line: int | None = None,
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects an error of `kind` with the given parts and a message that contains them.

    Args:
      mentions: names and values, not phrases, that the message also contains.
      field, value, path, line: attributes of `UserError`; None: not checked.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    parts = {"field": field, "value": value, "path": path and os.fspath(path), "line": line}
    given = {name: part for name, part in parts.items() if part is not None}
    assert {name: getattr(error, name) for name in given} == given
    for part in (*given.values(), *mentions):
        assert str(part) in str(error)
