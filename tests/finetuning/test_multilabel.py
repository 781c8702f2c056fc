"""Texts with any number of labels, from files to scores, predictions and exports."""

import csv
import json

import numpy as np
import pytest

from convbert_jax.config.data import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import own_task
from convbert_jax.finetuning import classification, run, scoring
from convbert_jax.inference import loading
from convbert_jax.inference.predictor import Predictor
from convbert_jax.interop import conversion, huggingface
from convbert_jax.workdir import Workdir
from tests.finetuning.test_scoring import make_task
from tests.refusals import refused

LABELS = ("fire", "moon", "river")
WORDS = ["the", "a", "of", "stone", "light", "under", *LABELS]


def draw(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Texts whose labels are words in them."""
    random = np.random.default_rng(seed)
    texts = [random.choice(WORDS, random.integers(2, 9)) for _ in range(count)]
    return [(" ".join(words), [name for name in LABELS if name in words]) for words in texts]


def open_source(folder):
    with (folder / "train.csv").open("w", newline="") as file:
        rows = [(text, "|".join(labels)) for text, labels in draw(400, 0)]
        csv.writer(file).writerows([("text", "label"), *rows])
    lines = [json.dumps({"text": t, "label": labels}) + "\n" for t, labels in draw(40, 1)]
    (folder / "dev.jsonl").write_text("".join(lines))
    section = TaskSection(
        name="topics", kind="multilabel", folder=str(folder), train="train.csv",
        validation="dev.jsonl",
    )  # fmt: skip
    return own_task.open_task(section)


def test_labels_are_learned_and_exported(make_config, make_programs, vocabulary, tmp_path):
    source = open_source(tmp_path)
    assert (source.labels, source.metrics) == (LABELS, ("micro_f1", "macro_f1"))
    fields = {"finetune.learning_rates": (3e-3,), "finetune.epochs": (20.0,), "finetune.seeds": 1}
    fields |= {"finetune.buckets": (), "model.dropout": 0.0, "model.attention_dropout": 0.0}
    config = make_config(**fields)
    task = classification.make_task(source, config, vocabulary)
    programs, workdir = make_programs(config), Workdir(tmp_path / "run")
    (result,) = run.finetune(config, workdir, [lambda: task], programs, vocabulary, None)
    scores = result.chosen_runs[0].scores["validation"]
    assert min(scores["micro_f1"], scores["macro_f1"]) > 0.85
    place = result.folders[0]
    lines = (place / "predictions" / "validation.jsonl").read_text().splitlines()
    examples = source.read("validation")
    for line, example in zip(map(json.loads, lines), examples, strict=True):
        chosen = [name for name, share in line["probabilities"].items() if share > 0.5]
        assert line["prediction"] == chosen
        assert line["label"] == [LABELS[index] for index in example.label]

    predictor = Predictor(*loading.read_finetuned(str(place)), np.float32)
    ours = predictor.answer(examples)
    folder = conversion.export(place, output=tmp_path / "exported")
    content = json.loads((folder / huggingface.CONFIG).read_text())
    assert content["problem_type"] == "multi_label_classification"
    again = Predictor(*loading.read_finetuned(str(folder)), np.float32)
    for mine, theirs in zip(ours, again.answer(examples), strict=True):
        assert mine["prediction"] == theirs["prediction"]
        assert mine["probabilities"] == pytest.approx(theirs["probabilities"], abs=1e-5)


def test_scores_count_pairs_of_text_and_label():
    task = make_task("multilabel", ("a", "b", "c"), ("micro_f1", "macro_f1"))
    labels = [(0, 1), (), (2,)]
    outputs = np.array([[1.0, -1, 2, 9], [-1, -1, -1, 9], [-1, -1, 3, 9]])  # c is wrong in row 0
    assert scoring.predict(task, outputs) == [(0, 2), (), (2,)]
    found = scoring.score(task, outputs, labels)
    assert found["micro_f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert found["macro_f1"] == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert scoring.probabilities(task, outputs[0]) == pytest.approx(1 / (1 + np.exp([-1, 1, -2])))
    nothing = scoring.score(task, outputs[1:2], [()])
    assert nothing["micro_f1"] == 1.0


@pytest.mark.parametrize(
    ("value", "fault"), [("null", True), ("5", True), ('["new"]', True), ("[]", False)]
)
def test_label_values(tmp_path, value, fault):
    open_source(tmp_path)
    (tmp_path / "dev.jsonl").write_text(f'{{"text": "a", "label": {value}}}\n')
    section = TaskSection(
        name="topics", kind="multilabel", folder=str(tmp_path), train="train.csv",
        validation="dev.jsonl",
    )  # fmt: skip
    source = own_task.open_task(section)
    if not fault:
        assert source.read("validation")[0].label == ()
        return
    with refused(DataError, line=1):
        source.read("validation")
