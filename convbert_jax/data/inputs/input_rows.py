"""Rows to predict, from lines, JSON objects, table columns or Python values.

An input that cannot be predicted, for example an empty line, becomes a row with a problem, so that
each row has an answer.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax.data.tables.table_files import ABSENT, find_value
from convbert_jax.data.tables.table_formats import Fault, TableFormat
from convbert_jax.data.tables.text_lines import describe_escapes
from convbert_jax.data.tasks.own_rows import describe_problem
from convbert_jax.files import parse_json

LONGEST = 10_000_000  # maximum characters of all texts of a row
DEEPEST = 100  # maximum nesting; deeper JSON may be readable but not writable
_TOO_DEEP = f"has more than {DEEPEST} nested lists or objects"


@dataclasses.dataclass(frozen=True)
class ModelInput:
    """Input of a model, and the format of its training files.

    Attributes:
      kind: config.outputs.kind, or "writing" for generative models.
      texts: number of texts of a row.
      columns: possible column names of the texts; the first names that exist are used.
      number: index, from 0, of the text column in a table without a header.
      form: format of the training files; its `format` may be "auto".
      id: column with the id of a row.
      label: label column, which may be missing in a file without a header.
      endings: suffixes of the training files, for example ".csv".
      may_be_empty: whether an empty text is valid, for example as a prompt.
    """

    kind: str
    texts: int
    columns: tuple[tuple[str, ...], ...]
    form: TableFormat
    id: str = ""
    label: str = ""
    endings: tuple[str, ...] = ()
    may_be_empty: bool = False
    number: int | None = None

    @property
    def wanted(self) -> str:
        """The expected form of a line, for error messages."""
        if self.kind == "span":
            return (
                'a question and a context with a tab between them or {"question": …, "context": …}'
            )
        if self.kind == "tagging":
            return 'a text or {"words": […]}'
        if self.kind == "writing":
            return f'a text or {{"{self.columns[0][0]}": …}}'
        if self.texts == 2:
            return 'two texts with a tab between them or {"texts": [first, second]}'
        return 'a text or {"text": …}'


@dataclasses.dataclass(frozen=True)
class InputRow:
    """A row to predict; a row with a `problem` (a predicate for "line N") has no texts."""

    number: int  # row number from 0
    line: int  # line of the file, from 1, where the row begins
    id: Any = None
    texts: tuple[str, ...] = ()  # for tagging, one text of words joined by single spaces
    names: tuple[str, ...] = ()  # columns of the texts; () if unnamed
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # all other columns
    problem: str = ""


def from_fault(fault: Fault, number: int, line: int) -> InputRow:
    """Converts a fault of the table format to a row with a problem."""
    return InputRow(number, line, problem=fault.problem)


def from_text(text: str, number: int, line: int, reads: ModelInput) -> InputRow:
    """Parses a plain line: a tab separates two texts, spaces separate words."""
    texts = tuple(text.split("\t")) if reads.texts == 2 else (text,)
    texts = tuple(part.strip() for part in texts)
    row = InputRow(number, line)
    if reads.may_be_empty and texts == ("",):
        return dataclasses.replace(row, texts=texts)
    if not any(texts):
        return dataclasses.replace(row, problem="is empty")
    if len(texts) != reads.texts or not all(texts):
        count = _count_texts(sum(map(bool, texts)))
        return dataclasses.replace(row, problem=f"has {count}; this model reads {reads.wanted}")
    if reads.kind == "tagging":
        texts = (" ".join(text.split()),)
    return _with_texts(row, texts)


def parse_object(text: str, reads: ModelInput) -> dict | Fault | None:
    """Parses the JSON object of a line; returns None for plain text, which may begin with "{".

    A line is a JSON object only if it has a key for texts. If it has one but is invalid JSON, it
    is a fault.
    """
    if not text.lstrip().startswith("{"):
        return None
    known = {"text", "texts", "words", *(name for names in reads.columns for name in names)}
    try:
        record = parse_json(text)
    except ValueError as error:
        if any(f"{json.dumps(name)}:" in text.replace(" ", "") for name in known):
            return Fault(f"is not JSON: {str(error).removeprefix('it is not JSON: ')}")
        return None
    if not isinstance(record, dict):
        return None
    return record if any(find_value(record, name) is not ABSENT for name in known) else None


def from_object(record: dict, number: int, line: int, reads: ModelInput) -> InputRow:
    """Reads a JSON object whose texts have the names of the training columns, or "texts"."""
    if _is_too_deep(record):
        return InputRow(number, line, problem=_TOO_DEEP)
    for names in reads.columns:
        values = [find_value(record, name) for name in names]
        if all(value is not ABSENT for value in values):
            named = record | dict(zip(names, values, strict=True))
            return from_columns(named, names, number, line, reads)
    row = InputRow(number, line, _find_id(record, reads))
    if "texts" not in record or reads.kind in ("tagging", "span"):
        names = reads.columns[0] if reads.columns else ("texts",)
        missing = " and no ".join(f"'{name}'" for name in names if name not in record)
        problem = f"has no {missing}"
        return dataclasses.replace(row, problem=f"{problem}; this model reads {reads.wanted}")
    values = record["texts"]
    if not isinstance(values, list) or len(values) != reads.texts:
        many = isinstance(values, list)
        found = _count_texts(len(values)) if many else f"{type(values).__name__}, not a list,"
        problem = f"has {found} in 'texts'; this model reads {reads.wanted}"
        return dataclasses.replace(row, problem=problem)
    if problem := _find_escapes(record, reads):
        return InputRow(number, line, problem=problem)
    others = {name: value for name, value in record.items() if name not in ("texts", "id")}
    return _checked(dataclasses.replace(row, others=others), ["texts"] * reads.texts, values, reads)


def from_value(value: Any, number: int, reads: ModelInput) -> InputRow:
    """Reads a Python value: a text, a tuple of two texts, a list of words (tagging), or a dict.

    A dict is read by `from_object`. The line of the row is `number` + 1.
    """
    line = number + 1
    if isinstance(value, Mapping):
        return from_object(dict(value), number, line, reads)
    values = [value] if isinstance(value, str) or reads.kind == "tagging" else value
    row, many = InputRow(number, line), isinstance(values, list | tuple)
    if not many or len(values) != reads.texts:
        found = _count_texts(len(values)) if many else f"{type(values).__name__}, not a text"
        problem = f"has {found}; this model reads {reads.wanted}"
        return dataclasses.replace(row, problem=problem)
    values = [list(part) if isinstance(part, tuple) else part for part in values]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if problem := _find_escapes([part for part in parts if isinstance(part, str)], reads):
        return dataclasses.replace(row, problem=problem)
    names = ["words" if reads.kind == "tagging" else "texts"] * reads.texts
    return _checked(row, names, values, reads)


def from_columns(
    record: Mapping[str, Any], names: Sequence[str], number: int, line: int, reads: ModelInput
) -> InputRow:
    """Reads a row of named columns; `names` are the columns of the texts."""
    if _is_too_deep(record):
        return InputRow(number, line, problem=_TOO_DEEP)
    if problem := _find_escapes(record, reads):
        return InputRow(number, line, problem=problem)
    others = {name: v for name, v in record.items() if name not in names and name != "id"}
    row = InputRow(number, line, _find_id(record, reads), names=tuple(names), others=others)
    return _checked(row, names, [record[name] for name in names], reads)


def _checked(row: InputRow, names: Sequence[str], values: list, reads: ModelInput) -> InputRow:
    if reads.kind == "tagging" and isinstance(values[0], str):
        values = [values[0].split()]
    if reads.kind == "writing":
        values = [_joined(value) for value in values]
    if reads.may_be_empty and values == [""]:
        return dataclasses.replace(row, texts=("",))
    if problem := describe_problem(reads.kind, names, values):
        return dataclasses.replace(row, problem=problem)
    texts = tuple(" ".join(value) if isinstance(value, list) else value for value in values)
    if reads.kind != "span":  # stripping would shift the offsets of answers
        texts = tuple(text.strip() for text in texts)
    return _with_texts(row, texts)


def _joined(value: Any) -> Any:
    """Joins a list of sentences, as in training pairs."""
    sentences = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return " ".join(value) if sentences else value


def _with_texts(row: InputRow, texts: tuple[str, ...]) -> InputRow:
    size = sum(map(len, texts))
    if size > LONGEST:
        problem = f"has {size:,} characters; at most {LONGEST:,} are read"
        return dataclasses.replace(row, problem=problem)
    return dataclasses.replace(row, texts=texts)


def _find_escapes(value: Mapping | Sequence, reads: ModelInput) -> str:
    """Describes the first invalid text anywhere in a row, because the output repeats all of it."""
    waiting: list[Any] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += (*part, *part.values())
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str) and (problem := describe_escapes(part, reads.form.encoding)):
            return problem
    return ""


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        lists = (v.values() if isinstance(v, Mapping) else v for v in level)
        level = [v for values in lists for v in values if isinstance(v, list | Mapping)]
        if not level:
            return False
    return True


def _find_id(record: Mapping[str, Any], reads: ModelInput) -> Any:
    for name in (reads.id, "id"):
        if name and record.get(name) not in (None, ""):
            return record[name]
    return None


def _count_texts(count: int) -> str:
    return f"{count} text{'s' * (count != 1)}"
