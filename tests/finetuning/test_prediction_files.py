"""Prediction files: examples with probabilities, the eleven files for the GLUE server, plots."""

import csv
import json
import logging
import warnings

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from convbert_jax.data.tasks import glue
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.finetuning import predictions as prediction_files
from convbert_jax.finetuning import predictions as prediction_pictures


def make_task(kind="classification", labels=("no", "yes"), name="toy"):
    return LabelledTask(name, kind, 1, labels, ("accuracy",), ("test",), lambda split: [])


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_classification(tmp_path):
    examples = [Example("a", ("gr\u00fc\u00df dich", "x"), 1), Example("b", ("y", "z"), 0)]
    logits = np.array([[0.0, np.log(3.0), 99.0], [np.log(4.0), np.log(6.0), 99.0]])
    written = prediction_files.write_predictions(
        tmp_path / "new", make_task(), "validation", examples, logits, pictures=True
    )
    names = ["validation.jsonl", "validation-confusion.png", "validation-calibration.png"]
    assert [path.name for path in written] == names
    assert all(map(is_png, written[1:]))
    assert read_lines(written[0]) == [
        {
            "id": "a",
            "texts": ["gr\u00fc\u00df dich", "x"],
            "label": "yes",
            "prediction": "yes",
            "probabilities": {"no": 0.25, "yes": 0.75},
        },
        {
            "id": "b",
            "texts": ["y", "z"],
            "label": "no",
            "prediction": "yes",
            "probabilities": {"no": 0.4, "yes": 0.6},
        },
    ]


def test_without_labels_there_are_no_pictures(tmp_path):
    examples = [Example("a", ("x",), None), Example("b", ("y",), 1)]
    written = prediction_files.write_predictions(
        tmp_path, make_task(), "test", examples, np.eye(2), pictures=True
    )
    assert [path.name for path in tmp_path.iterdir()] == ["test.jsonl"]
    assert [line["label"] for line in read_lines(written[0])] == [None, "yes"]


def test_regression_and_tagging(tmp_path):
    examples = [Example("a", ("x",), 1.0), Example("b", ("y",), 3.0)]
    written = prediction_files.write_predictions(
        tmp_path / "r",
        make_task("regression", ()),
        "test",
        examples,
        np.array([1.5, 2.25]),
        pictures=True,
    )
    assert [line["prediction"] for line in read_lines(written[0])] == [1.5, 2.25]
    assert [path.name for path in written[1:]] == ["test-scatter.png"]
    assert is_png(written[1])

    examples = [Example("a", ("x y",), (0, 1)), Example("b", ("z",), (1,))]
    task = make_task("tagging", ("O", "B-A"))
    outputs = [np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.3, 0.7]])]
    written = prediction_files.write_predictions(
        tmp_path / "t", task, "test", examples, outputs, pictures=True
    )
    first, second = read_lines(written[0])
    assert first["words"] == ["x", "y"]
    assert first["label"] == ["O", "B-A"]
    assert first["prediction"] == ["O", "O"]
    assert first["probabilities"] == [0.9, 0.8]
    assert second["prediction"] == ["B-A"]
    assert all(map(is_png, written[1:]))


def test_labels_of_any_script_are_drawn_without_a_warning_each(tmp_path, caplog):
    """No font has the characters of plane 16, which is for private use."""
    task = make_task(labels=("\U00100001", "n\u00e9"))
    outputs, labels = np.eye(2), [0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, draw in prediction_pictures.FIGURES["classification"].items():
            draw(tmp_path / f"{name}.png", task, outputs, labels, "toy \U00100001")
            draw(tmp_path / f"{name}.png", task, outputs, labels, "toy \U00100001")
    many = make_task(labels=tuple(f"intent {n}" for n in range(20)))
    prediction_pictures.draw_confusion(
        tmp_path / "many.png", many, np.eye(20)[:, ::-1], [*range(20)], "toy"
    )
    assert all(map(is_png, tmp_path.iterdir()))
    warned = [record for record in caplog.records if "\U00100001" in record.getMessage()]
    assert len(warned) == 2  # with \u00e9 and without


def test_numbers_behind_the_pictures():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 3, 50).tolist(), rng.integers(0, 3, 50).tolist()
    task = make_task(labels=("a", "b", "c"))
    counts = prediction_pictures.count_confusions(task, predicted, labels)
    np.testing.assert_array_equal(counts, confusion_matrix(labels, predicted))

    logits = rng.normal(size=(200, 3)) * 2
    labels = rng.integers(0, 3, 200).tolist()
    confidence, right = prediction_pictures.judge_answers(task, logits, labels)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(confidence, shares.max(1))
    error = 0.0
    for n in range(10):  # each bin
        inside = [i for i in range(200) if n / 10 <= confidence[i] < (n + 1) / 10]
        if inside:
            error += abs(confidence[inside].mean() - right[inside].mean()) * len(inside) / 200
    assert prediction_pictures.calibration_error(confidence, right) == pytest.approx(error)
    always = prediction_pictures.calibration_error(np.ones(4), np.array([True, True, True, False]))
    assert always == pytest.approx(0.25)


# --- The GLUE server ---


def glue_task(name):
    table = glue.GLUE[name]
    kind = "classification" if table.labels else "regression"
    spellings = table.spellings or table.labels
    return LabelledTask(
        name, kind, 1, table.labels, table.metrics, tuple(table.splits), None, spellings
    )


def read_server(path):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter="\t"))


def test_labels_are_spelled_as_the_server_expects(tmp_path):
    examples = [Example("0", ("x",), None), Example("1", ("y",), None)]
    first = dict.fromkeys(("CoLA", "SST-2", "MRPC", "QQP", "WNLI"), "0")
    first |= {"QNLI": "entailment", "RTE": "entailment", "MNLI": "contradiction"}
    for (name, split), file in prediction_files.SERVER_FILES.items():
        task = glue_task(name)
        outputs = np.eye(3)[:2, : len(task.labels)] if task.labels else np.array([0.5, 4.25])
        path = prediction_files.write_server_file(tmp_path, task, split, examples, outputs)
        assert path == tmp_path / file
        rows = read_server(path)
        assert rows[0] == ["index", "prediction"]
        assert [row[0] for row in rows[1:]] == ["0", "1"]
        assert rows[1][1] == first.get(name, "0.5")
    assert prediction_files.complete_server_files(tmp_path) == []
    assert prediction_files.write_server_file(
        tmp_path, glue_task("CoLA"), "validation", examples, np.eye(2)
    ) is None  # fmt: skip


def test_all_eleven_files(tmp_path, caplog):
    rows = [Example(str(index), ("x",), None) for index in range(1_063)]
    prediction_files.write_server_file(
        tmp_path, glue_task("CoLA"), "test", rows, np.eye(2)[[1] * 1_063]
    )
    with caplog.at_level(logging.WARNING):
        missing = prediction_files.complete_server_files(tmp_path)
    names = [
        "AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B", "WNLI"
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.tsv" for name in names]
    assert len(missing) == 10
    assert "CoLA.tsv" not in missing
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in missing)
    assert read_server(tmp_path / "CoLA.tsv")[1] == ["0", "1"]  # kept
    # Row counts that the server expects.
    lengths = [len(read_server(tmp_path / f"{name}.tsv")) - 1 for name in names]
    assert lengths == [
        1_104, 1_063, 9_796, 9_847, 1_725, 5_463, 390_965, 3_000, 1_821, 1_379, 146
    ]  # fmt: skip
    assert set(map(tuple, read_server(tmp_path / "WNLI.tsv")[1:])) == {
        (str(n), "0") for n in range(146)
    }
