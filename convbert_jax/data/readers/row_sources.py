"""Sources of rows of named columns, read as documents (one column) or as pairs of texts.

A source is divided into units of about 16 MB, each read sequentially by one process. A pair of a
test set may have several references, given as more files, more columns, or a list of targets.
"""

import abc
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from convbert_jax.data.errors import Location
from convbert_jax.data.readers.rows import Fault, find_value, list_columns
from convbert_jax.data.readers.text_files import UnitFiles, clean, decode

# Targets of a pair: "one" rejects pairs with more than one, "first" drops the others. "each": every
# column has one text; "scored": and the last one a number.
Targets = Literal["one", "first", "all", "each", "scored"]
# number, (source, target, *more targets), or texts and a number
Pairs = Iterator[tuple[int, tuple[str | float, ...] | Fault]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSource(UnitFiles, abc.ABC):
    """Rows in units; picklable.

    Attributes:
      fingerprint: hash of content and format, not of the folder.
      columns: the column of the documents, or (source, target, *more targets).
      encoding_errors: policy of `decode` for documents.
      targets: how pairs with several targets are read.
    """

    name: str
    fingerprint: str
    columns: tuple[str, ...]
    encoding_errors: str = "error"
    targets: Targets = "one"

    @abc.abstractmethod
    def rows(self, unit: Any) -> Iterator[tuple[int, Mapping[str, Any] | Fault]]:
        """Yields (number from 1, row) of a unit; text may be bytes.

        Raises:
          DataError: a file cannot be read.
        """

    def place(self, number: int, text: int = 0) -> Location:
        """Returns the place of a row, or of a text of a pair, for errors."""
        del text  # all texts are in the row
        return Location(self.name, number, "row")

    def documents(self, unit: Any, tally: Counter | None = None) -> Iterator[str]:
        """Yields the texts of the rows of `unit`; null and blank texts are skipped."""
        for number, row in self.rows(unit):
            text = find_value(row, self.columns[0])
            if isinstance(text, bytes):
                try:
                    text = decode(text, self.encoding_errors, tally)
                except UnicodeDecodeError:
                    raise self.place(number).error(
                        "is not UTF-8. Set config.data.encoding_errors to 'replace' or 'skip'.",
                        field="config.data.encoding_errors",
                    ) from None
            yield from clean(text or "")

    def pairs(self, unit: Any) -> Pairs:
        """Yields (number, texts or the fault). Raises DataError as `rows`."""
        for number, row in self.rows(unit):
            texts = row if isinstance(row, Fault) else pair_of(row, self.columns, self.targets)
            yield number, texts


def pair_of(
    row: Mapping[str, Any], columns: tuple[str, ...], targets: Targets
) -> tuple[str | float, ...] | Fault:
    """Returns (source, target, *more targets) of a row, or texts and number, or the fault.

    A source that is a list of sentences is joined by spaces; a list of targets is a list of
    references. A blank cell is not an additional target.
    """
    if targets in ("each", "scored"):
        return _one_text_each(row, columns, scored=targets == "scored")
    source, target, *further = (_texts_of(row, name) for name in columns)
    for name, found in zip(columns, (source, target), strict=False):
        if isinstance(found, Fault):
            return found
        if not found:
            return Fault(f"has no text in '{name}' (it has: {list_columns(row)})")
    if targets == "one" and len(target) > 1:  # ambiguous: sentences or alternative targets
        return Fault(f"has a list of {len(target)} texts in '{columns[1]}' instead of one target")
    if targets != "all":
        return " ".join(source), target[0]
    rest = [text for found in further if not isinstance(found, Fault) for text in found]
    more = (text for text in [*target[1:], *rest] if text.strip())
    return " ".join(source), target[0], *more


def _one_text_each(
    row: Mapping[str, Any], columns: tuple[str, ...], *, scored: bool
) -> tuple[str | float, ...] | Fault:
    count = len(columns) - scored
    found: list[str | float] = []
    for name in columns[:count]:
        texts = _texts_of(row, name)
        if isinstance(texts, Fault):
            return texts
        if len(texts) != 1:
            return Fault(f"has no single text in '{name}' (it has: {list_columns(row)})")
        found += texts
    for name in columns[count:]:
        value = find_value(row, name)
        try:
            number = float(value.decode() if isinstance(value, bytes) else value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            return Fault(f"has no number in '{name}' (it has: {list_columns(row)})")
        found.append(number)
    return tuple(found)


def _texts_of(row: Mapping[str, Any], name: str) -> list[str] | Fault:
    """Returns the texts of a column; [] if it has no text or a value that is not a string."""
    text = find_value(row, name)
    parts = list(text) if isinstance(text, list | tuple) else [text]
    try:
        parts = [part.decode("utf-8") if isinstance(part, bytes) else part for part in parts]
    except UnicodeDecodeError:
        return Fault(f"has bytes in '{name}' that are not UTF-8")
    return parts if all(isinstance(part, str) for part in parts) else []
