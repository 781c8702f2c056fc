"""Reads tables of labeled text: tsv, csv, JSON, CoNLL, parallel lines, patterns.

Columns have names, or numbers from 0 (-1 is the last) if the file has no names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.tables.table_formats import OPENERS, BadRows, Fault, TableFormat

ABSENT = object()  # value of a missing column


def find_value(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or `ABSENT` if the row does not have it.

    A dotted name reads nested objects: "translation.en" is row["translation"]["en"], unless the row
    has a column "translation.en". Every column of a null object is null.
    """
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    if dot and first in row and row[first] is None:
        return None
    inner = row.get(first)
    return find_value(inner, rest) if dot and isinstance(inner, Mapping) else ABSENT


def list_columns(row: Mapping[str, Any]) -> str:
    """Returns the names of all columns for an error message, with dots for nested objects."""

    def names(row):
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                yield from (f"{name}.{inner}" for inner in names(value))
            else:
                yield str(name)

    return shorten(", ".join(names(row)))


def read_table(
    path: Path | tuple[Path, ...],
    wanted: Sequence[str],
    form: TableFormat,
    bad_rows: BadRows,
    *,
    key: str = "",
    optional: str = "",
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (line, values of the `wanted` columns and of `optional`) for each row of a file.

    Args:
      path: one file, decompressed if it ends in .gz; one file per column for format "parallel".
      key: key of the list in a file of format "json".
      optional: a column that may be missing; its value is then None. "" means no such column.

    Raises:
      DataError: empty file, missing column, invalid text or, depending on `bad_rows`, rows with
        another number of columns.
    """
    shown = path if isinstance(path, Path) else path[0]
    header, found = OPENERS[form.format](path, form, key)
    count = total = 0

    def usable():
        nonlocal total
        for line, row in found:
            total += 1
            if isinstance(row, Fault):
                bad_rows.report(line, row.problem)
            else:
                yield line, row

    rows = usable()
    if header is None:  # JSON objects, which contain their column names
        for line, record in rows:
            values = tuple(find_value(record, name) for name in wanted)
            missing = [n for n, value in zip(wanted, values, strict=True) if value is ABSENT]
            if missing:
                names = list_columns(record)
                problem = f"has no '{missing[0]}' (columns: {names}). {form.hint}"
                bad_rows.report(line, problem)
                continue
            count += 1
            if optional:
                value = find_value(record, optional)
                values = (*values, None if value is ABSENT else value)
            yield line, values
    else:
        places = _find_all(wanted, header, form, shown)
        if optional:
            places.append(find_column(optional, header, form))
        for line, cells in rows:
            if not count and form.columns and list(cells) == list(form.columns):
                raise DataError(
                    f"{shown} line {line} is a header, but the config also names the columns: "
                    f"{', '.join(cells)}. Remove one of the two.",
                    line=line,
                    path=shown,
                )
            count += 1
            yield line, tuple(None if place is None else cells[place] for place in places)
    bad_rows.summarize(total)
    if not count:
        first = f" that can be used: {bad_rows.first}" if bad_rows.count else ""
        raise DataError(f"{shown} has no rows{first}. Check the file.", path=shown)


def find_column(name: str, header: Sequence[str], form: TableFormat) -> int | None:
    """Returns the index of a column, or None if it is missing."""
    if name in header:
        return list(header).index(name)
    if form.numbered and re.fullmatch(r"-?\d+", name) and -len(header) <= int(name) < len(header):
        return int(name)
    return None


def _find_all(names: Sequence[str], header, form: TableFormat, path: Path) -> list[int | None]:
    twice = [name for name in names if list(header).count(name) > 1]
    if twice:
        raise DataError(
            f"{path} has two columns '{twice[0]}'. Rename one of them.",
            value=twice[0],
            path=path,
        )
    places = [find_column(name, header, form) for name in names]
    if None in places:
        missing, shown = names[places.index(None)], shorten(", ".join(header))
        hint = _other_separator(header, form) or form.hint
        raise DataError(
            f"{path} has no column '{missing}' (columns: {shown}). {hint}.",
            value=missing,
            path=path,
        )
    return places


def _other_separator(header: Sequence[str], form: TableFormat) -> str:
    """Returns a hint if the header seems to use another separator than the format, or ""."""
    ours = {"csv": ("a comma", ","), "tsv": ("a tab", "\t")}.get(form.format)
    if not ours or len(header) > 1 or form.columns:
        return ""
    others = {";": "';'", "\t": "tabs", ",": "commas", "|": "'|'"}
    found = next((name for sign, name in others.items() if sign in header[0]), "")
    return found and f"Its columns seem to be separated by {found}; use {ours[0]} instead"
