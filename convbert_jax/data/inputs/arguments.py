"""Validation of arguments of Python functions: texts and integers."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from convbert_jax.data.errors import DataError, shorten


class ArgumentError(DataError):
    """An invalid argument of a Python function."""


def as_texts(texts: Any) -> tuple[list[tuple[str, ...]], bool]:
    """Converts a text, or an iterable of texts and pairs, to a list of tuples.

    Returns:
      ([(text,) or (first, second), ...], whether the argument was a single text).

    Raises:
      ArgumentError: another type, or text with unpaired surrogates.
    """
    if isinstance(texts, str):
        _check_characters("texts", texts)
        return [(texts,)], True
    found = []
    for number, text in enumerate(as_rows("texts", texts)):
        parts = (text,) if isinstance(text, str) else text
        good = isinstance(parts, tuple | list) and 1 <= len(parts) <= 2
        if not good or not all(isinstance(part, str) for part in parts):
            raise ArgumentError(
                f"texts[{number}] is {shorten(repr(text), 60)}. It must be a text or a tuple of "
                "two texts.",
                field=f"texts[{number}]",
            )
        for part in parts:
            _check_characters(f"texts[{number}]", part)
        found.append(tuple(parts))
    return found, False


def as_single_texts(texts: Any) -> tuple[list[str], bool]:
    """Like `as_texts`, but pairs are an error and the list contains texts instead of tuples."""
    found, single = as_texts(texts)
    for number, parts in enumerate(found):
        if len(parts) > 1:
            raise ArgumentError(
                f"texts[{number}] is a pair. This function takes single texts only.",
                field=f"texts[{number}]",
            )
    return [text for (text, *_) in found], single


def as_rows(name: str, values: Any) -> Iterable:
    """Returns `values` if they are an iterable of rows.

    Raises:
      ArgumentError: not iterable, or a dict, bytes or table, whose elements are not rows.
    """
    if hasattr(values, "columns"):  # iteration would yield the column names
        raise ArgumentError(
            f"{name} is a table. Pass one of its columns, or its rows as dicts: "
            "table.to_dict('records') in pandas, table.to_dicts() in polars.",
            field=name,
        )
    single = getattr(values, "ndim", 1) == 0  # a NumPy scalar: iter() raises an error
    is_parts = isinstance(values, Mapping | bytes | bytearray)
    if single or is_parts or not isinstance(values, Iterable):
        raise ArgumentError(
            f"{name} is {shorten(repr(values), 60)}. It must be a text or a list of texts.",
            field=name,
        )
    return values


def whole_number(name: str, value: Any, least: int, most: int | None = None, of: str = "") -> int:
    """Returns `value` as an int.

    Args:
      least: smallest valid value.
      most: largest valid value, or None.
      of: unit of `most` for the message, for example "positions of the model".

    Raises:
      ArgumentError: not an integer, or out of bounds.
    """
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if good and least <= value and (most is None or value <= most):
        return int(value)
    bounds = f"of at least {least}" if most is None else f"from {least} to {most} ({of})"
    raise ArgumentError(f"{name}={value!r} must be an integer {bounds}.", field=name, value=value)


def _check_characters(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{name} contains an unpaired surrogate at character {error.start}. Remove or replace "
            "it.",
            field=name,
        ) from None
