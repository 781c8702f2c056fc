"""Errors of corpora, tables and vocabularies."""

import dataclasses
import os
from typing import Any

from convbert_jax.config import UserError


class DataError(UserError, ValueError):
    """Error while reading, preparing or resuming a corpus."""


class TokenizerError(DataError):
    """Error while training, reading or checking a vocabulary."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A line or row of a file, for error messages."""

    path: str | os.PathLike
    line: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.line}"

    def error(self, problem: str, **fields: Any) -> DataError:
        """Returns an error about this line; `problem` is its predicate and the fix."""
        line = self.line if self.unit == "line" else None
        return DataError(f"{self} {problem}", path=self.path, line=line, **fields)


def shorten(text: str, most: int = 120) -> str:
    """Truncates `text` to `most` characters for a message."""
    return text if len(text) <= most else text[: most - 1] + "…"
