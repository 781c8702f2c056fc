"""The nine GLUE tasks and the diagnostic set, from the original files or from TensorFlow Datasets.

The files are the official download: tab-separated, quotation marks are text, CoLA without a header
in train and dev, MRPC with a byte order mark, other columns in test than in train. Columns, order
of labels and swapped pairs: release, `finetune/classification/classification_tasks.py`
(`double_unordered` and each task's columns). The diagnostic set (AX) is MNLI's split
"test_diagnostic": it has no training data, MNLI's model predicts it.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from absl import logging

from convbert_jax.data import indexed_rows
from convbert_jax.data.errors import DataError
from convbert_jax.data.labelled_text import Example, LabelledTask, LabelReader
from convbert_jax.data.table_files import BadRows, TableFormat, read_table

BAD_SHARE = 0.01  # more unusable rows than this are not the known blemishes of the official files
_HINT = "is it the official GLUE file?"


@dataclasses.dataclass(frozen=True)
class SplitFile:
    """One file of the download and its counterpart in TFDS."""

    rows: int  # the official count
    file: str  # without .gz
    texts: tuple[str, ...]
    label: str = ""  # "" where the file has none
    columns: tuple[str, ...] = ()  # where it has no header
    index: str = ""  # the column with the index that the server expects
    tfds: str = ""  # split of the task's TFDS configuration, or CONFIGURATION:SPLIT


@dataclasses.dataclass(frozen=True)
class GlueTask:
    folder: str  # of the download
    tfds: str  # configuration of TFDS
    tfds_texts: tuple[str, ...]
    splits: Mapping[str, SplitFile]
    labels: tuple[str, ...] = ()  # () is regression
    spellings: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    swap_pairs: bool = False
    scale: float = 1.0


def _splits(texts, label, train, validation, test, *, index="index") -> dict[str, SplitFile]:
    """The usual three files: test has an index and no label."""
    return {
        "train": SplitFile(train, "train.tsv", texts, label, tfds="train"),
        "validation": SplitFile(validation, "dev.tsv", texts, label, tfds="validation"),
        "test": SplitFile(test, "test.tsv", texts, index=index, tfds="test"),
    }


_SENTENCES = ("sentence1", "sentence2")
_COLA = ("source", "is_acceptable", "mark", "sentence")
_ENTAILMENT = {
    "labels": ("entailment", "not_entailment"),
}
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
    # The paper's table and the release's scorer have accuracy; the leaderboard F1 and accuracy.
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
# Other places of the diagnostic file.
_AX_FILES = ("../diagnostic/diagnostic.tsv", "../AX/AX.tsv", "../AX.tsv")


def open_task(name: str, root: str) -> LabelledTask:
    """A GLUE task.

    Args:
      name: a key of GLUE, in any case.
      root: the folder with CoLA, SST-2, … below it, or "tfds:DIR" with cola, sst2, … (or glue/cola,
        …) prepared as array_record below it, or "tfds:" for the usual place of TFDS.

    Raises:
      DataError: an unknown name, or no such folder. What is missing below it is in `absent`.
    """
    spelled = {key.lower(): key for key in GLUE}
    if name.lower() not in spelled:
        raise DataError(f"GLUE has no task '{name}'; choose one of: {', '.join(GLUE)}.")
    name = spelled[name.lower()]
    task = GLUE[name]
    kind, _, rest = root.partition(":") if root.startswith("tfds:") else ("files", "", root)
    if kind == "tfds":
        rest = rest or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    folder = Path(rest).expanduser()
    if not rest or not folder.is_dir():
        raise DataError(
            f"There is no folder '{rest}' with the GLUE data; name the one that holds CoLA, SST-2, "
            "…, or tfds:DIR for data prepared by TensorFlow Datasets."
        )
    find, read = {"files": (_find_file, _read_file), "tfds": (_find_tfds, _read_tfds)}[kind]
    places, absent = {}, {}
    for split in task.splits:
        place, sentence = find(folder, name, split)
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
        reader=functools.partial(_read_split, read, name, MappingProxyType(places)),
        absent=absent,
        scale=task.scale,
        swap_pairs=task.swap_pairs,
    )


def _read_split(read, name: str, places: Mapping[str, Any], split: str) -> list[Example]:
    examples = read(places[split], name, split)
    official = GLUE[name].splits[split].rows
    if len(examples) != official:
        logging.warning(
            "GLUE %s has %s rows in %s, not the official %s (%s): scores do not compare.",
            name,
            f"{len(examples):,}",
            split,
            f"{official:,}",
            places[split],
        )
    return examples


# --- The original files ---


def _find_file(root: Path, name: str, split: str) -> tuple[Path | None, str]:
    """The file of a split, or None and what is missing."""
    file = GLUE[name].splits[split].file
    folder = root / GLUE[name].folder
    for option in _AX_FILES if split == "test_diagnostic" else (file,):
        for path in (folder / option, folder / f"{option}.gz"):
            path = Path(os.path.normpath(path))
            if path.is_file():
                return path, ""
    shown = os.path.normpath(f"{GLUE[name].folder}/{file}")
    return None, f"GLUE {name} has no {split} split here: {root} has no {shown} (or .gz)."


def _read_file(path: Path, name: str, split: str) -> list[Example]:
    """Rows that the official files are known to have broken (a few of QQP) are left out, with a
    warning; in a test split, where every row is to be predicted, they are an error.
    """
    task, file = GLUE[name], GLUE[name].splits[split]
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
                raise DataError(f"{path} line {line} {error}.") from None
        key = values[-1] if file.index else str(total - 1)
        examples.append(Example(key, texts, label))
    _check_share(bad_rows, total, path)
    _warn_empty(examples, path)
    return examples


def _check_share(bad_rows: BadRows, kept: int, path: Path) -> None:
    if bad_rows.count > BAD_SHARE * (bad_rows.count + kept):
        raise DataError(
            f"{path} has {bad_rows.count} unusable rows of {bad_rows.count + kept}; the first: "
            f"{bad_rows.first}. {_HINT.capitalize()}"
        )


def _warn_empty(examples: list[Example], place: Path) -> None:
    empty = [example.id for example in examples if not all(example.texts)]
    if empty:
        logging.warning(
            "%s has %d rows with an empty text, the first with index %s; they are kept.",
            place,
            len(empty),
            empty[0],
        )


# --- Prepared by TensorFlow Datasets ---


def _find_tfds(root: Path, name: str, split: str) -> tuple[tuple[Path, str] | None, str]:
    """(folder of the newest version, split), or None and what is missing."""
    configuration, _, tfds_split = GLUE[name].splits[split].tfds.rpartition(":")
    configuration = configuration or GLUE[name].tfds
    for base in (root / "glue", root):
        versions = [info.parent for info in (base / configuration).glob("*/dataset_info.json")]
        if versions:
            return (max(versions, key=_version), tfds_split), ""
    return None, (
        f"GLUE {name} has no {split} split here: {root} has no prepared glue/{configuration}; run "
        f"tfds build glue/{configuration} --file_format=array_record where TensorFlow is installed."
    )


def _version(folder: Path) -> tuple[int, ...]:
    parts = folder.name.split(".")
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else ()


def _read_tfds(place: tuple[Path, str], name: str, split: str) -> list[Example]:
    """TFDS stores rows shuffled; `idx` brings back the order of the files."""
    task = GLUE[name]
    folder, tfds_split = place
    rows, features = indexed_rows.open_prepared(str(folder), tfds_split)
    names = getattr(features["label"], "names", None)
    spelled = {label: index for index, label in enumerate(task.labels)}
    if names is not None and set(names) != set(task.labels):
        raise DataError(
            f"{folder} has the labels {', '.join(names)}, not {', '.join(task.labels)}; is it "
            f"glue/{task.tfds}?"
        )
    examples = []
    for row in sorted(_all_rows(rows), key=lambda row: int(row["idx"])):
        texts = tuple(row[text].decode().strip() for text in task.tfds_texts)
        label: int | float | None = None
        if not split.startswith("test"):
            value = row["label"]
            label = float(value) if names is None else spelled[names[int(value)]]
        examples.append(Example(str(int(row["idx"])), texts, label))
    _warn_empty(examples, folder)
    return examples


def _all_rows(rows, at_once: int = 1_024) -> Iterator[dict[str, Any]]:
    for start in range(0, len(rows), at_once):
        yield from rows.__getitems__(list(range(start, min(start + at_once, len(rows)))))
