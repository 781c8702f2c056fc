"""Errors of corpora, tables and vocabularies."""

import dataclasses
import os

from convbert_jax.config import UserError


class DataError(UserError, ValueError):
    """A corpus that cannot be read, prepared or resumed."""


class TokenizerError(DataError):
    """A vocabulary that cannot be trained, read or trusted."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A line or row of a file, for errors."""

    path: str | os.PathLike
    line: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.line}"


def shorten(text: str, most: int = 120) -> str:
    """`text` for a sentence: cut to `most` characters if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"
