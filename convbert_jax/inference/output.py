"""Writes predictions as JSON lines, plain lines, or a table for spreadsheets and pandas."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from absl import logging

DELIMITERS = {".tsv": "\t", ".csv": ","}  # file name suffix -> delimiter


class Output(Protocol):
    """A writer of predictions."""

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes and flushes one line per record."""


class JsonLines:
    """Writes one JSON object per line in UTF-8."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(to_json(line) + "\n" for line in lines)
        self._file.write(text.encode("utf-8"))
        self._file.flush()


class Table:
    """Writes a table: prediction, its `measure` and the input columns of the first row.

    Cells with a delimiter, line end or quotation mark are quoted as the csv module and pandas read
    them.
    """

    def __init__(self, file: IO[bytes], delimiter: str, measure: str):
        self._file, self._delimiter, self._measure = file, delimiter, measure
        self._header: list[str] = []

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        rows = [_flatten(line) for line in lines]
        text = io.StringIO()
        writers = {
            quoting: csv.writer(
                text, delimiter=self._delimiter, lineterminator="\n", quoting=quoting
            )
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        }
        if not self._header and rows:
            first = next((row for row in rows if "error" not in row), rows[0])
            names = ("id", "prediction", self._measure, "error", *first)
            self._header = list(dict.fromkeys(names))
            writers[csv.QUOTE_MINIMAL].writerow(self._header)
        for row in rows:
            cells = [_spell(row.get(name, "")) for name in self._header]
            # csv.writer does not quote a carriage return if its line terminator is "\n"
            alone = any("\r" in cell for cell in cells)
            writers[csv.QUOTE_ALL if alone else csv.QUOTE_MINIMAL].writerow(cells)
            self._tell(row)
        self._file.write(text.getvalue().encode("utf-8"))
        self._file.flush()

    def _tell(self, row: Mapping[str, Any]) -> None:
        unknown = [name for name in row if name not in self._header]
        if unknown and not self._told:
            self._told = True
            logging.warning(
                "Row %r has a column '%s' that the first row does not have; it is not in the "
                "table. Use an output in .jsonl to keep it.",
                row["id"],
                unknown[0],
            )

    _told = False


class PlainLines:
    """Writes generated texts only, one line per row.

    A row that cannot be predicted gets an empty line and a warning.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            if "error" in line:
                logging.warning("Wrote an empty line for row %s: %s.", line["id"], line["error"])
        texts = (" ".join(line.get("prediction", "").splitlines()) + "\n" for line in lines)
        self._file.write("".join(texts).encode("utf-8"))
        self._file.flush()


def open_lines(
    file: IO[bytes], ending: str, *, plain: bool = False, measure: str = "probability"
) -> Output:
    """Returns the writer for a file name suffix.

    Args:
      plain: write generated texts only, for any suffix.
      measure: column of a table for the confidence of a prediction.
    """
    if plain:
        return PlainLines(file)
    return Table(file, DELIMITERS[ending], measure) if ending in DELIMITERS else JsonLines(file)


def _flatten(line: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a record to one value per column: the highest probability, one column per text.

    "texts" and "words" may also be input columns with any value.
    """
    row = dict(line)
    probabilities = row.pop("probabilities", None)
    if isinstance(probabilities, dict):
        row["probability"] = max(probabilities.values())
    if _are_texts(texts := row.get("texts")):
        names = [f"text{n}" for n in range(1, len(texts) + 1)] if len(texts) > 1 else ["text"]
        if row.keys().isdisjoint(("text", "text1", "text2", *names)):
            del row["texts"]
            row |= zip(names, texts, strict=True)
    if isinstance(row.get("prediction"), list):  # tags of words; truncated words have None
        row["prediction"] = " ".join(tag for tag in row["prediction"] if tag is not None)
    if _are_texts(row.get("words")):
        row["words"] = " ".join(row["words"])
    return row


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value)


def to_json(value: Any) -> str:
    """Encodes standard JSON: NaN in input values becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(strict, ensure_ascii=False)
