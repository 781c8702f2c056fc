"""Going on where predictions of a file were stopped: what is kept is compared, not trusted.

FILE.unfinished         the lines that are done
FILE.unfinished.model   of which model they are
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.inputs.input_rows import InputRow, ModelInput
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.files import expand, parse_json, read_json, write_json
from convbert_jax.inference.output import to_json
from convbert_jax.inference.stream import describe_row
from convbert_jax.training.task import Params

_REMEDY = "remove it, or name another --output"


def identify(
    path: str, config: Config, params: Params, tokenizers: Sequence[Tokenizer]
) -> dict[str, str]:
    """Where a model lies, and a checksum of all that it is. (Its predictions of the same rows are
    no proof: they change a little with the device and the size of the batch.)
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
    """The file beside `kept` that says of which model it is."""
    return kept.with_name(f"{kept.name}.model")


def take_kept(
    kept: Path, rows: Iterator[InputRow], model: dict[str, str], reads: ModelInput
) -> int:
    """Takes from `rows` those whose JSON lines are in `kept`, and cuts off a half line at its end.

    Where `kept` is empty, it is from now on of `model`, as `identify` describes it.

    Returns:
      how many these are.

    Raises:
      DataError: the lines are of other rows, or of another model.
      DamagedFileError: what says of which model they are is damaged.
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
                    f"{kept}, which was left by a start that was stopped, has another row in its "
                    f"line {count + 1} than the input; {_REMEDY}.",
                    path=kept,
                )
            count, end = count + 1, file.tell()
        file.truncate(end)
    logging.info("Going on after %d rows in %s.", count, kept)
    return count


def _check_model(kept: Path, model: dict[str, str]) -> None:
    note = note_of(kept)
    try:
        found = read_json(note, remedy=_REMEDY, fields=dict.fromkeys(model, str))
    except FileNotFoundError:
        raise DataError(
            f"{kept}, which was left by a start that was stopped, has no {note.name} beside it, "
            f"which would say of which model it is; {_REMEDY}.",
            path=kept,
        ) from None
    if found["checksum"] != model["checksum"]:
        raise DataError(
            f"{kept}, which was left by a start that was stopped, has predictions of another "
            f"model ({found['model']} as it was then); {_REMEDY}.",
            path=kept,
        )


def _parse(data: bytes) -> dict[str, Any]:
    try:
        line = parse_json(data)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _is_of(line: dict[str, Any], row: InputRow, reads: ModelInput) -> bool:
    """Whether `line` is what is written of `row`, whatever the model said."""
    expected = parse_json(to_json(describe_row(row, None if row.problem else {}, reads)))
    same = all(name in line and line[name] == value for name, value in expected.items())
    return same and ("error" in line) != ("prediction" in line)
