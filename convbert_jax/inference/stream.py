"""Streams rows to predictions in order: files in large chunks, pipes as lines arrive."""

import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import logging
from tqdm import tqdm

from convbert_jax.data.errors import DataError
from convbert_jax.data.inputs.input_rows import InputRow, ModelInput
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.inference.output import Output
from convbert_jax.inference.predictor import Answer

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
