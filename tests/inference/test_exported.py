"""Exported models predict the same as their runs."""

import json
import shutil

import numpy as np
import pytest

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import LabelledTask
from convbert_jax.finetuning.task import FinetuningError
from convbert_jax.inference import loading
from convbert_jax.interop import conversion, parity
from tests.inference.conftest import LABELS, MODELS, PAIRS, as_table
from tests.refusals import refused


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """Name -> folder of the exported model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "pytorch_is_there", lambda: False)
        folder = tmp_path_factory.mktemp("exported")
        return {
            name: conversion.export(models[name], output=folder / name)
            for name in ("one", "pair", "number", "tags", "answers")
        }


@pytest.mark.parametrize("name", ["one", "pair", "number", "tags", "answers"])
def test_an_exported_folder_predicts_as_its_run(predict, models, exported, monkeypatch, name):
    """Compares predictions for a table with the training columns and for plain lines."""
    names = MODELS[name].columns
    table = as_table(",", [PAIRS[n][: len(names)] for n in range(3)], names)
    lines = "\n".join("\t".join(pair[: len(names)]) for pair in PAIRS)
    expected = predict(name, table, "a.csv"), predict(name, lines)
    monkeypatch.setitem(models, name, exported[name])
    for wanted, found in zip(
        expected, (predict(name, table, "a.csv"), predict(name, lines)), strict=True
    ):
        assert [line.keys() for line in found] == [line.keys() for line in wanted]
        for ours, theirs in zip(wanted, found, strict=True):
            numbers = {"number": "prediction"}.get(name, "probabilities")
            assert theirs.pop(numbers) == pytest.approx(ours.pop(numbers), abs=2e-5)
            assert theirs.pop("null_odds", 0.0) == pytest.approx(
                ours.pop("null_odds", 0.0), abs=1e-4
            )
            assert theirs == ours


def test_a_folder_that_does_not_say_what_it_reads(
    predict, models, exported, monkeypatch, tmp_path, caplog
):
    """One text per row is assumed, with a warning that names --texts, which fixes it."""
    lines = "\n".join("\t".join(pair) for pair in PAIRS)
    expected = predict("pair", lines)
    folder = tmp_path / "theirs"
    shutil.copytree(exported["pair"], folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"convbert_jax": {}}))
    monkeypatch.setitem(models, "pair", folder)
    assert [len(line["texts"]) for line in predict("pair", lines)] == [1, 1, 1]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("--texts" in warning for warning in warnings)
    assert any("line 1" in warning for warning in warnings)
    with refused(DataError, "line 1", "texts"):
        predict("pair", '{"texts": ["the sun", "a moon"]}')
    with refused(DataError, "text", "--texts="):
        predict("pair", as_table(",", PAIRS, ("said", "meant")), "a.csv")
    found = predict("pair", lines, texts=("first", "second"))
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs["probabilities"] == pytest.approx(ours["probabilities"], abs=2e-5)
    table = predict("pair", as_table(",", PAIRS, ("a", "b")), "a.csv", texts=("a", "b"))
    assert [line["probabilities"] for line in table] == [line["probabilities"] for line in found]


def test_a_teacher_of_another_number_of_texts(models, exported, tmp_path):
    """Runs and our exports store how many texts they read; other folders follow the task."""

    def task(texts):
        return LabelledTask("own", "classification", texts, LABELS, (), (), lambda split: [])

    for folder in (models["one"], exported["one"]):
        teacher = loading.open_teacher(str(folder))
        teacher.for_task(task(1))
        with refused(
            FinetuningError, 1, 2, field="config.finetune.distill_from", value=str(folder)
        ):
            teacher.for_task(task(2))
    theirs = tmp_path / "theirs"
    shutil.copytree(exported["pair"], theirs)
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(content | {"convbert_jax": {}}))
    taught = loading.open_teacher(str(theirs)).for_task(task(2)).logits_of(PAIRS)
    expected = loading.open_teacher(str(exported["pair"])).for_task(task(2)).logits_of(PAIRS)
    np.testing.assert_allclose(taught, expected, atol=2e-5)


def test_taggers_and_answerers_that_do_not_say_how_long(
    predict, models, exported, monkeypatch, tmp_path, caplog
):
    """The assumed length is logged; short rows still leave space for a context."""
    for name in ("tags", "answers"):
        shutil.copytree(exported[name], tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"convbert_jax": {}}))
        monkeypatch.setitem(models, name, tmp_path / name)
    (line,) = predict("tags", "a b " * 20)
    assert len(line["prediction"]) == 40
    assert None not in line["prediction"]
    assert "32 tokens" in caplog.text
    caplog.clear()
    (line,) = predict("answers", "the " * 20 + "\tthe sun and a moon")
    assert "prediction" in line
    assert "32 tokens" in caplog.text
