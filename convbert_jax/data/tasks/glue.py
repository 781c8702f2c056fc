"""The nine GLUE tasks and the diagnostic set.

The order of labels, swapped pairs and columns follow the official code
(`configure_finetuning.py`, `finetune/classification`); row counts are GLUE's official counts. The
diagnostic set (AX) is the split "test_diagnostic" of MNLI, because the MNLI model predicts it.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError, Location
from convbert_jax.data.readers import indexed_rows
from convbert_jax.data.readers.rows import BadRows, TableFormat, read_table
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask, LabelReader
from convbert_jax.storage import expand

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
                raise Location(path, line).error(f"{error}.") from None
        key = values[-1] if file.index else str(total - 1)
        examples.append(Example(key, texts, label))
    if bad_rows.count > BAD_SHARE * (bad_rows.count + total):
        problem = f"{bad_rows.count} unusable rows of {bad_rows.count + total}; the first: "
        raise DataError(f"{problem}{bad_rows.first}. {_HINT}.", path=path)
    _warn_empty(examples, path)
    return examples


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
            f"labels {', '.join(names)}, not {', '.join(task.labels)}. Check that it is "
            f"glue/{task.tfds}.",
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


def _splits(texts, label, train, validation, test, *, index="index") -> dict[str, SplitFile]:
    """Returns the usual three files; test has an index and no label."""
    return {
        "train": SplitFile(train, "train.tsv", texts, label, tfds="train"),
        "validation": SplitFile(validation, "dev.tsv", texts, label, tfds="validation"),
        "test": SplitFile(test, "test.tsv", texts, index=index, tfds="test"),
    }


_SENTENCES = ("sentence1", "sentence2")
_COLA = ("source", "is_acceptable", "mark", "sentence")
_ENTAILMENT = {"labels": ("entailment", "not_entailment")}
_BINARY = ("0", "1")

GLUE: dict[str, GlueTask] = {
    "CoLA": GlueTask(
        "CoLA",
        "cola",
        ("sentence",),
        {
            "train": SplitFile(
                8_551, "train.tsv", ("sentence",), "is_acceptable", _COLA, tfds="train"
            ),
            "validation": SplitFile(
                1_043, "dev.tsv", ("sentence",), "is_acceptable", _COLA, tfds="validation"
            ),
            "test": SplitFile(1_063, "test.tsv", ("sentence",), index="index", tfds="test"),
        },
        labels=("unacceptable", "acceptable"),
        spellings=_BINARY,
        metrics=("mcc", "accuracy"),
    ),
    "SST-2": GlueTask(
        "SST-2",
        "sst2",
        ("sentence",),
        _splits(("sentence",), "label", 67_349, 872, 1_821),
        labels=("negative", "positive"),
        spellings=_BINARY,
    ),
    # The paper and the official code report accuracy; the leaderboard reports F1 and accuracy.
    "MRPC": GlueTask(
        "MRPC",
        "mrpc",
        _SENTENCES,
        _splits(("#1 String", "#2 String"), "Quality", 3_668, 408, 1_725),
        labels=("not_equivalent", "equivalent"),
        spellings=_BINARY,
        metrics=("accuracy", "f1"),
        swap_pairs=True,
    ),
    "STS-B": GlueTask(
        "STS-B",
        "stsb",
        _SENTENCES,
        _splits(_SENTENCES, "score", 5_749, 1_500, 1_379),
        metrics=("spearman", "pearson"),
        swap_pairs=True,
        scale=5.0,
    ),
    "QQP": GlueTask(
        "QQP",
        "qqp",
        ("question1", "question2"),
        _splits(("question1", "question2"), "is_duplicate", 363_846, 40_430, 390_965, index="id"),
        labels=("not_duplicate", "duplicate"),
        spellings=_BINARY,
        metrics=("accuracy", "f1"),
    ),
    "MNLI": GlueTask(
        "MNLI",
        "mnli",
        ("premise", "hypothesis"),
        {
            "train": SplitFile(392_702, "train.tsv", _SENTENCES, "gold_label", tfds="train"),
            "validation_matched": SplitFile(
                9_815, "dev_matched.tsv", _SENTENCES, "gold_label", tfds="validation_matched"
            ),
            "validation_mismatched": SplitFile(
                9_832, "dev_mismatched.tsv", _SENTENCES, "gold_label", tfds="validation_mismatched"
            ),
            "test_matched": SplitFile(
                9_796, "test_matched.tsv", _SENTENCES, index="index", tfds="test_matched"
            ),
            "test_mismatched": SplitFile(
                9_847, "test_mismatched.tsv", _SENTENCES, index="index", tfds="test_mismatched"
            ),
            "test_diagnostic": SplitFile(
                1_104, "../diagnostic/diagnostic.tsv", _SENTENCES, index="index", tfds="ax:test"
            ),
        },
        labels=("contradiction", "entailment", "neutral"),
    ),
    "QNLI": GlueTask(
        "QNLI",
        "qnli",
        ("question", "sentence"),
        _splits(("question", "sentence"), "label", 104_743, 5_463, 5_463),
        **_ENTAILMENT,
    ),
    "RTE": GlueTask(
        "RTE", "rte", _SENTENCES, _splits(_SENTENCES, "label", 2_490, 277, 3_000), **_ENTAILMENT
    ),
    "WNLI": GlueTask(
        "WNLI",
        "wnli",
        _SENTENCES,
        _splits(_SENTENCES, "label", 635, 71, 146),
        labels=("not_entailment", "entailment"),
        spellings=_BINARY,
    ),
}
DOWNLOAD = "https://gluebenchmark.com/tasks"
# kind of source -> (function that finds a split, function that reads it)
_READERS = {"files": (find_file, read_file), "tfds": (find_tfds, read_tfds)}


def open_task(name: str, root: str) -> LabelledTask:
    """Opens a GLUE task.

    Args:
      name: a key of GLUE, case-insensitive.
      root: a folder with subfolders CoLA, SST-2, …; or "tfds:DIR" with subfolders cola, sst2, …
        (or glue/cola, …) prepared as array_record; or "tfds:" for the default folder of TFDS.

    Raises:
      DataError: unknown name or missing folder. Missing splits are in `absent` of the task.
    """
    spelled = {key.lower(): key for key in GLUE}
    if name.lower() not in spelled:
        raise DataError(
            f"Unknown GLUE task '{name}'. Choose one of: {', '.join(GLUE)}.", value=name
        )
    name = spelled[name.lower()]
    task = GLUE[name]
    kind, _, rest = root.partition(":") if root.startswith("tfds:") else ("files", "", root)
    if kind == "tfds":
        rest = rest or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    folder = expand(rest)
    if not rest or not folder.is_dir():
        names = ", ".join(os.path.normpath(f"{task.folder}/{s.file}") for s in task.splits.values())
        absent = f"Folder '{rest}' does not exist" if rest else "config.finetune.data is empty"
        raise DataError(
            f"{absent}. Download {name} from {DOWNLOAD} and set --config.finetune.data=FOLDER with "
            f"{names} (or .gz), or set --config.finetune.data=tfds:DIR if TensorFlow Datasets "
            "prepared it.",
            field="config.finetune.data",
        )
    find, read = _READERS[kind]
    places, absent = {}, {}
    for split in task.splits:
        place, sentence = find(folder, name, task, split)
        if place is None:
            absent[split] = sentence
        else:
            places[split] = place
    return LabelledTask(
        name=name,
        kind="classification" if task.labels else "regression",
        texts=len(task.tfds_texts),
        labels=task.labels,
        spellings=task.spellings or task.labels,
        metrics=task.metrics,
        splits=tuple(task.splits),
        reader=functools.partial(_read_split, read, name, places),
        absent=absent,
        columns=task.tfds_texts,
        scale=task.scale,
        swap_pairs=task.swap_pairs,
    )


def _read_split(read, name: str, places: Mapping[str, Any], split: str) -> list[Example]:
    examples = read(places[split], GLUE[name], split)
    official = GLUE[name].splits[split].rows
    if len(examples) != official:
        logging.warning(
            "GLUE %s has %s rows in %s, not the official %s (%s); scores are not comparable.",
            name,
            f"{len(examples):,}",
            split,
            f"{official:,}",
            places[split],
        )
    return examples
