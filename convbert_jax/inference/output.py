"""Predictions as JSON lines, or as a table for spreadsheets and pandas."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from absl import logging

DELIMITERS = {".tsv": "\t", ".csv": ","}  # ending of a file's name -> of a table


class Output(Protocol):
    """Where predictions go."""

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes one line each, and hands them on at once."""


class JsonLines:
    """One JSON object a line, UTF-8."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(to_json(line) + "\n" for line in lines)
        self._file.write(text.encode("utf-8"))
        self._file.flush()


class Table:
    """A header, then a row each: prediction, its `measure` and all of the input but for what its
    first row lacks. A cell with a separator, a line end or a quotation mark stands in quotation
    marks, as the csv module and pandas read it.
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
            # the module does not quote a carriage return that is not in its line end
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
                "The row %r has '%s', which the first row lacks and the table therefore; name an "
                "output in .jsonl to keep it.",
                row["id"],
                unknown[0],
            )

    _told = False


class PlainLines:
    """The texts alone, one a line, as long as the input: of a row that cannot be predicted an empty
    line, and a warning.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            if "error" in line:
                logging.warning("An empty line for row %s: %s.", line["id"], line["error"])
        texts = (" ".join(line.get("prediction", "").splitlines()) + "\n" for line in lines)
        self._file.write("".join(texts).encode("utf-8"))
        self._file.flush()


def open_lines(
    file: IO[bytes], ending: str, *, plain: bool = False, measure: str = "probability"
) -> Output:
    """What writes into `file` by the ending of its name, or plain lines.

    Args:
      measure: column of a table that says how sure a prediction is.
    """
    if plain:
        return PlainLines(file)
    return Table(file, DELIMITERS[ending], measure) if ending in DELIMITERS else JsonLines(file)


def _flatten(line: Mapping[str, Any]) -> dict[str, Any]:
    """One value a column: of probabilities the highest, of two texts each.

    "texts" and "words" may also be columns of the input, with anything in them.
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
    if isinstance(row.get("prediction"), list):  # of words, of which the last may have none
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
    """JSON as all read it: a NaN that an input brought along, which only Python takes, is null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(strict, ensure_ascii=False)
