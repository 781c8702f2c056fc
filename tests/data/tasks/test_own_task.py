"""User-defined tasks: splits, labels, skipped rows, config errors, and real data sets."""

import dataclasses
import json
import logging
import pickle

import pytest

from benchmarks.public_data import TEXT_FOLDERS
from convbert_jax.config.data import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers.rows import read_table
from convbert_jax.data.tasks import own_task
from convbert_jax.data.tasks.labelled_text import require_labels
from convbert_jax.data.tasks.own_task import open_task
from tests.refusals import refused

HEADER = "text\tlabel\n"
AB = HEADER + "x\ta\ny\tb\n"


@pytest.fixture
def task(tmp_path):
    """task({name: text}, **fields): write files and open their task.

    A list of rows is written as JSON lines.
    """

    def open_(files, **fields):
        for name, text in files.items():
            rows = text if isinstance(text, str) else "".join(json.dumps(r) + "\n" for r in text)
            (tmp_path / name).write_text(rows)
        return open_task(TaskSection(name="toy", folder=str(tmp_path), **fields))

    return open_


def labels(examples):
    return [example.label for example in examples]


def test_a_task_has_the_labels_and_metrics_of_its_kind(task, tmp_path):
    fields = {"train": "a.tsv", "heldout_fraction": 0.0}
    toy = task({"a.tsv": HEADER + "x\t1\ny\t0\n"}, labels=("0=bad", "1=good"), **fields)
    assert (toy.labels, toy.spellings) == (("bad", "good"), ("0", "1"))
    assert toy.metrics == ("accuracy", "macro_f1")
    assert not toy.has("validation")
    examples = pickle.loads(pickle.dumps(toy)).read("train")
    assert [(e.id, e.texts, e.label) for e in examples] == [("0", ("x",), 1), ("1", ("y",), 0)]
    fields |= {"kind": "regression", "texts": ("one", "two"), "label": "score", "scale": 5.0}
    toy = task({"a.tsv": "one\ttwo\tscore\na\tb\t4.5\nc\td\t1\n"}, **fields)
    assert (toy.labels, toy.metrics, toy.scale) == ((), ("spearman", "pearson"), 5.0)
    assert toy.texts == 2
    assert labels(toy.read("train")) == [4.5, 1.0]
    for value in ("high", "nan", "inf"):
        with refused(DataError, f"'{value}'", path=tmp_path / "a.tsv", line=2):
            task({"a.tsv": f"one\ttwo\tscore\na\tb\t{value}\n"}, **fields)
    tags = [{"w": ["a", "b"], "t": ["O", "B-X"]}]
    toy = task({"a.jsonl": tags}, kind="tagging", train="a.jsonl", texts=("w",), label="t")
    assert (toy.labels, toy.metrics) == (("B-X", "O"), ("span_f1", "accuracy"))
    assert labels(toy.read("train")) == [(1, 0)]


# --- Hidden labels ---


def test_minus_one_in_a_test_split_is_no_label(task, tmp_path, caplog):
    rows = [{"text": "good", "label": 0}, {"text": "bad", "label": 1}]
    hidden = [{"text": "fine", "label": -1}, {"text": "so", "label": "-1"}]
    some = [{"text": "fine", "label": -1.0}, {"text": "so", "label": 1}]
    for content, expected in ((hidden, [None, None]), (some, [None, 1])):
        for names in ((), ("0=bad", "1=good")):
            caplog.clear()
            caplog.set_level(logging.INFO)
            files = {"a.jsonl": rows, "t.jsonl": content}
            toy = task(files, train="a.jsonl", test="t.jsonl", labels=names)
            assert labels(toy.read("test")) == expected
            (line,) = (message for message in caplog.messages if "-1" in message)
            assert "t.jsonl line 1" in line
    for split in ("train", "validation"):
        fields = {"train": "a.jsonl", "labels": ("0", "1"), "heldout_fraction": 0.0}
        toy = task({}, **fields | {split: "t.jsonl"})
        with refused(DataError, "'-1", path=tmp_path / "t.jsonl", line=1):
            toy.read(split)
    words = {"a.conll": "EU B-ORG\nrejects O\n", "t.conll": "EU -1\nis -1\n"}
    toy = task(words, kind="tagging", train="a.conll", test="t.conll")
    assert labels(toy.read("test")) == [None]


def test_minus_one_is_a_label_where_training_rows_have_it(task):
    rows = [{"text": str(label), "label": label} for label in (-1, 0, 1)]
    files, fields = {"a.jsonl": rows, "t.jsonl": rows}, {"train": "a.jsonl", "test": "t.jsonl"}
    assert labels(task(files, **fields).read("test")) == [0, 1, 2]
    fields["kind"] = "regression"
    assert labels(task({}, **fields).read("test")) == [-1, 0, 1]
    toy = task({"a.jsonl": [{"text": "x", "label": 0.5}]}, **fields)
    assert labels(toy.read("test")) == [None, 0, 1]


def test_a_test_file_without_labels_cannot_be_scored(task):
    toy = task({"a.tsv": AB, "t.tsv": "text\nx\ny\n"}, train="a.tsv", test="t.tsv")
    examples = toy.read("test")
    assert labels(examples) == [None, None]
    with refused(DataError, "toy", value="test"):
        require_labels(toy, "test", examples)
    toy = task({"t.tsv": HEADER + "x\ta\ny\t\n"}, train="a.tsv", test="t.tsv")
    with refused(DataError, "toy", 1, value="test"):
        require_labels(toy, "test", toy.read("test"))
    require_labels(toy, "test", toy.read("test")[:1])


# --- Held-out rows ---


def test_held_out_rows_are_a_part_of_the_training_rows(task):
    rows = "".join(f"text {n // 2}\t{n % 2}\n" for n in range(1_000))  # every text twice
    toy = task({"a.tsv": HEADER + rows}, train="a.tsv", heldout_fraction=0.2)
    train, validation = toy.read("train"), toy.read("validation")
    assert len(train) + len(validation) == 1_000
    assert 140 <= len(validation) <= 260
    assert not {example.texts for example in train} & {example.texts for example in validation}
    assert not {example.id for example in train} & {example.id for example in validation}
    with refused(DataError, "toy", "config.task.test"):
        toy.read("test")
    with refused(DataError, field="config.task.heldout_fraction", value=1e-9):
        task({}, train="a.tsv", heldout_fraction=1e-9).read("validation")


def test_training_files_are_parsed_once(task, monkeypatch):
    """Labels, training rows and held-out rows come from one pass."""
    opened = []
    monkeypatch.setattr(
        own_task,
        "read_table",
        lambda *args, **fields: opened.append(1) or read_table(*args, **fields),
    )
    for names in ((), ("0", "1")):
        rows = "".join(f"text {n}\t{n % 2}\n" for n in range(99))
        toy = task({"a.tsv": HEADER + rows}, train="a.tsv", labels=names)
        assert len(toy.read("train")) + len(toy.read("validation")) == 99
        assert len(opened) == 1
        assert len(toy.read("train")) > 0  # reads the file again
        assert len(opened) == 2
        opened.clear()


def test_rows_to_score_on_are_not_trained_on(task, tmp_path):
    """A glob for the training files may match the files of another split."""
    both = {"train": [{"text": "x", "label": 1}, {"text": "y", "label": 0}]}
    files = {"a.tsv": AB, "b.tsv": AB, "c.json": json.dumps(both | {"dev": both["train"]})}
    for split in ("validation", "test"):
        path = str(tmp_path / "b.tsv")
        with refused(DataError, "config.task.train", field=f"config.task.{split}", path=path):
            task(files, train="*.tsv", **{split: "b.tsv"})
        fields = {"heldout_fraction": 0.0, split: "b.tsv"}
        assert len(task(files, train="a.tsv", **fields).read("train")) == 2
        toy = task(files, train="c.json#train", **fields | {split: "c.json#dev"})
        assert len(toy.read("train")) == 2


# --- Skipped rows ---


def test_rows_keep_their_numbers_whatever_is_skipped(task, caplog):
    """Ids must allow joining predictions with the file."""
    files = {
        "a.tsv": HEADER + "x\ta\n\tb\ny\tb\tc\nz\tb\n",
        "b.jsonl": '{"text": "v", "label": "a"}\n{"text\n5\n{"text": "w", "label": "a"}\n',
        "c.conll": "a O\n\nb\nc O\n\nd O\n",
        "d.csv": 'text,label\nx,a\n"y"y,b\nz,b\n',
    }
    tagging = {"kind": "tagging", "labels": ("O", "B")}
    for train, fields, rows in (
        ("a.tsv,b.jsonl", {"labels": ("a", "b")}, "0x 3z 4v 7w"),
        ("c.conll", tagging, "0a 2d"),  # never a part of a sentence
        ("d.csv", {}, "0x 2z"),
    ):
        toy = task(files, train=train, bad_rows="skip", heldout_fraction=0.0, **fields)
        assert " ".join(e.id + e.texts[0] for e in toy.read("train")) == rows
    (name, skipped, total, first), *_ = (record.args for record in caplog.records)
    assert (name.name, skipped, total) == ("a.tsv", 2, 4)
    assert "line 3" in first
    with refused(DataError, "line 1", "'label'"):
        task({"e.jsonl": [{"text": "x"}]}, train="e.jsonl", bad_rows="skip")


def test_two_rows_of_one_id_are_logged(task, caplog):
    task({"a.tsv": "n\ttext\tlabel\n7\tx\ta\n8\ty\tb\n7\tz\tb\n"}, train="a.tsv", id="n")
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert record.args[0] == 1
    for place in ("a.tsv line 4", "a.tsv line 2", "'7'"):
        assert place in record.getMessage()


# --- Config errors ---


@pytest.mark.parametrize(("fields", "field", "value", "mentions"), [
    ({"kind": "ranking"}, "kind", "ranking", ["classification"]),
    ({"format": "xls"}, "format", "xls", ["tsv"]),
    ({"bad_rows": "drop"}, "bad_rows", "drop", ["skip"]),
    ({"texts": ()}, "texts", None, []),
    ({"texts": ("a", "b", "c")}, "texts", "a,b,c", []),
    ({"kind": "tagging", "texts": ("a", "b")}, "texts", "a,b", []),
    ({"label": ""}, "label", None, []),
    ({"label": "text"}, "label", "text", ["config.task.texts"]),
    ({"texts": ("text", "text")}, "texts", "text,text", []),
    ({"swap_pairs": True}, "swap_pairs", None, ["config.task.texts"]),
    ({"heldout_fraction": 1.0}, "heldout_fraction", 1.0, []),
    ({"heldout_fraction": -0.1}, "heldout_fraction", -0.1, []),
    ({"scale": 0.0}, "scale", 0.0, []),
    ({"train": ""}, "", None, ["config.task.train"]),
    ({"train": "b.tsv"}, "folder", None, ["b.tsv"]),
    ({"train": "b?.tsv"}, "folder", None, ["b?.tsv"]),
    ({"labels": ("a", "a")}, "labels", "a", []),
    ({"train": "", "test": "a.tsv"}, "labels", None, ["config.task.train"]),
    ({"train": "one.tsv"}, "label", "label", ["toy", 1]),
])  # fmt: skip
def test_faults_of_a_section(fields, field, value, mentions, task):
    files = {"a.tsv": AB, "one.tsv": HEADER + "x\ta\ny\ta\n"}
    with refused(DataError, *mentions, field=f"config.task.{field}".rstrip("."), value=value):
        task(files, **{"train": "a.tsv"} | fields)


# --- Real data sets with their configs ---

REAL = {
    "imdb": (("train", "validation", "test"), 50_000, ("negative", "positive")),
    "trec": (("train", "validation", "test"), 5_952, 6),
    "agnews": (("train", "validation", "test"), 17_601, 4),
    "sick": (("train", "validation", "test"), 9_927, 3),
    "sick_relatedness": (("train", "validation", "test"), 9_927, 0),
    "snli": (("train", "validation", "test"), 19_666, 3),
    "clinc150": (("train", "validation", "test"), 23_700, 151),
    "qqp_part": (("train", "validation"), 23_496, 2),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_by_config(name, real_data, tmp_path, monkeypatch, caplog):
    from configs import text
    from convbert_jax.config import from_config_dict

    monkeypatch.chdir(tmp_path)
    config = from_config_dict(text.get_config(name))
    assert config.finetune.tasks == ("own",)
    named = (getattr(config.task, split) for split in ("train", "validation", "test"))
    files = [file.partition("#")[0] for file in ",".join(named).split(",")]
    with refused(DataError, "--config.task.folder=FOLDER", *files):
        open_task(config.task)
    folder = str(real_data / TEXT_FOLDERS[name])
    task = open_task(dataclasses.replace(config.task, folder=folder))
    splits, rows, names = REAL[name]
    assert tuple(split for split in task.splits if task.has(split)) == splits
    assert task.labels == names if isinstance(names, tuple) else len(task.labels) == names
    examples = [example for split in splits for example in task.read(split)]
    assert len(examples) == rows
    assert all(example.label is not None and all(example.texts) for example in examples)
    skipped = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert bool(skipped) == (name == "qqp_part")
    assert all("line 1" in message for message in skipped)
    if name == "trec":  # not UTF-8
        assert any("sister\u00f0city" in example.texts[0] for example in examples)


@pytest.mark.parametrize(
    ("name", "row", "texts"),
    [
        ("boolq", {"question": "is it", "passage": "It is.", "label": True}, ("is it", "It is.")),
        ("cb", {"premise": "A.", "hypothesis": "B.", "label": "contradiction"}, ("A.", "B.")),
        (
            "superglue_rte",
            {"premise": "A.", "hypothesis": "B.", "label": "not_entailment"},
            ("A.", "B."),
        ),
    ],
)
def test_tasks_of_superglue(name, row, texts, tmp_path):
    from configs import text
    from convbert_jax.config import from_config_dict

    unlabelled = {key: value for key, value in row.items() if key != "label"}
    for file, first in (("train", row), ("val", row), ("test", unlabelled)):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({"idx": 7, **first}) + "\n")
    section = dataclasses.replace(
        from_config_dict(text.get_config(name)).task, folder=str(tmp_path)
    )
    superglue = open_task(section)
    for split, label in (("train", 1), ("validation", 1), ("test", None)):
        (example,) = superglue.read(split)
        assert (example.id, example.texts, example.label) == ("7", texts, label)
