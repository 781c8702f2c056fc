"""Resumes interrupted predictions of a file, after comparing the finished lines with the input.

FILE.unfinished         finished lines
FILE.unfinished.model   path and checksum of the model that predicted them
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
