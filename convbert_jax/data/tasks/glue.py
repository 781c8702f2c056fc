"""The nine GLUE tasks and the diagnostic set.

The order of labels, swapped pairs and columns follow the official code
(`configure_finetuning.py`, `finetune/classification`); row counts are GLUE's official counts. The
diagnostic set (AX) is the split "test_diagnostic" of MNLI, because the MNLI model predicts it.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.glue_splits import (
    GlueTask,
    SplitFile,
    find_file,
    find_tfds,
    read_file,
    read_tfds,
)
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.files import expand


def _splits(texts, label, train, validation, test, *, index="index") -> dict[str, SplitFile]:
    """Returns the usual three files; test has an index and no label."""
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
