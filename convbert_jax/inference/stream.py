"""Streams rows to predictions in order, and writes, interrupts and resumes them.

Files are read in large chunks, pipes as lines arrive. Predictions are written as JSON lines, plain
lines, or a table for spreadsheets and pandas. An interrupted call leaves

FILE.unfinished         finished lines
FILE.unfinished.model   path and checksum of the model that predicted them

and the next call resumes after comparing the finished lines with the input.
"""

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.input_rows import InputRow, ModelInput
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.predictor import Answer
from convbert_jax.storage import expand, parse_json, read_json, write_json
from convbert_jax.training.partitioning import Params

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
            cells = [_to_cell(row.get(name, "")) for name in self._header]
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
    if isinstance(row.get("prediction"), list):  # labels, or tags of words; None: without a tag
        space = "|" if isinstance(probabilities, dict) else " "
        row["prediction"] = space.join(tag for tag in row["prediction"] if tag is not None)
    if _are_texts(row.get("words")):
        row["words"] = " ".join(row["words"])
    return row


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _to_cell(value: Any) -> str:
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


AT_ONCE = 1_024  # maximum rows of a chunk
_PATIENCE = 0.02  # seconds that a row waits for further rows of its chunk
_MOST_IDS = 1_000_000  # maximum number of ids checked for duplicates
# Reserved keys of a record: an input column of this name is written as "input_NAME".
_OURS = frozenset(("id", "prediction", "probability", "probabilities", "error"))
_OURS_OF_KIND = {
    "span": _OURS | {"start", "null_odds"},
    "writing": _OURS | {"score", "n_best"},
}


class NothingPredictedError(DataError):
    """The input has no rows, or no row that can be predicted."""


@dataclasses.dataclass
class Counts:
    """Number of rows and failed rows, and the first problem."""

    rows: int = 0
    failed: int = 0
    problem: str = ""


def predict_stream(
    chunks: Iterable[list[InputRow]],
    answer: Answer,
    output: Output,
    reads: ModelInput,
    name: str,
    done: int = 0,
) -> int:
    """Writes a record for each row in order, with the error of a row that cannot be predicted.

    Args:
      chunks: lists of rows to predict together, from `in_full` or `as_they_come`.
      name: name of the input, for messages.
      done: number of rows predicted by an earlier call.

    Returns:
      Number of rows in `chunks`.

    Raises:
      NothingPredictedError: there are no rows, or no row can be predicted.
      DataError: the input cannot be read further.
    """
    counts, ids = Counts(), _Ids(name)
    with tqdm(desc="predicting", unit="row", leave=False, disable=None) as bar:
        for chunk in chunks:
            for row in chunk:
                ids.check(row)
            lines = answer_rows(chunk, answer, reads)
            errors = [line["error"] for line in lines if "prediction" not in line]
            counts.failed += len(errors)
            counts.problem = counts.problem or "".join(errors[:1])
            output.write(lines)
            counts.rows += len(chunk)
            bar.update(len(chunk))
    _report(counts, ids, name, done)
    return counts.rows


def in_full(rows: Iterator[InputRow]) -> Iterator[list[InputRow]]:
    """Yields chunks of AT_ONCE rows, for files."""
    while chunk := list(itertools.islice(rows, AT_ONCE)):
        yield chunk


def as_they_come(rows: Iterator[InputRow]) -> Iterator[list[InputRow]]:
    """Yields chunks of the rows available now, at most AT_ONCE, for pipes.

    A thread reads rows while previous chunks are predicted.
    """
    waiting: queue.Queue = queue.Queue(2 * AT_ONCE)
    end = object()

    def read():
        try:
            for row in rows:
                waiting.put(row)
            waiting.put(end)
        except BaseException as error:  # raised again in the consumer
            waiting.put(error)

    threading.Thread(target=read, name="input", daemon=True).start()
    found = None
    while found is not end:
        chunk = []
        try:
            found = waiting.get()
            deadline = time.monotonic() + _PATIENCE
            while found is not end and not isinstance(found, BaseException):
                chunk.append(found)
                if len(chunk) == AT_ONCE:
                    break
                found = waiting.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            pass
        if chunk:
            yield chunk
        if isinstance(found, BaseException):
            raise found


def answer_rows(chunk: list[InputRow], answer: Answer, reads: ModelInput) -> list[dict[str, Any]]:
    """Predicts a chunk of rows and returns their output records."""
    good = [row for row in chunk if not row.problem]
    examples = [Example(str(row.number), row.texts, None) for row in good]
    said = iter(answer(examples) if examples else ())
    lines = []
    for row in chunk:
        found = None if row.problem else next(said)
        if found and (problem := _find_problem(found)):
            row, found = dataclasses.replace(row, problem=problem), None
        lines.append(describe_row(row, found, reads))
    return lines


def _find_problem(said: dict[str, Any]) -> str:
    """Returns the reason why a prediction is not usable, or "".

    NaN outputs for a question are visible in `null_odds` only.
    """
    if "problem" in said:
        return said["problem"]
    shares = said.get("probabilities", ())
    shares = shares.values() if isinstance(shares, dict) else shares
    values = (said["prediction"], said.get("null_odds"), said.get("score"), *shares)
    finite = all(math.isfinite(value) for value in values if isinstance(value, float))
    return "" if finite else "cannot be predicted: the model returned NaN"


def describe_row(row: InputRow, said: dict[str, Any] | None, reads: ModelInput) -> dict[str, Any]:
    """Returns the output record of a row; `said` is the prediction, or None for an error."""
    texts: Mapping[str, Any] = {}
    if row.texts and reads.kind == "tagging":
        texts = {"".join(row.names) or "words": row.texts[0].split(" ")}
    elif row.texts and reads.kind == "writing":
        texts = {"".join(row.names) or reads.columns[0][0]: row.texts[0]}
    elif row.texts:
        named = dict(zip(row.names, row.texts, strict=bool(row.names)))
        texts = named or {"texts": [*row.texts]}
    line: dict[str, Any] = {"id": row.number if row.id is None else row.id}
    ours = _OURS_OF_KIND.get(reads.kind, _OURS)
    for name, value in (*texts.items(), *row.others.items()):
        while name in ours or name in line:
            name = f"input_{name}"
        line[name] = value
    return line | ({"error": f"line {row.line} {row.problem}"} if said is None else said)


class _Ids:
    """Counts rows with duplicate ids and logs the first one."""

    def __init__(self, name: str):
        self._name = name
        self._lines: dict[str, int] = {}  # id -> line of its first row
        self.twice = 0

    def check(self, row: InputRow) -> None:
        if row.id is None or len(self._lines) >= _MOST_IDS:
            return
        first = self._lines.setdefault(str(row.id), row.line)
        if first != row.line:
            self.twice += 1
            if self.twice == 1:
                logging.warning(
                    "%s line %d has the same id %r as line %d.",
                    self._name,
                    row.line,
                    row.id,
                    first,
                )
        elif len(self._lines) == _MOST_IDS:
            logging.info("%s: duplicate ids are checked up to row %d.", self._name, row.number)


def _report(counts: Counts, ids: _Ids, name: str, done: int) -> None:
    if not counts.rows and not done:
        raise NothingPredictedError(f"{name} has no rows. Check the file.", path=name)
    if counts.failed == counts.rows and not done:
        raise NothingPredictedError(
            f"{name} has no row that can be predicted; the first: {counts.problem}.", path=name
        )
    if done:
        logging.info(
            "%s: the counts below exclude the %d rows of an earlier call; their ids are not "
            "checked.",
            name,
            done,
        )
    logging.info("Predicted %d rows of %s.", counts.rows - counts.failed, name)
    if counts.failed:
        logging.warning(
            "%s: %d of %d rows have an error instead of a prediction; the first: %s.",
            name,
            counts.failed,
            counts.rows,
            counts.problem,
        )
    if ids.twice > 1:
        logging.warning("%s: %d rows have the id of an earlier row.", name, ids.twice)


_REMEDY = "remove it, or use another --output"


def identify(
    path: str, config: Config, params: Params, tokenizers: Sequence[Tokenizer]
) -> dict[str, str]:
    """Returns path and SHA-256 checksum of config, tokenizers and parameters of a model.

    Predictions cannot identify a model: they depend slightly on device and batch size.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), default=str).encode())
    for tokenizer in tokenizers:
        digest.update(tokenizer.fingerprint.encode())
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(place)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.reshape(-1).view(np.uint8))
    return {"model": str(expand(path).resolve()), "checksum": digest.hexdigest()}


def note_of(kept: Path) -> Path:
    """Returns the file that identifies the model of `kept`."""
    return kept.with_name(f"{kept.name}.model")


def take_kept(
    kept: Path, rows: Iterator[InputRow], model: dict[str, str], reads: ModelInput
) -> int:
    """Skips the rows whose JSON lines are in `kept`; removes a partial last line.

    If `kept` is empty, stores `model` for it.

    Args:
      model: see `identify`.

    Returns:
      Number of rows consumed from `rows`.

    Raises:
      DataError: the lines belong to other rows or another model.
      DamagedFileError: the file that identifies the model is damaged.
    """
    if not kept.stat().st_size:
        write_json(note_of(kept), model)
        return 0
    _check_model(kept, model)
    count = end = 0
    with open(kept, "r+b") as file:
        while (data := file.readline()).endswith(b"\n"):
            row = next(rows, None)
            if row is None or not _is_of(_parse(data), row, reads):
                raise DataError(
                    f"Cannot resume from {kept}: its line {count + 1} belongs to another row than "
                    f"in the input; {_REMEDY}.",
                    path=kept,
                )
            count, end = count + 1, file.tell()
        file.truncate(end)
    logging.info("Resuming after %d rows in %s.", count, kept)
    return count


def _check_model(kept: Path, model: dict[str, str]) -> None:
    note = note_of(kept)
    try:
        found = read_json(note, remedy=_REMEDY, fields=dict.fromkeys(model, str))
    except FileNotFoundError:
        raise DataError(
            f"Cannot resume from {kept}: {note.name}, which identifies its model, is missing; "
            f"{_REMEDY}.",
            path=kept,
        ) from None
    if found["checksum"] != model["checksum"]:
        raise DataError(
            f"Cannot resume from {kept}: its lines were predicted by another model, or an earlier "
            f"state of it ({found['model']}); {_REMEDY}.",
            path=kept,
        )


def _parse(data: bytes) -> dict[str, Any]:
    try:
        line = parse_json(data)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _is_of(line: dict[str, Any], row: InputRow, reads: ModelInput) -> bool:
    """Whether `line` belongs to `row`, for any prediction."""
    expected = parse_json(to_json(describe_row(row, None if row.problem else {}, reads)))
    same = all(name in line and line[name] == value for name, value in expected.items())
    return same and ("error" in line) != ("prediction" in line)
