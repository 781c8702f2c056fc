"""Splits of GLUE tasks, from the official files or from TensorFlow Datasets.

The official files are tab-separated and their quotation marks are text. CoLA has no header in
train and dev, MRPC begins with a byte order mark, and test has other columns than train.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from absl import logging

from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import indexed_rows
from convbert_jax.data.tables.table_files import read_table
from convbert_jax.data.tables.table_formats import BadRows, TableFormat
from convbert_jax.data.tasks.labelled_text import Example, LabelReader

BAD_SHARE = 0.01  # the share of unusable rows in the official files is lower
_HINT = "Download the official GLUE file"
# Possible places of the diagnostic file.
_AX_FILES = ("../diagnostic/diagnostic.tsv", "../AX/AX.tsv", "../AX.tsv")


@dataclasses.dataclass(frozen=True)
class SplitFile:
    """One file of the official download and its counterpart in TFDS."""

    rows: int  # the official count
    file: str  # without .gz
    texts: tuple[str, ...]
    label: str = ""  # column; "" if the file has no labels
    columns: tuple[str, ...] = ()  # names if the file has no header
    index: str = ""  # column with the index that the GLUE server expects
    tfds: str = ""  # split of the task's TFDS configuration, or CONFIGURATION:SPLIT


@dataclasses.dataclass(frozen=True)
class GlueTask:
    folder: str  # in the official download
    tfds: str  # TFDS configuration
    tfds_texts: tuple[str, ...]
    splits: Mapping[str, SplitFile]
    labels: tuple[str, ...] = ()  # () is regression
    spellings: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    swap_pairs: bool = False
    scale: float = 1.0


# --- The original files ---


def find_file(root: Path, name: str, task: GlueTask, split: str) -> tuple[Path | None, str]:
    """Returns (file of a split, ""), or (None, error message)."""
    file = task.splits[split].file
    folder = root / task.folder
    for option in _AX_FILES if split == "test_diagnostic" else (file,):
        for path in (folder / option, folder / f"{option}.gz"):
            path = Path(os.path.normpath(path))
            if path.is_file():
                return path, ""
    shown = os.path.normpath(f"{task.folder}/{file}")
    return None, f"The {split} split of GLUE {name} is missing: {root} has no {shown} (or .gz)."


def read_file(path: Path, task: GlueTask, split: str) -> list[Example]:
    """Reads a split from an official file.

    Broken rows are skipped with a warning, because the official QQP files have a few. In a test
    split they are an error, because every row must be predicted.
    """
    file = task.splits[split]
    is_test = split.startswith("test")
    bad_rows = BadRows(path, "error" if is_test else "skip")
    labels = LabelReader(
        "classification" if task.labels else "regression", task.spellings or task.labels
    )
    form = TableFormat("tsv", columns=file.columns, hint=_HINT)
    wanted = (*file.texts, *filter(None, (file.label, file.index)))
    examples, total = [], 0
    for total, (line, values) in enumerate(read_table(path, wanted, form, bad_rows), start=1):
        texts = tuple(text.strip() for text in values[: len(file.texts)])
        label = None
        if file.label:
            try:
                label = labels.read(values[len(file.texts)])
            except ValueError as error:
                raise DataError(f"{path} line {line} {error}.", line=line, path=path) from None
        key = values[-1] if file.index else str(total - 1)
        examples.append(Example(key, texts, label))
    _check_share(bad_rows, total, path)
    _warn_empty(examples, path)
    return examples


def _check_share(bad_rows: BadRows, kept: int, path: Path) -> None:
    if bad_rows.count > BAD_SHARE * (bad_rows.count + kept):
        raise DataError(
            f"{path} has {bad_rows.count} unusable rows of {bad_rows.count + kept}; the first: "
            f"{bad_rows.first}. {_HINT}.",
            path=path,
        )


def _warn_empty(examples: list[Example], place: Path) -> None:
    empty = [example.id for example in examples if not all(example.texts)]
    if empty:
        logging.warning(
            "%s has %d rows with an empty text (first index: %s); they are kept.",
            place,
            len(empty),
            empty[0],
        )


# --- Prepared by TensorFlow Datasets ---


def find_tfds(
    root: Path, name: str, task: GlueTask, split: str
) -> tuple[tuple[Path, str] | None, str]:
    """Returns ((folder of the newest version, split), ""), or (None, error message)."""
    configuration, _, tfds_split = task.splits[split].tfds.rpartition(":")
    configuration = configuration or task.tfds
    for base in (root / "glue", root):
        versions = [info.parent for info in (base / configuration).glob("*/dataset_info.json")]
        if versions:
            return (max(versions, key=_version), tfds_split), ""
    return None, (
        f"The {split} split of GLUE {name} is missing: {root} has no prepared "
        f"glue/{configuration}. Run tfds build glue/{configuration} --file_format=array_record "
        "where TensorFlow is installed."
    )


def _version(folder: Path) -> tuple[int, ...]:
    parts = folder.name.split(".")
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else ()


def read_tfds(place: tuple[Path, str], task: GlueTask, split: str) -> list[Example]:
    """Reads a split from TFDS, which shuffles rows; `idx` restores their order."""
    folder, tfds_split = place
    rows, features = indexed_rows.open_prepared(str(folder), tfds_split)
    names = getattr(features["label"], "names", None)
    spelled = {label: index for index, label in enumerate(task.labels)}
    if names is not None and set(names) != set(task.labels):
        raise DataError(
            f"{folder} has the labels {', '.join(names)}, not {', '.join(task.labels)}. Check that "
            f"it is glue/{task.tfds}.",
            path=folder,
        )
    examples = []
    for row in sorted(indexed_rows.all_rows(rows, str(folder)), key=lambda row: int(row["idx"])):
        texts = tuple(row[text].decode().strip() for text in task.tfds_texts)
        label: int | float | None = None
        if not split.startswith("test"):
            value = row["label"]
            label = float(value) if names is None else spelled[names[int(value)]]
        examples.append(Example(str(int(row["idx"])), texts, label))
    _warn_empty(examples, folder)
    return examples
