"""Annotations of config fields: bounds, choices, and whether a resumed run may change them.

    steps: Changeable[Count] = 1_000_000
    remat: Changeable[Literal["none", "dots", "full"]] = "none"

A lower bound is the smallest meaningful value. An upper bound is far beyond practical values; it
turns a typing error into a message instead of an out-of-memory or 32-bit overflow error during a
run.

Settings of speed, reporting, duration and learning rate may change on resume. Network, data, batch
size and objective, which determine the results so far, are fixed from the first checkpoint on. In
fine-tuning, tasks and seeds may be added; the optimizer may not change, because finished and new
runs are compared.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from convbert_jax.config.errors import ConfigError

_T = TypeVar("_T")
ALWAYS, IN_PRETRAINING = "changeable", "changeable in pre-training"
Changeable = Annotated[_T, ALWAYS]
ChangeableInPretraining = Annotated[_T, IN_PRETRAINING]
_ENCODING = "encoding"
Encoding = Annotated[str, _ENCODING]
AutoBool = bool | Literal["auto"]
INT_OR_TEXT = int | str


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval from `low` to `high`, closed or open at each end; for tuples, of each item."""

    low: float
    high: float
    with_low: bool = True
    with_high: bool = True
    note: str = ""  # meaning of a special value

    def __contains__(self, value: float) -> bool:
        """Returns whether `value` is inside; False for NaN."""
        above = self.low <= value if self.with_low else self.low < value
        return above and (value <= self.high if self.with_high else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.with_low else 'above'} {_spell(self.low)}"
        high = f"{'at most' if self.with_high else 'below'} {_spell(self.high)}"
        return f"{low} and {high}{self.note and f' ({self.note})'}"


INT32 = 2**31 - 1  # steps and positions are counted in 32 bits on the device
Count = Annotated[int, Range(1, INT32)]
CountOrOff = Annotated[int, Range(0, INT32, note="0 is off")]
# Steps, or a text as "100M words", see lengths.py.
Length = Annotated[INT_OR_TEXT, Range(1, INT32)]
LengthOrOff = Annotated[INT_OR_TEXT, Range(0, INT32, note="0 is off")]
CountOrAll = Annotated[int, Range(0, INT32, note="0 is all")]
SmallCount = Annotated[int, Range(1, 1_024)]
CountOrModel = Annotated[int, Range(0, 1_024, note="0 is the value of config.model")]
Width = Annotated[int, Range(1, 2**18)]
Size = Annotated[int, Range(1, 2**20)]  # of an axis: rows, tokens
RowLength = Annotated[int, Range(8, 2**20, note="[CLS], [SEP] and some text")]
MeshSize = Annotated[int, Range(-1, 2**20, note="-1 is all remaining devices")]
Fraction = Annotated[float, Range(0.0, 1.0)]
FractionBelow1 = Annotated[float, Range(0.0, 1.0, with_high=False)]
PositiveFraction = Annotated[float, Range(0.0, 1.0, with_low=False)]
LearningRate = Annotated[float, Range(0.0, 1e3, with_low=False)]
Epsilon = Annotated[float, Range(1e-30, 1.0)]  # smaller values may underflow to 0 in float32
Weight = Annotated[float, Range(0.0, 1e6)]
RotaryBase = Annotated[float, Range(1.0, 1e9, with_low=False)]
Temperature = Annotated[float, Range(1e-4, 1e4)]


@dataclasses.dataclass(frozen=True)
class Field:
    """The annotation of a field.

    Attributes:
      type: int, float, bool, str, AutoBool, INT_OR_TEXT, a tuple of these, a section or a tuple of
        sections.
      choices: values of a text field; () if any.
      bounds: of a number, or of each item of a tuple.
      marks: ALWAYS or IN_PRETRAINING, if a resumed run may change the field; the mark of Encoding.
    """

    type: Any
    choices: tuple[str, ...] = ()
    bounds: Range | None = None
    marks: tuple[str, ...] = ()


@functools.cache
def describe(section: type) -> dict[str, Field]:
    """Returns name -> annotation of the fields of a section."""
    found = {}
    for name, kind in typing.get_type_hints(section, include_extras=True).items():
        notes = getattr(kind, "__metadata__", ())
        kind = kind.__origin__ if notes else kind
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        found[name] = Field(
            str if choices else kind,
            choices,
            next((note for note in notes if isinstance(note, Range)), None),
            tuple(note for note in notes if isinstance(note, str)),
        )
    return found


def check_fields(section: Any, path: str = "config") -> None:
    """Raises ConfigError for the first field of a section with a value that it does not allow."""
    for name, field in describe(type(section)).items():
        value, place = getattr(section, name), f"{path}.{name}"
        if field.choices:
            check_choice(place.removeprefix("config."), value, field.choices)
        if _ENCODING in field.marks:
            _check_encoding(place, value)
        items = value if isinstance(value, tuple) else (value,)
        for i, item in enumerate(items):
            if dataclasses.is_dataclass(item):
                check_fields(item, f"{place}[{i}]" if items is value else place)
            elif field.bounds and not isinstance(item, str) and item not in field.bounds:
                raise ConfigError(f"must be {field.bounds}.", field=place, value=item)


def are_numbers(*steps_or_texts: int | str) -> bool:
    """Whether no length is a text; texts are compared when they are numbers of steps."""
    return not any(isinstance(length, str) for length in steps_or_texts)


def check_choice(field: str, value: str, choices: Collection[str]) -> None:
    """Raises ConfigError, which suggests the nearest name, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean '{near[0]}'? Choose" if near else "choose"
        raise ConfigError(
            f"is unknown; {hint} one of: {', '.join(choices)}.",
            field=f"config.{field}",
            value=value,
        )


def _check_encoding(place: str, encoding: str) -> None:
    """Raises ConfigError unless the encoding exists and decodes the byte "\\n" as line end."""
    try:
        same = b"\n".decode(encoding) == "\n"
    except LookupError:
        raise ConfigError(
            "is unknown; use an encoding that Python supports, for example utf-8, cp1252 or gbk.",
            field=place,
            value=encoding,
        ) from None
    except UnicodeDecodeError:
        same = False
    if not same:
        raise ConfigError(
            "is not supported, because its line ends differ from ASCII; convert the files "
            f"(iconv -f {encoding} -t UTF-8).",
            field=place,
            value=encoding,
        )


def _spell(value: float) -> str:
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return f"{value:,}" if abs(value) > 99_999 else str(value)
