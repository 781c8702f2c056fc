"""Going on where predictions of a file were stopped: what is kept is compared, not trusted."""

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError
from convbert_jax.data.prediction_rows import InputRow, ModelInput
from convbert_jax.files import parse_json
from convbert_jax.finetuning.prediction import Answer
from convbert_jax.finetuning.prediction_stream import answer_rows, describe_row

_AGAIN = 16  # rows that are predicted again, to see that it is the same model
_CLOSE = 1e-3  # what probabilities may differ by, as on another device


def take_kept(kept: Path, rows: Iterator[InputRow], answer: Answer, reads: ModelInput) -> int:
    """Takes from `rows` those whose JSON lines are in `kept`, and cuts off a half line at its end.

    Returns:
      how many these are.

    Raises:
      DataError: the lines are of other rows, or of another model.
    """
    last: deque[tuple[InputRow, dict[str, Any]]] = deque(maxlen=_AGAIN)
    count = end = 0
    with open(kept, "r+b") as file:
        while (data := file.readline()).endswith(b"\n"):
            line, row = _parse(data), next(rows, None)
            if row is None or not _is_of(line, row, reads):
                raise DataError(
                    f"{kept}, which was left by a start that was stopped, has another row in its "
                    f"line {count + 1} than the input; remove it, or name another --output."
                )
            last.append((row, line))
            count, end = count + 1, file.tell()
        file.truncate(end)
    again = answer_rows([row for row, _ in last], answer, reads)
    if not all(_is_same(line, found) for (_, line), found in zip(last, again, strict=True)):
        raise DataError(
            f"{kept}, which was left by a start that was stopped, has predictions of another "
            "model; remove it, or name another --output."
        )
    logging.info("Going on after %d rows in %s.", count, kept)
    return count


def _parse(data: bytes) -> dict[str, Any]:
    try:
        line = parse_json(data)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _is_of(line: dict[str, Any], row: InputRow, reads: ModelInput) -> bool:
    expected = describe_row(row, None if row.problem else {}, reads)
    return all(name in line and line[name] == value for name, value in expected.items())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other
