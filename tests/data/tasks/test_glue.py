"""GLUE tasks from real files (if available), from files in the official format, and from TFDS."""

import gzip
import logging

import pytest

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import glue
from convbert_jax.data.tasks.labelled_text import require_labels, swap_texts
from tests.data.tfds_sets import prepare_tfds
from tests.refusals import refused

_MRPC = "#1_ID #2_ID #1_String #2_String"
_PARSES = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
_MNLI = f"index promptID pairID genre {_PARSES} sentence1 sentence2"
_DEV = f"{_MNLI} label1 label2 label3 label4 label5 gold_label"
_STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"
_QQP = "id qid1 qid2 question1 question2 is_duplicate"
# Task -> split -> (columns of the official file, label of each of two rows). Of CoLA's files, only
# test has a header.
OFFICIAL = {
    "CoLA": {"train": ("", "1 0"), "dev": ("", "0 1"), "test": ("index sentence", "")},
    "SST-2": {"train": ("sentence label", "1 0"), "dev": ("sentence label", "0 1"),
              "test": ("index sentence", "")},
    "MRPC": {"train": (f"Quality {_MRPC}", "1 0"), "dev": (f"Quality {_MRPC}", "0 1"),
             "test": (f"index {_MRPC}", "")},
    "STS-B": {"train": (f"{_STSB} score", "3.800 0.0"), "dev": (f"{_STSB} score", "5.000 2.25"),
              "test": (_STSB, "")},
    "QQP": {"train": (_QQP, "1 0"), "dev": (_QQP, "0 1"), "test": ("id question1 question2", "")},
    "MNLI": {"train": (f"{_MNLI} label1 gold_label", "neutral contradiction"),
             "dev_matched": (_DEV, "entailment neutral"),
             "dev_mismatched": (_DEV, "contradiction entailment"),
             "test_matched": (_MNLI, ""), "test_mismatched": (_MNLI, ""),
             "test_diagnostic": ("index sentence1 sentence2", "")},
    "QNLI": {"train": ("index question sentence label", "entailment not_entailment"),
             "dev": ("index question sentence label", "not_entailment entailment"),
             "test": ("index question sentence", "")},
    "RTE": {"train": ("index sentence1 sentence2 label", "not_entailment entailment"),
            "dev": ("index sentence1 sentence2 label", "entailment entailment"),
            "test": ("index sentence1 sentence2", "")},
    "WNLI": {"train": ("index sentence1 sentence2 label", "1 0"),
             "dev": ("index sentence1 sentence2 label", "0 1"),
             "test": ("index sentence1 sentence2", "")},
}  # fmt: skip
_LABELS = ("label", "Quality", "score", "is_duplicate", "gold_label")
_TEXTS = ("sentence", "question", "sentence1", "sentence2", "question1", "question2")


def _cell(column: str, row: int, label: str) -> str:
    if column in _LABELS:
        return label
    if column in ("index", "id"):
        return str(row)
    if column in _TEXTS or column.endswith("String"):
        return f'Text {row} of "{column}.  '  # an unmatched quotation mark
    return f"other {column}"


def write_official(root, task, split, *, packed=False):
    """Write two rows in the official format, including its quirks."""
    columns, labels = OFFICIAL[task][split]
    labels = labels.split() or ["", ""]
    lines = [f'gj04\t{label}\t*\tText {row} of "sentence.' for row, label in enumerate(labels)]
    if columns:
        names = [c.replace("_", " ") if "#" in c else c for c in columns.split()]
        lines = ["\t".join(names)]
        lines += ["\t".join(_cell(c, i, label) for c in names) for i, label in enumerate(labels)]
    data = ("\n".join(lines) + ("" if task == "CoLA" else "\n")).encode()
    if task == "MRPC" and split != "test":
        data = b"\xef\xbb\xbf" + data
    name = "diagnostic/diagnostic" if split == "test_diagnostic" else f"{task}/{split}"
    path = root / f"{name}.tsv{'.gz' * packed}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    root = tmp_path_factory.mktemp("glue")
    splits = [(task, split) for task, splits in OFFICIAL.items() for split in splits]
    for number, (task, split) in enumerate(splits):
        write_official(root, task, split, packed=number % 2 == 1)
    return root


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_columns(official, name, caplog):
    task = glue.open_task(name.lower(), str(official))
    splits = {split.replace("dev", "validation"): split for split in OFFICIAL[name]}
    assert list(task.splits) == list(glue.GLUE[name].splits) == list(splits)
    for split in splits:
        examples = task.read(split)
        assert [example.id for example in examples] == ["0", "1"]
        for row, example in enumerate(examples):
            assert all(text.startswith(f'Text {row} of "') for text in example.texts)
            assert all(text == text.strip() for text in example.texts)
            assert len(set(example.texts)) == task.texts  # not the same column twice
        found = [example.label for example in examples]
        if expected := OFFICIAL[name][splits[split]][1].split():
            read = float if task.kind == "regression" else task.spellings.index
            assert found == list(map(read, expected))
        else:
            assert found == [None, None]
    # Each split is smaller than the official one.
    assert sum(f"GLUE {name}" in message for message in caplog.messages) == len(splits)


def test_labels_and_texts_are_as_in_the_official_code(official, caplog):
    tasks = {name: glue.open_task(name, str(official)) for name in OFFICIAL}
    assert tasks.keys() == glue.GLUE.keys()
    assert tasks["MNLI"].labels == ("contradiction", "entailment", "neutral")
    assert tasks["RTE"].labels == tasks["QNLI"].labels == ("entailment", "not_entailment")
    for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI"):
        assert tasks[name].spellings == ("0", "1")
    assert (tasks["STS-B"].labels, tasks["STS-B"].scale) == ((), 5)
    assert {name for name in tasks if tasks[name].swap_pairs} == {"MRPC", "STS-B"}
    assert tasks["MNLI"].validation_splits == ("validation_matched", "validation_mismatched")
    caplog.set_level(logging.WARNING)
    tasks["QQP"].read("train")
    assert "363,846" in caplog.text
    examples = tasks["MRPC"].read("train")
    doubled = swap_texts(examples)
    assert len(doubled) == len({example.id for example in doubled}) == 4
    assert doubled[:2] == examples
    assert doubled[2].texts == examples[0].texts[::-1]
    assert doubled[2].label == examples[0].label


def test_missing_files_are_named(tmp_path):
    write_official(tmp_path, "QNLI", "dev")
    task = glue.open_task("QNLI", str(tmp_path))
    assert task.has("validation")
    assert not task.has("train", "validation")
    with refused(DataError, "QNLI/train.tsv", tmp_path):
        task.read("train")
    with refused(DataError, "train, validation, test", value="dev"):
        task.read("dev")
    with refused(DataError, "diagnostic/diagnostic.tsv"):
        glue.open_task("MNLI", str(tmp_path)).read("test_diagnostic")
    with refused(DataError, "CoLA, SST-2", value="COLAS"):
        glue.open_task("COLAS", str(tmp_path))
    for root in (str(tmp_path / "nowhere"), "", "tfds:/nowhere"):
        with refused(DataError, "https://", "MNLI/dev_matched.tsv", field="config.finetune.data"):
            glue.open_task("MNLI", root)
    with refused(DataError, "tfds build glue/cola"):
        glue.open_task("CoLA", f"tfds:{tmp_path}").read("train")
    path = write_official(tmp_path, "MNLI", "test_diagnostic", packed=True)
    (tmp_path / "AX").mkdir()
    path.rename(tmp_path / "AX" / "AX.tsv.gz")  # another location of the diagnostic set
    assert len(glue.open_task("MNLI", str(tmp_path)).read("test_diagnostic")) == 2


def test_bad_rows(tmp_path, caplog):
    path = write_official(tmp_path, "QQP", "train")
    good = path.read_text()
    row = "7\t1\t2\tWhy?\tHow?\t1\n"
    path.write_text(good + row * 97 + "8\t1\t2\tHow?\n" + "9\t1\t2\t\tEmpty?\t0\n")
    caplog.set_level(logging.WARNING)

    def read(split="train"):
        return glue.open_task("QQP", str(tmp_path)).read(split)

    assert len(read()) == 100
    skipped, empty = (record.args for record in caplog.records[:2])
    assert skipped[1:3] == (1, 101)
    assert "line 101" in skipped[3]
    assert empty[1:] == (1, "99")
    for text, line, mentions in (
        (good + row * 96 + "8\t1\t2\tHow?\n", None, (1, 99, "line 100")),  # more than 1%
        (good.replace("is_duplicate", "same"), None, ("'is_duplicate'", "id, qid1")),
        (good + row[:-2] + "2\n", 4, ("'2'", "0, 1")),
    ):
        path.write_text(text)
        with refused(DataError, *mentions, path=path, line=line):
            read()
    path = write_official(tmp_path, "QQP", "test")
    path.write_text(path.read_text() + "2\tonly\n")
    with refused(DataError, path=path, line=4):
        read("test")
    write_official(tmp_path, "SST-2", "test")
    task = glue.open_task("SST-2", str(tmp_path))
    with refused(DataError, "SST-2", value="test"):
        require_labels(task, "test", task.read("test"))


# --- TensorFlow Datasets ---


def test_tfds(tmp_path):
    """cola, stsb, mnli and ax as in TFDS, with its label order, shuffled."""
    import numpy as np
    import tensorflow_datasets as tfds

    nli = ("entailment", "neutral", "contradiction")
    for name, (texts, labels, splits) in {
        "cola": (("sentence",), ("unacceptable", "acceptable"), ("train", "test")),
        "stsb": (("sentence1", "sentence2"), (), ("validation",)),
        "mnli": (("premise", "hypothesis"), nli, ("train", "validation_matched")),
        "ax": (("premise", "hypothesis"), nli, ("test",)),
    }.items():
        features = dict.fromkeys(texts, tfds.features.Text()) | {"idx": np.int32}
        features["label"] = tfds.features.ClassLabel(names=labels) if labels else np.float32
        rows = {}
        for split in splits:
            label_of = {i: -1 if split == "test" else i % len(texts) + i % 2 for i in range(20)}
            rows[split] = [
                {**{text: f"{text} {i}" for text in texts}, "label": label, "idx": i}
                for i, label in label_of.items()
            ]
        prepare_tfds(tmp_path, features, rows, config=name, version="2.0.0")
    prepared = f"tfds:{tmp_path / 'small_set'}"
    cola = glue.open_task("CoLA", prepared).read("train")
    assert [example.id for example in cola] == [str(i) for i in range(20)]  # unshuffled
    assert cola[3].texts == ("sentence 3",)
    assert [e.label for e in cola[:4]] == [0, 1, 0, 1]
    assert {e.label for e in glue.open_task("CoLA", prepared).read("test")} == {None}
    stsb = glue.open_task("STS-B", prepared).read("validation")
    assert (stsb[3].label, stsb[3].texts) == (2.0, ("sentence1 3", "sentence2 3"))
    mnli = glue.open_task("MNLI", prepared)
    # TFDS: entailment 0, contradiction 2; official code: 1 and 0
    assert [example.label for example in mnli.read("validation_matched")[:4]] == [1, 0, 1, 0]
    assert {example.label for example in mnli.read("test_diagnostic")} == {None}
    with refused(DataError, value="test_mismatched"):
        mnli.read("test_mismatched")


# --- The real files ---

REAL = {
    ("CoLA", "train"): ("Our friends won't buy this analysis, let alone the next", 0.704),
    ("CoLA", "validation"): ("The sailors rode the breeze clear of the rocks.", 0.691),
    ("CoLA", "test"): ("Bill whistled past the house.", None),
    ("SST-2", "train"): ("hide new secretions from the parental units", 0.558),
    ("SST-2", "validation"): ("it 's a charming and often affecting journey .", 0.509),
    ("SST-2", "test"): ("uneasy mishmash of styles and genres .", None),
    ("MRPC", "train"): ('Amrozi accused his brother, whom he called "the witness"', 0.674),
    ("MRPC", "validation"): ("He said the foodservice pie business", 0.684),
    ("MRPC", "test"): ("PCCW's chief operating officer, Mike Butcher", None),
    ("QNLI", "validation"): ("What came into force after the new constitution", 0.505),
    ("QNLI", "test"): ("What organization is devoted to Jihad", None),
}


def test_real_files(real_data, caplog):
    caplog.set_level(logging.WARNING)
    tasks = {name: glue.open_task(name, str(real_data / "glue")) for name in glue.GLUE}
    for (name, split), (start, share) in REAL.items():
        examples = tasks[name].read(split)
        assert not caplog.text  # the official count, nothing skipped, no empty text
        assert examples[0].texts[0].startswith(start)
        labels = [example.label for example in examples]
        if share is None:
            assert set(labels) == {None}
            assert [example.id for example in examples] == [str(i) for i in range(len(examples))]
        else:
            assert sum(labels) / len(labels) == pytest.approx(share, abs=5e-4)
    absent = [name for name, task in tasks.items() if "train" in task.absent]
    assert absent == ["STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]
