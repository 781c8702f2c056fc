"""Reads rows to predict: lines, JSON objects or a table, from a file or a stream."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from convbert_jax.config import Config
from convbert_jax.config.own_task import INPUT_FORMATS, TaskSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.inputs import input_rows
from convbert_jax.data.inputs.input_rows import InputRow, ModelInput
from convbert_jax.data.tables.table_files import find_column
from convbert_jax.data.tables.table_formats import (
    FORMAT_OF_ENDING,
    OPENERS,
    Fault,
    Source,
    TableFormat,
    TableRows,
    ending_of,
)
from convbert_jax.data.tables.text_lines import decode_lines, describe_escapes
from convbert_jax.data.tasks.glue import GLUE

_HINT = "Select the columns with --texts=COLUMN or --texts=FIRST,SECOND"


def describe_model_input(config: Config, texts: Sequence[str] = ()) -> ModelInput:
    """Returns the input of the model of `config`, which is fine-tuned or generative.

    Args:
      texts: column names that replace the columns of training.
    """
    if config.writes_text:
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
            f"--texts={','.join(texts)} has {len(texts)} columns, but this model reads one text "
            "per row. Select one column.",
            field="--texts",
            value=",".join(texts),
        )
    of_language = config.recipe == "causal_lm"
    column = (*texts, _learned_column(config))[0]
    number = int(column) if column.isdecimal() else None
    usual = ("prompt" if of_language else "source", "text")
    if texts and number is not None:
        usual = ()  # a column selected by number has no alternatives
    names = (column, *usual) if number is None else (*usual, column)
    columns = tuple((name,) for name in dict.fromkeys(names) if name)
    return ModelInput(
        "writing", 1, columns, TableFormat("auto"), may_be_empty=of_language, number=number
    )


def _learned_column(config: Config) -> str:
    """Returns name or number of the source column in the training pairs; "" if it has neither."""
    if not config.reads_pairs:
        return ""
    section = config.parallel
    return (*section.columns, "0" if section.source.startswith("tsv:") else "")[0]


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
        known = ", ".join(INPUT_FORMATS)
        raise DataError(
            f"--input_format={asked} is unknown. Choose one of: {known}.",
            field="--input_format",
            value=asked,
        )
    chosen = asked
    if asked == "auto":
        chosen = FORMAT_OF_ENDING.get(ending_of(name), "lines")
        if ending_of(name) in reads.endings and reads.form.format in INPUT_FORMATS[1:]:
            chosen = reads.form.format
    if chosen == "pattern" and not reads.form.pattern:
        raise DataError(
            "--input_format=pattern requires a model trained with config.task.pattern.",
            field="--input_format",
            value="pattern",
        )
    if chosen == "conll" and reads.kind != "tagging":
        raise DataError(
            f"--input_format=conll is for tagging; this model is for {reads.kind}.",
            field="--input_format",
            value="conll",
        )
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
    if header is None:
        return _read_objects(rows, reads)
    place = find_column(reads.id, header, form)
    if place is not None:  # the id column may be selected by number
        reads = dataclasses.replace(reads, id=header[place])
    return _read_table(header, rows, _check_columns(source, header, form, reads), reads)


# --- Lines ---


def _read_lines(source: Source, reads: ModelInput) -> Iterator[InputRow]:
    told: set[str] = set()
    for line, text in decode_lines(source, "utf-8", escape=True):
        bad = describe_escapes(text)
        record = Fault(bad) if bad else input_rows.parse_object(text, reads)
        if isinstance(record, Fault):
            yield input_rows.from_fault(record, line - 1, line)
        elif record is not None:
            yield input_rows.from_object(record, line - 1, line, reads)
        else:
            _explain(source, line, text, reads, told)
            yield input_rows.from_text(text, line - 1, line, reads)


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
        path=str(source),
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
            path=str(source),
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
            raise DataError(f"{source} line 1 {problem}.", path=str(source), line=1)
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
        path=str(source),
    )


def _read_table(
    header: Sequence[str], rows: TableRows, names: Sequence[str], reads: ModelInput
) -> Iterator[InputRow]:
    header = _unique(header)
    for number, (line, row) in enumerate(rows):
        if isinstance(row, Fault):
            yield input_rows.from_fault(row, number, line)
        else:
            record = dict(zip(header, row, strict=True))
            yield input_rows.from_columns(record, names, number, line, reads)


def _read_objects(rows: TableRows, reads: ModelInput) -> Iterator[InputRow]:
    for number, (line, row) in enumerate(rows):
        if isinstance(row, Fault):
            yield input_rows.from_fault(row, number, line)
        else:
            yield input_rows.from_object(row, number, line, reads)


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
