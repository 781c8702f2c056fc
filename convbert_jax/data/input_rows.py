"""Rows to predict: lines, JSON objects, tables or Python values.

An input that cannot be predicted, for example an empty line, becomes a row with a problem, so that
each row has an answer.
"""

import dataclasses
import itertools
import json
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from convbert_jax.config import Config
from convbert_jax.config.data import INPUT_FORMATS, TaskSection
from convbert_jax.data.errors import DataError, Location, shorten
from convbert_jax.data.readers import rows
from convbert_jax.data.readers.rows import (
    ABSENT,
    FORMAT_OF_ENDING,
    OPENERS,
    Fault,
    Source,
    TableFormat,
    decode_lines,
    describe_escapes,
    ending_of,
    find_column,
    find_value,
)
from convbert_jax.data.tasks.glue import GLUE
from convbert_jax.data.tasks.own_task import describe_problem


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
            problem = f"is {shorten(repr(text), 60)}. It must be a text or a tuple of two texts."
            raise ArgumentError(problem, field=f"texts[{number}]")
        for part in parts:
            _check_characters(f"texts[{number}]", part)
        found.append(tuple(parts))
    return found, False


def as_single_texts(texts: Any) -> tuple[list[str], bool]:
    """Like `as_texts`, but pairs are an error and the list contains texts instead of tuples."""
    found, single = as_texts(texts)
    for number, parts in enumerate(found):
        if len(parts) > 1:
            problem = "is a pair. This function takes single texts only."
            raise ArgumentError(problem, field=f"texts[{number}]")
    return [text for (text, *_) in found], single


def as_rows(name: str, values: Any) -> Iterable:
    """Returns `values` if they are an iterable of rows.

    Raises:
      ArgumentError: not iterable, or a dict, bytes or table, whose elements are not rows.
    """
    if hasattr(values, "columns"):  # iteration would yield the column names
        raise ArgumentError(
            "is a table. Pass one of its columns, or its rows as dicts: table.to_dict('records') "
            "in pandas, table.to_dicts() in polars.",
            field=name,
        )
    single = getattr(values, "ndim", 1) == 0  # a NumPy scalar: iter() raises an error
    is_parts = isinstance(values, Mapping | bytes | bytearray)
    if single or is_parts or not isinstance(values, Iterable):
        problem = f"is {shorten(repr(values), 60)}. It must be a text or a list of texts."
        raise ArgumentError(problem, field=name)
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
        problem = f"contains an unpaired surrogate at character {error.start}"
        raise ArgumentError(f"{problem}. Remove or replace it.", field=name) from None


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

    def but(self, problem: str) -> "InputRow":
        """Returns the row with a problem."""
        return dataclasses.replace(self, problem=problem)


def from_text(text: str, number: int, line: int, reads: ModelInput) -> InputRow:
    """Parses a plain line: a tab separates two texts, spaces separate words."""
    texts = tuple(text.split("\t")) if reads.texts == 2 else (text,)
    texts = tuple(part.strip() for part in texts)
    row = InputRow(number, line)
    if reads.may_be_empty and texts == ("",):
        return dataclasses.replace(row, texts=texts)
    if not any(texts):
        return row.but("is empty")
    if len(texts) != reads.texts or not all(texts):
        count = _count_texts(sum(map(bool, texts)))
        return row.but(f"has {count}; this model reads {reads.wanted}")
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
    record = rows.parse_object(text)
    if isinstance(record, Fault):
        has_key = any(f"{json.dumps(name)}:" in text.replace(" ", "") for name in known)
        return record if has_key else None
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
        return row.but(f"has no {missing}; this model reads {reads.wanted}")
    values = record["texts"]
    if not isinstance(values, list) or len(values) != reads.texts:
        many = isinstance(values, list)
        found = _count_texts(len(values)) if many else f"{type(values).__name__}, not a list,"
        return row.but(f"has {found} in 'texts'; this model reads {reads.wanted}")
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
        return row.but(f"has {found}; this model reads {reads.wanted}")
    values = [list(part) if isinstance(part, tuple) else part for part in values]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if problem := _find_escapes([part for part in parts if isinstance(part, str)], reads):
        return row.but(problem)
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
    if reads.kind == "writing":  # a list of sentences is joined, as in training pairs
        values = [
            " ".join(value)
            if isinstance(value, list) and all(isinstance(part, str) for part in value)
            else value
            for value in values
        ]
    if reads.may_be_empty and values == [""]:
        return dataclasses.replace(row, texts=("",))
    if problem := describe_problem(reads.kind, names, values):
        return row.but(problem)
    texts = tuple(" ".join(value) if isinstance(value, list) else value for value in values)
    if reads.kind != "span":  # stripping would shift the offsets of answers
        texts = tuple(text.strip() for text in texts)
    return _with_texts(row, texts)


def _with_texts(row: InputRow, texts: tuple[str, ...]) -> InputRow:
    size = sum(map(len, texts))
    if size > LONGEST:
        return row.but(f"has {size:,} characters; at most {LONGEST:,} are read")
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


_HINT = "Select the columns with --texts=COLUMN or --texts=FIRST,SECOND"


def describe_model_input(config: Config, texts: Sequence[str] = ()) -> ModelInput:
    """Returns the input of the model of `config`, which is fine-tuned or generative.

    Args:
      texts: column names that replace the columns of training.
    """
    if config.spec.generates:
        return _describe_source(config, texts)
    outputs, section = config.outputs, config.task
    own = "own" in config.finetune.tasks and outputs.task == section.name
    glue = None if own else GLUE.get(outputs.task)
    files = _files_of(section)
    names = [tuple(texts)] if texts else [outputs.columns]
    if not texts:
        if own:  # column numbers are valid only in files with the columns of training
            learned = (outputs.columns, section.texts)
            names[:0] = (tuple(_name(n, files["form"]) for n in columns) for columns in learned)
            names.append(section.texts)
        if glue:
            names += [glue.tfds_texts, *(split.texts for split in glue.splits.values())]
        names.append({"span": ("question", "context"), "tagging": ("words",)}.get(outputs.kind, ()))
        names.append(("text",))
    columns = tuple(dict.fromkeys(n for n in names if n and len(n) == outputs.texts))
    reads = ModelInput(outputs.kind, outputs.texts, columns, TableFormat("auto"))
    if own:
        found = {"id": section.id, "label": section.label}
        found = {field: _name(column, files["form"]) for field, column in found.items()}
        return dataclasses.replace(reads, **found, **files)
    if glue:
        train = glue.splits["train"]
        form = TableFormat("tsv", columns=train.columns)
        return dataclasses.replace(reads, id="index", label=train.label, form=form)
    return reads


def _describe_source(config: Config, texts: Sequence[str]) -> ModelInput:
    if len(texts) > 1:
        raise DataError(
            f"has {len(texts)} columns, but this model reads one text per row. Select one column.",
            field="--texts",
            value=tuple(texts),
        )
    learned = ""  # name or number of the source column in the training pairs
    if config.spec.data == "parallel":
        section = config.parallel
        learned = (*section.columns, "0" if section.source.startswith("tsv:") else "")[0]
    of_language = config.recipe == "causal_lm"
    column = (*texts, learned)[0]
    number = int(column) if column.isdecimal() else None
    usual = ("prompt" if of_language else "source", "text")
    if texts and number is not None:
        usual = ()  # a column selected by number has no alternatives
    names = (column, *usual) if number is None else (*usual, column)
    columns = tuple((name,) for name in dict.fromkeys(names) if name)
    return ModelInput(
        "writing", 1, columns, TableFormat("auto"), may_be_empty=of_language, number=number
    )


def choose_format(name: str, asked: str, reads: ModelInput) -> str:
    """Returns the format of an input.

    Args:
      name: file name, which determines the format if `asked` is "auto".
      asked: the requested format, or "auto".
      reads: input of the model; files with the suffix of its training files have their format.

    Raises:
      DataError: the format is unknown or not supported by the model.
    """
    if asked not in INPUT_FORMATS:
        problem = f"is unknown. Choose one of: {', '.join(INPUT_FORMATS)}."
        raise DataError(problem, field="--input_format", value=asked)
    chosen = asked
    if asked == "auto":
        chosen = FORMAT_OF_ENDING.get(ending_of(name), "lines")
        if ending_of(name) in reads.endings and reads.form.format in INPUT_FORMATS[1:]:
            chosen = reads.form.format
    if chosen == "pattern" and not reads.form.pattern:
        problem = "requires a model trained with config.task.pattern."
        raise DataError(problem, field="--input_format", value="pattern")
    if chosen == "conll" and reads.kind != "tagging":
        problem = f"is for tagging; this model is for {reads.kind}."
        raise DataError(problem, field="--input_format", value="conll")
    return chosen


def open_input(source: Source, chosen: str, reads: ModelInput, key: str = "") -> Iterator[InputRow]:
    """Yields all rows in order; they are read lazily.

    Args:
      chosen: a format from `choose_format`.
      key: key of the list in a JSON document.

    Raises:
      DataError: unreadable file, or a table without the columns of the model; raised at once or
        while rows are read.
    """
    if chosen == "lines":
        return _read_lines(source, reads)
    form = dataclasses.replace(reads.form, format=chosen, escape=True)
    if reads.form.format not in (chosen, "auto"):  # the training files had another format
        form = dataclasses.replace(form, columns=(), rest_in_last=False)
    if form.encoding != "utf-8":
        logging.info("Reading %s as %s, like the training files.", source, form.encoding)
    header, rows = _open_table(source, form, reads, key)
    names = ()
    if header is not None:
        place = find_column(reads.id, header, form)
        if place is not None:  # the id column may be selected by number
            reads = dataclasses.replace(reads, id=header[place])
        names = _check_columns(source, header, form, reads)
        header = _unique(header)
    return (_from_row(row, header, names, n, line, reads) for n, (line, row) in enumerate(rows))


def _from_row(
    row: Any,
    header: Sequence[str] | None,
    names: Sequence[str],
    number: int,
    line: int,
    reads: ModelInput,
) -> InputRow:
    if isinstance(row, Fault):
        return InputRow(number, line, problem=row.problem)
    if header is None:
        return from_object(row, number, line, reads)
    return from_columns(dict(zip(header, row, strict=True)), names, number, line, reads)


# --- Lines ---


def _read_lines(source: Source, reads: ModelInput) -> Iterator[InputRow]:
    told: set[str] = set()
    for line, text in decode_lines(source, "utf-8", escape=True):
        bad = describe_escapes(text)
        record = Fault(bad) if bad else parse_object(text, reads)
        if isinstance(record, Fault):
            yield InputRow(line - 1, line, problem=record.problem)
        elif record is not None:
            yield from_object(record, line - 1, line, reads)
        else:
            _explain(source, line, text, reads, told)
            yield from_text(text, line - 1, line, reads)


def _explain(source: Source, line: int, text: str, reads: ModelInput, told: set[str]) -> None:
    """Warns once about each kind of ambiguous line."""
    if text.lstrip().startswith("{") and "object" not in told:
        told.add("object")
        logging.warning(
            "%s line %d begins with { but is not a JSON object with texts; such lines are read as "
            "plain text.",
            source,
            line,
        )
    if "\t" in text and reads.texts == 1 and reads.kind != "tagging" and "tab" not in told:
        told.add("tab")
        logging.warning(
            "%s line %d has a tab, which is read as a space because this model reads one text per "
            "line. Set --texts=FIRST,SECOND if the model reads two texts.",
            source,
            line,
        )


# --- Tables ---


def _open_table(source: Source, form: TableFormat, reads: ModelInput, key: str):
    """Opens a table; if the training files had no header, it may have one, or lack the labels."""
    if form.format == "conll":
        return _open_sentences(source, form, reads, key)
    may_lack_header = bool(form.columns) or reads.number is not None
    if form.format not in ("tsv", "csv") or not may_lack_header or form.rest_in_last:
        return OPENERS[form.format](source, form, key)
    first, rows = OPENERS[form.format](source, dataclasses.replace(form, columns=()), key)
    if any({_name(name, form) for name in names} <= set(first) for names in reads.columns):
        return first, rows
    if reads.number is not None:
        return [*map(str, range(len(first)))], itertools.chain([(1, first)], rows)
    for columns in (form.columns, _unlabelled(form, reads)):
        if len(columns) == len(first):
            return list(columns), itertools.chain([(1, first)], rows)
    raise DataError(
        f"{source} has {len(first)} columns in its first line, which is neither a header nor the "
        f"{len(form.columns)} columns of training ({shorten(', '.join(form.columns))}). {_HINT}.",
        field="--texts",
        path=source,
    )


def _open_sentences(source: Source, form: TableFormat, reads: ModelInput, key: str):
    """Opens CoNLL: one column of words, or the columns of training with or without labels."""
    numbers, rows = OPENERS["conll"](source, dataclasses.replace(form, columns=()), key)
    for columns in (form.columns, _unlabelled(form, reads), reads.columns[0]):
        if len(columns) == len(numbers):
            return list(columns), rows
    if form.columns:
        raise DataError(
            f"{source} has {len(numbers)} columns, but training had {len(form.columns)} "
            f"({shorten(', '.join(form.columns))}). Use these columns, or words only.",
            path=source,
        )
    return numbers, rows


def _unlabelled(form: TableFormat, reads: ModelInput) -> tuple[str, ...]:
    return tuple(name for name in form.columns if name != reads.label)


def _name(column: str, form: TableFormat) -> str:
    """Returns the name of a training column, which may be selected by number."""
    place = find_column(column, form.columns, form)
    return column if place is None else form.columns[place]


def _check_columns(source, header: Sequence[str], form: TableFormat, reads: ModelInput):
    """Returns the names of the columns with the texts."""
    for name in header:
        if problem := describe_escapes(name, form.encoding):
            raise Location(source, 1).error(f"{problem}.")
    for names in reads.columns:
        places = [find_column(name, header, form) for name in names]
        if None not in places:
            found = tuple(header[place] for place in places)
            logging.info("Reading %s as %s, texts: %s.", source, form.format, ", ".join(found))
            return found
    known = " or ".join(f"'{', '.join(names)}'" for names in reads.columns)
    raise DataError(
        f"{source} has no column {known} (columns: {shorten(', '.join(header))}). {_HINT}, or use "
        "--input_format=lines to read each line as text.",
        field="--texts",
        path=source,
    )


def _unique(header: Sequence[str]) -> list[str]:
    """Makes column names unique: the second "a" becomes "a.1"."""
    counts: dict[str, int] = {}
    found = []
    for name in header:
        count = counts.get(name, 0)
        counts[name] = count + 1
        found.append(f"{name}.{count}" if count else name)
    return found


def _files_of(section: TaskSection) -> dict[str, Any]:
    form = TableFormat(
        section.format,
        columns=section.columns,
        rest_in_last=section.rest_in_last,
        pattern=section.pattern,
        encoding=section.encoding,
    )
    files = ",".join((section.train, section.validation, section.test)).split(",")
    endings = {ending_of(file.strip().partition("#")[0]) for file in files} - {""}
    return {"form": form, "endings": tuple(sorted(endings))}
