"""Arguments of Python's functions: texts, whatever they come in, and whole numbers."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from convbert_jax.data.errors import DataError, shorten


class ArgumentError(DataError):
    """An argument that is not what the function takes."""


def as_texts(texts: Any) -> tuple[list[tuple[str, ...]], bool]:
    """([(text,) or (first, second)], whether it is a single one).

    Raises:
      ArgumentError: something else, or text that is no Unicode.
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
                f"texts[{number}] is {shorten(repr(text), 60)}; it must be a text, or two as a "
                "tuple.",
                field=f"texts[{number}]",
            )
        for part in parts:
            _check_characters(f"texts[{number}]", part)
        found.append(tuple(parts))
    return found, False


def as_single_texts(texts: Any) -> tuple[list[str], bool]:
    """As `as_texts`, of texts alone."""
    found, single = as_texts(texts)
    for number, parts in enumerate(found):
        if len(parts) > 1:
            raise ArgumentError(
                f"texts[{number}] is a pair; this reads one text at a time.",
                field=f"texts[{number}]",
            )
    return [text for (text, *_) in found], single


def as_rows(name: str, values: Any) -> Iterable:
    """`values` if they are several of something.

    Raises:
      ArgumentError: they are not, as a number; or are a dict, bytes or a table, whose parts are no
        texts.
    """
    if hasattr(values, "columns"):  # it would give the names of these
        raise ArgumentError(
            f"{name} is a table; give one column of it, or its rows as dicts, as "
            "table.to_dict('records') of pandas or table.to_dicts() of polars.",
            field=name,
        )
    single = getattr(values, "ndim", 1) == 0  # of NumPy, whose iter() fails
    is_parts = isinstance(values, Mapping | bytes | bytearray)
    if single or is_parts or not isinstance(values, Iterable):
        raise ArgumentError(
            f"{name} is {shorten(repr(values), 60)}; it must be a text, or a list of them.",
            field=name,
        )
    return values


def whole_number(name: str, value: Any, least: int, most: int | None = None, of: str = "") -> int:
    """`value` as an int.

    Args:
      of: what `most` counts, as the end of a sentence.

    Raises:
      ArgumentError: it is none, or beyond its bounds.
    """
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if good and least <= value and (most is None or value <= most):
        return int(value)
    bounds = f"of at least {least}" if most is None else f"between {least} and the {most} {of}"
    raise ArgumentError(
        f"{name}={value!r} must be a whole number {bounds}.", field=name, value=value
    )


def _check_characters(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{name} has half of a surrogate pair at character {error.start}, which is no "
            "text; take it out.",
            field=name,
        ) from None
