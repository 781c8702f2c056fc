"""Predictions of new text: what is read and from where, what comes out, and what never may."""

import csv
import errno
import gzip
import io
import json
import logging
import math
import os
import shutil
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from convbert_jax.config import ConfigError, OutputsSection, UserError
from convbert_jax.data.errors import DataError
from convbert_jax.data.labelled_text import Example
from convbert_jax.data.prediction_rows import InputRow
from convbert_jax.finetuning import prediction_stream, run
from convbert_jax.finetuning.answering import QuestionAnswerer
from convbert_jax.finetuning.prediction import choose_batch_size
from convbert_jax.interop import certificate, conversion
from convbert_jax.interop.matching import replace
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.models.pretraining import build
from convbert_jax.recipes import finetuned, prediction
from tests.finetuning.hostile_inputs import HOSTILE

LABELS = ("bad", "good")
PAIR = {"head": "sequence", "texts": 2, "columns": ("said", "meant")}
MODELS = {
    "one": OutputsSection("own", "classification", "sequence", LABELS, columns=("review",)),
    "pair": OutputsSection("own", "classification", "sequence", LABELS, 1.0, 2, ("said", "meant")),
    "number": OutputsSection(
        "own", "regression", "sequence", ("value",), 5.0, 2, ("said", "meant")
    ),
    "tags": OutputsSection("own", "tagging", "token", ("O", "B-X"), columns=("tokens",)),
    "answers": OutputsSection(
        "squad_v2", "span", "span", ("start", "end"), texts=2, columns=("question", "context")
    ),
}


@pytest.fixture(scope="module")
def models(make_config, vocabulary, tmp_path_factory):
    """Name -> the folder of a model with random weights, as fine-tuning keeps it."""
    found = {}
    for name, outputs in MODELS.items():
        fields = {"task.texts": outputs.columns, "finetune.tasks": ("own",), "task.id": "key"}
        if name == "answers":
            fields = {"finetune.query_length": 4, "finetune.stride": 4}
        config = replace(make_config(finetune__buckets=()), fields)
        own = replace(config, {f"outputs.{k}": v for k, v in vars(outputs).items()})
        params = jax.device_get(build(FinetunedModel, own)[1](jax.random.key(3)))
        params = jax.tree.map(lambda leaf: 9 * leaf, params)  # outputs that differ
        found[name] = tmp_path_factory.mktemp(name) / "model"
        task = SimpleNamespace(name="own", outputs=outputs)
        run.save_model(found[name], config, task, vocabulary, params, 1, 0)
    return found


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Models are read and compiled once for all tests."""
    known: dict = {}

    def once(function, key):
        def call(*arguments):
            place = (key, *map(str, arguments[:2])) if key == "read" else (key, arguments[0])
            if place not in known:
                known[place] = function(*arguments)
            return known[place]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, key in (("read_finetuned", "read"), ("make_predictor", "make")):
            patch.setattr(finetuned, name, once(getattr(finetuned, name), key))
        yield


@pytest.fixture
def predict(models, tmp_path):
    """predict(model, content of the input, its name, the output's, …) -> what was written."""

    def call(model, content, name="in.txt", output="out.jsonl", **options):
        data = content if isinstance(content, bytes) else content.encode()
        source, target = tmp_path / name, tmp_path / output
        source.write_bytes(data)
        target.unlink(missing_ok=True)
        prediction.predict(str(models[model]), str(source), str(target), **options)
        text = gzip.decompress(target.read_bytes()) if output.endswith(".gz") else None
        text = (text or target.read_bytes()).decode()
        return text if ".jsonl" not in output else [json.loads(x) for x in text.split("\n")[:-1]]

    return call


# --- What is read ---

REVIEWS = [("the sun", "good", "a"), ('a "moon", small', "bad", "b"), ("over under", "good", "c")]
NAMES = ("review", "label", "key")


def as_table(delimiter, rows=REVIEWS, names=NAMES):
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([names, *rows] if names else rows)
    return file.getvalue()


OBJECTS = [dict(zip(NAMES, row, strict=True)) for row in REVIEWS]
TABLES = {
    "a.csv": as_table(","),
    "bom.csv": "\ufeff" + as_table(","),
    "blank.csv": as_table(",").replace("\r\n", "\r\n\r\n"),
    "a.tsv": "\n".join("\t".join(row) for row in (NAMES, *REVIEWS)),
    "a.jsonl": "\n".join(map(json.dumps, OBJECTS)),
    "a.json": json.dumps(OBJECTS),
    "a.txt": "\n".join(map(json.dumps, OBJECTS)),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_fine_tuning_read_can_be_predicted(predict, name):
    """By the columns of training; labels and the rest come along, so that rows join."""
    expected = predict("one", "\n".join(row[0] for row in REVIEWS))
    found = predict("one", TABLES[name], name)
    assert [line["id"] for line in found] == ["a", "b", "c"]
    for line, (review, label, key), plain in zip(found, REVIEWS, expected, strict=True):
        assert (line["review"], line["label"], line["key"]) == (review, label, key)
        assert line["prediction"] == plain["prediction"]
        assert line["probabilities"] == pytest.approx(plain["probabilities"])
        assert plain["texts"] == [review]


PAIRS = [("the sun", "a moon"), ("over", "under the tree"), ("fire", "fire water")]


def test_two_texts_are_two_columns_or_a_tab(predict):
    tab = predict("pair", "\n".join("\t".join(pair) for pair in PAIRS))
    lists = predict("pair", "\n".join(json.dumps({"texts": pair}) for pair in PAIRS))
    table = predict("pair", as_table(",", PAIRS, ("said", "meant")), "a.csv")
    other = as_table(",", [pair[::-1] for pair in PAIRS], ("b", "a"))
    named = predict("pair", other, "a.csv", texts=("a", "b"))
    for lines in (lists, table, named):
        for line, wanted in zip(lines, tab, strict=True):
            assert line["probabilities"] == pytest.approx(wanted["probabilities"])
    swapped = predict("pair", "\n".join("\t".join(pair[::-1]) for pair in PAIRS))
    assert swapped[0]["probabilities"] != pytest.approx(tab[0]["probabilities"], abs=1e-5)
    numbers = predict("number", as_table("\t", PAIRS, ("said", "meant")), "a.tsv")
    assert all(isinstance(line["prediction"], float) for line in numbers)


def test_words_and_questions(predict):
    plain = predict("tags", "the  sun\nmoon")
    assert [line["words"] for line in plain] == [["the", "sun"], ["moon"]]
    assert [len(line["prediction"]) for line in plain] == [2, 1]
    table = predict("tags", "the O\nsun B-X\n\nmoon O\n", "a.conll", texts=("0",))
    assert [line["prediction"] for line in table] == [line["prediction"] for line in plain]
    objects = '{"tokens": ["the", "sun"], "id": 9}\n{"words": ["moon"]}\n'
    found = predict("tags", objects)
    assert [line["prediction"] for line in found] == [line["prediction"] for line in plain]
    assert [line["id"] for line in found] == [9, 1]
    question = {"id": "q", "question": "the sun", "context": " a moon  over tree"}
    (answer,) = predict("answers", json.dumps(question))
    assert answer["context"] == question["context"]
    assert answer["context"].startswith(answer["prediction"], max(answer["start"], 0))
    (again,) = predict(
        "answers", as_table(",", [tuple(question.values())], tuple(question)), "a.csv"
    )
    assert again == answer


def test_training_files_without_a_header(models, predict, monkeypatch):
    config, *rest = finetuned.read_finetuned(str(models["one"]), None)
    config = replace(config, {"task.columns": ("label", "review"), "task.train": "train.tsv"})
    monkeypatch.setattr(finetuned, "read_finetuned", lambda *_: (config, *rest))
    for content in ("good\tthe sun\nbad\ta moon", "label\treview\ngood\tthe sun\nbad\ta moon"):
        found = predict("one", content, "a.tsv")
        assert [(line["review"], line["label"]) for line in found] == [
            ("the sun", "good"), ("a moon", "bad"),
        ]  # fmt: skip
    assert [line["review"] for line in predict("one", "the sun\na moon", "a.tsv")] == [
        "the sun", "a moon",
    ]  # fmt: skip
    with pytest.raises(DataError, match="has 3 columns in its first line, which is no header"):
        predict("one", "1\t2\t3", "a.tsv")
    fields = {"task.format": "pattern", "task.pattern": "(?P<label>.*?): (?P<review>.*)"}
    config = replace(config, fields | {"task.columns": (), "task.train": "train.label"})
    found = predict("one", "good: the sun\nbroken\n", "new.label")
    assert (found[0]["review"], found[0]["label"]) == ("the sun", "good")
    assert "line 2 does not match the pattern" in found[1]["error"]


@pytest.mark.parametrize("number", [True, False])
def test_columns_by_number(models, predict, monkeypatch, number):
    """As in training: the texts, the id, and the label that new text lacks."""
    config, *rest = finetuned.read_finetuned(str(models["one"]), None)
    names = {"label": "-1", "id": "0", "texts": ("1",)}
    if not number:
        names = {"label": "label", "id": "key", "texts": ("review",)}
    own = {f"task.{field}": value for field, value in names.items()}
    own |= {"outputs.columns": names["texts"], "task.columns": ("key", "review", "label")}
    config = replace(config, own | {"task.train": "train.tsv"})
    monkeypatch.setattr(finetuned, "read_finetuned", lambda *_: (config, *rest))
    for content in (
        "a\tthe sun\tgood\n1\ta moon\tbad",
        "a\tthe sun\n1\ta moon",
        "review\tkey\nthe sun\ta\na moon\t1",
    ):
        found = predict("one", content, "a.tsv")
        assert [(line["id"], line["review"]) for line in found] == [
            ("a", "the sun"), ("1", "a moon"),
        ]  # fmt: skip
    assert predict("one", "1\ta moon", "a.tsv")[0]["review"] == "a moon"  # it is no header


def test_ids_by_number_in_lists(models, predict, monkeypatch):
    config, *rest = finetuned.read_finetuned(str(models["one"]), None)
    config = replace(config, {"task.id": "-1", "outputs.columns": ("0",), "task.texts": ("0",)})
    monkeypatch.setattr(finetuned, "read_finetuned", lambda *_: (config, *rest))
    found = predict("one", '[["the sun", "a"], ["a moon", "b"]]', "a.json")
    assert [(line["id"], line["0"]) for line in found] == [("a", "the sun"), ("b", "a moon")]


@pytest.mark.parametrize("columns", [("words", "tag"), ("words", "pos", "tag"), ()])
def test_words_without_tags(models, predict, monkeypatch, columns):
    """A tagger that learned from columns reads the words alone too."""
    config, *rest = finetuned.read_finetuned(str(models["tags"]), None)
    own = {"task.columns": columns, "task.label": "tag", "task.train": "train.conll"}
    word = columns[:1] or ("0",)
    config = replace(config, own | {"outputs.columns": word, "task.texts": word})
    monkeypatch.setattr(finetuned, "read_finetuned", lambda *_: (config, *rest))
    for width in {1, len(columns) - 1, len(columns)} - {-1, 0}:
        rows = [(word, *"xy"[: width - 1]) for word in ("the", "sun")]
        content = "\n".join(map(" ".join, rows)) + "\n\nmoon x y"[: 4 + 2 * width]
        found = predict("tags", content, "a.conll")
        assert [line[word[0]] for line in found] == [["the", "sun"], ["moon"]]
    found = predict("tags", b"the\n\nsun\n\xff\n", "a.conll")
    assert [line["id"] for line in found] == [0, 1]
    assert found[1]["error"] == "line 3 is not utf-8 (byte 0 is 0xFF)"
    if columns:
        with pytest.raises(DataError, match=r"has 4 columns, but training had . \(words, "):
            predict("tags", "the a b c\n", "a.conll")


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.json"])
def test_what_is_too_deep_to_be_written(predict, name):
    """It is a fault of its row; what is as deep as anyone writes comes out again."""
    rows = [f'{{"text": "sun", "x": {"[" * depth}{"]" * depth}}}' for depth in (99, 100, 700)]
    content = f"[{','.join(rows)}]" if name == "in.json" else "\n".join(rows)
    found = predict("one", content, name)
    assert json.dumps(found[0]["x"]) == "[" * 99 + "]" * 99
    for line in found[1:]:
        assert "has more than 100 lists or objects in one another" in line["error"]


def test_text_is_not_taken_for_json(predict, caplog):
    texts = ["{the sun", "{}", '{"rev": 1}', "[1]", '"moon"', "{{a}} moon", "null", "{'text': 1}"]
    found = predict("one", "\n".join(texts))
    assert [line["texts"] for line in found] == [[text] for text in texts]
    assert caplog.text.count("begins with { and is no JSON object with texts") == 1


# --- Folders for others ---


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """Name -> the folder that the model was exported to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "pytorch_is_there", lambda: False)
        folder = tmp_path_factory.mktemp("exported")
        return {
            name: conversion.export(models[name], output=folder / name)
            for name in ("one", "pair", "number", "tags", "answers")
        }


@pytest.mark.parametrize("name", ["one", "pair", "number", "tags", "answers"])
def test_an_exported_folder_predicts_as_its_run(predict, models, exported, monkeypatch, name):
    """From a table with the columns of training, and from plain lines."""
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
    """One text is assumed, with a warning that names the flag; the flag is right."""
    lines = "\n".join("\t".join(pair) for pair in PAIRS)
    expected = predict("pair", lines)
    folder = tmp_path / "theirs"
    shutil.copytree(exported["pair"], folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"convbert_jax": {}}))
    monkeypatch.setitem(models, "pair", folder)
    assert [len(line["texts"]) for line in predict("pair", lines)] == [1, 1, 1]
    assert "taken as 1 of up to 128 tokens. If that is wrong, name as many columns" in caplog.text
    assert "line 1 has a tab; this model reads one text a line" in caplog.text
    with pytest.raises(DataError, match="2 texts in 'texts'; this model reads a text"):
        predict("pair", '{"texts": ["the sun", "a moon"]}')
    with pytest.raises(DataError, match=r"no column 'text' .*--texts="):
        predict("pair", as_table(",", PAIRS, ("said", "meant")), "a.csv")
    found = predict("pair", lines, texts=("first", "second"))
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs["probabilities"] == pytest.approx(ours["probabilities"], abs=2e-5)
    table = predict("pair", as_table(",", PAIRS, ("a", "b")), "a.csv", texts=("a", "b"))
    assert [line["probabilities"] for line in table] == [line["probabilities"] for line in found]


def test_as_many_columns_as_the_model_reads(predict):
    with pytest.raises(ConfigError, match=r"names 1 columns, but .* reads 2 .* \(said, meant\)"):
        predict("pair", "a\tb", texts=("said",))


# --- Rows that cannot be predicted ---


def test_each_row_has_its_answer(predict, caplog):
    """One bad line stops nothing, and shifts nothing."""
    lines = [b"the sun", b"", b"caf\xe9", b'{"texts": 5}', b'{"text": "x', b"  ", b"a moon", b""]
    with caplog.at_level(logging.WARNING):
        found = predict("one", b"\n".join(lines) + b"\n")
    assert [line["id"] for line in found] == list(range(8))
    assert [line.get("texts") for line in found] == [["the sun"], *[None] * 5, ["a moon"], None]
    says = {
        1: "line 2 is empty",
        2: "line 3 is not utf-8 (byte 3 is 0xE9)",
        3: "line 4 has int, not a list, in 'texts'; this model reads a text or",
        4: "line 5 is not JSON: ",
        7: "line 8 is empty",
    }
    for number, sentence in says.items():
        assert found[number]["error"].startswith(sentence)
    assert (
        "6 of 8 rows have an error in the place of a prediction; the first: line 2" in caplog.text
    )
    alone = predict("one", "a moon")
    assert found[6]["probabilities"] == pytest.approx(alone[0]["probabilities"])


def test_a_context_without_a_token_stops_no_other(predict):
    """A blank that is none for Python, and no token for the vocabulary."""
    found = predict("answers", "the sun\ta moon\nthe sun\t\u200b\n\u200b\tover\nthe sun\ta moon")
    assert [line.get("error") for line in found] == [
        None,
        "line 2 has a context without any token",
        "line 3 has a question without any token",
        None,
    ]
    assert found[0]["probabilities"] == pytest.approx(found[3]["probabilities"])


def test_rows_of_a_table_keep_their_numbers(predict):
    found = predict("one", "review,x\nsun,1\n,2\nmoon,3,4\ntree,5\n", "a.csv")
    assert [(line["id"], line.get("review")) for line in found] == [
        (0, "sun"), (1, None), (2, None), (3, "tree"),
    ]  # fmt: skip
    assert "line 3 has an empty text in 'review'" in found[1]["error"]
    assert found[1]["x"] == "2"
    assert "line 4 has 3 columns instead of 2" in found[2]["error"]


def test_nothing_that_can_be_predicted_is_an_error(predict, tmp_path):
    for content, says in (
        ("", "has no rows"),
        ("\n\n", "has no row that can be predicted; the first: line 1 is empty"),
    ):
        with pytest.raises(DataError, match=says):
            predict("one", content)
        assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(DataError, match="has 1 text; this model reads two texts with a tab"):
        predict("pair", "the sun\na moon")
    with pytest.raises(DataError, match=r"no column 'review' or 'text' \(it has: a, b\); name the"):
        predict("one", "a,b\n1,2\n", "a.csv")


def test_doubled_ids_are_told(predict, caplog):
    lines = ['{"id": 5, "text": "sun"}', '{"id": 6, "text": "sun"}', '{"id": 5, "text": "sun"}']
    predict("one", "\n".join([*lines, "plain", "plain"]))
    assert "line 3 has the id 5, which line 1 has too" in caplog.text


# --- What comes out ---


def test_a_table_comes_out_as_other_readers_read_it(predict):
    rows = [("a\tsun", "x\ny"), ('the "moon"', "\r"), ("", "z"), ("fire\r\nwater", "é\u2028")]
    for output, delimiter in (("out.tsv", "\t"), ("out.csv", ",")):
        text = predict("one", as_table(",", rows, ("review", "note")), "a.csv", output)
        found = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
        assert [line["note"] for line in found] == [note for _, note in rows]
        assert [line["review"] for line in found] == ["a\tsun", 'the "moon"', "", "fire\nwater"]
        assert list(found[0]) == ["id", "prediction", "probability", "error", "review", "note"]
        assert found[0]["prediction"] in LABELS
        assert 0.5 <= float(found[0]["probability"]) <= 1
        assert found[2]["error"] == "line 5 has an empty text in 'review'"
    text = predict("pair", "a sun\tmoon\n", output="out.tsv")
    assert text.splitlines()[0].split("\t") == [
        "id", "prediction", "probability", "error", "text1", "text2",
    ]  # fmt: skip


def test_columns_that_are_named_as_ours(predict):
    rows = [("the sun", "old", "x")]
    (line,) = predict("one", as_table(",", rows, ("review", "prediction", "texts")), "a.csv")
    assert line["prediction"] in LABELS
    assert (line["input_prediction"], line["texts"]) == ("old", "x")
    objects = [
        {"text": "", "prediction": "x", "probabilities": {}, "start": 1},
        {"text": "sun", "error": "x", "probability": 2, "input_error": 3},
    ]
    bad, good = predict("one", "\n".join(map(json.dumps, objects)))
    assert bad.keys() == {"id", "error", "input_prediction", "input_probabilities", "start"}
    assert (good["input_error"], good["input_probability"]) == ("x", 2)
    assert good["input_input_error"] == 3
    assert good["prediction"] in LABELS
    assert "error" not in good
    with pytest.raises(DataError, match="has no row that can be predicted"):
        predict("one", json.dumps(objects[0]))


ODD = [  # columns that a table spells differently where they are ours
    ({"text": "sun", "words": [{"w": "a"}]}, "words", '[{"w": "a"}]'),
    ({"text": "sun", "probabilities": {}}, "input_probabilities", "{}"),
    ({"text": "sun", "texts": ["other"]}, "texts", '["other"]'),
    ({"review": "sun", "text2": "mine", "texts": ["a", "b"]}, "text2", "mine"),
    ({"review": "sun", "texts": [1, 2]}, "texts", "[1, 2]"),
]


@pytest.mark.parametrize(("content", "name", "expected"), ODD)
def test_a_table_of_columns_that_are_named_as_ours(predict, content, name, expected):
    text = predict("one", json.dumps(content), output="out.csv")
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert row[name] == expected
    assert "sun" in (row.get("text"), row.get("review"))
    assert row["prediction"] in LABELS


def stop_after(chunks, monkeypatch):
    """Makes prediction end like a Ctrl-C after some chunks."""
    answer, left = prediction_stream.answer_rows, iter(range(chunks))

    def stops(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(prediction_stream, "answer_rows", stops)


def test_an_output_is_whole_or_not_there(predict, models, tmp_path, monkeypatch):
    for output in ("out.jsonl", "out.tsv", "out.jsonl.gz"):
        with monkeypatch.context() as patch:
            stop_after(0, patch)
            with pytest.raises(KeyboardInterrupt):
                predict("one", "the sun", output=output)
        assert not (tmp_path / output).exists()
        assert predict("one", "the sun", output=output)
        assert not (tmp_path / f"{output}.unfinished").exists()
    with pytest.raises(ConfigError, match=r"out\.jsonl exists; remove it or name another"):
        prediction.predict(str(models["one"]), "-", str(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match="there is no folder"):
        prediction.predict(str(models["one"]), "-", str(tmp_path / "no" / "out.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        prediction.predict(str(models["one"]), str(tmp_path / "no"), "-")


def test_a_stopped_prediction_goes_on(predict, models, tmp_path, monkeypatch, caplog):
    """After what is whole of it, if that is of these rows and of this model."""
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 4)
    text = "\n".join(f"{'river ' * (n % 5)}stone {n}" if n % 7 else "" for n in range(30))
    expected = predict("one", text)
    unfinished = tmp_path / "out.jsonl.unfinished"
    for half in (b"", b'{"id": 12, "te'):
        with monkeypatch.context() as patch:
            stop_after(3, patch)
            with pytest.raises(KeyboardInterrupt):
                predict("one", text)
        unfinished.write_bytes(unfinished.read_bytes() + half)
        with caplog.at_level(logging.INFO):
            assert predict("one", text) == expected
        assert "Going on after 12 rows" in caplog.text
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            predict("one", text)
    kept = unfinished.read_bytes()
    with pytest.raises(DataError, match="has another row in its line 2 than the input; remove it"):
        predict("one", text.replace("river", "house"))
    assert unfinished.read_bytes() == kept
    with monkeypatch.context() as patch:  # the same folder, trained further
        config, params, tokenizer = finetuned.read_finetuned(str(models["one"]), None)
        trained = jax.tree.map(lambda leaf: leaf * 1.01, params)
        patch.setattr(finetuned, "read_finetuned", lambda *_: (config, trained, tokenizer))
        with pytest.raises(DataError, match=r"of another model .* as it was then\); remove it"):
            predict("one", text)
    unfinished.write_bytes(b"\xff\n")
    with pytest.raises(DataError, match="has another row in its line 1"):
        predict("one", text)
    unfinished.write_bytes(kept.splitlines(keepends=True)[1].replace(b'"id": 1', b'"id": 0'))
    with pytest.raises(DataError, match="has another row in its line 1"):
        predict("one", text)
    note = tmp_path / "out.jsonl.unfinished.model"
    note.write_text("{")
    with pytest.raises(UserError, match=r"unfinished\.model is damaged .* remove it"):
        predict("one", text)
    note.unlink()
    with pytest.raises(DataError, match=r"has no out\.jsonl\.unfinished\.model beside it"):
        predict("one", text)
    unfinished.unlink()
    assert predict("one", text) == expected
    assert not list(tmp_path.glob("*unfinished*"))


def test_what_is_kept_is_compared_as_it_was_written(predict, monkeypatch, caplog):
    """NaN is null in the output, and a column that is named as ours has another name there."""
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 2)
    odd = ['"prediction": "x", "error": 1', '"n": NaN, "m": [1e999]', '"id": -Infinity']
    text = (
        "\n".join(f'{{"text": "sun", {odd[n % 3]}}}' for n in range(9)) + '\n{"text": "", "m": NaN}'
    )
    expected = predict("one", text)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            predict("one", text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert predict("one", text) == expected
    assert "Going on after 4 rows" in caplog.text
    assert "the 4 rows of an earlier start are not counted" in caplog.text
    assert "Predicted 5 rows" in caplog.text


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.jsonl.gz"])
def test_two_starts_do_not_write_one_output(predict, models, tmp_path, monkeypatch, output):
    answer, said = prediction_stream.answer_rows, []

    def starts_again(*arguments):
        with pytest.raises(ConfigError, match="is being written by another process; wait for it"):
            prediction.predict(*map(str, (models["one"], tmp_path / "in.txt", tmp_path / output)))
        said.append(True)
        return answer(*arguments)

    monkeypatch.setattr(prediction_stream, "answer_rows", starts_again)
    assert predict("one", "the sun", output=output)
    assert said == [True]
    assert not list(tmp_path.glob("*unfinished*"))


def test_an_output_that_cannot_be_locked_is_written(predict, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert predict("one", "the sun")
    assert "out.jsonl.unfinished cannot be locked; let one process write it." in caplog.text


def test_numbers_that_are_none(predict, monkeypatch):
    """NaN is no JSON: from an input it is null, from a model an error."""
    (line,) = predict("one", '{"text": "sun", "n": NaN, "m": 1e999, "o": [-Infinity, 1.5]}')
    assert (line["n"], line["m"], line["o"]) == (None, None, [None, 1.5])
    said = [{"prediction": "bad", "probabilities": {"bad": math.nan, "good": math.nan}}]
    row, reads = InputRow(0, 1, texts=("sun",)), SimpleNamespace(kind="classification")
    for prediction_of_it in (said, [{"prediction": math.inf}]):
        (line,) = prediction_stream.answer_rows([row], lambda _: prediction_of_it, reads)  # noqa: B023
        assert line["error"] == "line 1 is given no number by the model, but NaN"
        assert "prediction" not in line
    said = [{"prediction": "", "start": -1, "probabilities": {"": 1.0}, "null_odds": math.inf}]
    (line,) = prediction_stream.answer_rows([row], lambda _: said, SimpleNamespace(kind="span"))
    assert line["error"] == "line 1 is given no number by the model, but NaN"


def test_a_model_of_nan_gives_no_answers(models, predict, monkeypatch):
    """Not even the answer that there is none."""
    text = "the sun\ta moon over the tree"
    assert math.isfinite(predict("answers", text)[0]["null_odds"])
    config, params, tokenizer = finetuned.read_finetuned(str(models["answers"]), None)
    params = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    model = QuestionAnswerer(config, params, tokenizer, np.dtype(np.float32))
    monkeypatch.setattr(finetuned, "make_predictor", lambda *_: model)
    with pytest.raises(DataError, match="the first: line 1 is given no number by the model"):
        predict("answers", text)


def test_packed_files(predict, tmp_path):
    plain = predict("one", "the sun\na moon\n")
    assert predict("one", gzip.compress(b"the sun\na moon\n"), "in.txt.gz", "out.jsonl.gz") == plain
    for broken in (b"the sun\n", gzip.compress(b"the sun\n" * 999)[:30], b""):
        with pytest.raises(DataError, match=r"is a damaged gzip file|has no rows"):
            predict("one", broken, "in.txt.gz")


def test_texts_that_are_cut_are_told_once(models, caplog):
    predictor = finetuned.make_predictor(*finetuned.read_finetuned(str(models["one"]), None), "f4")
    predictor._told_cut = False
    with caplog.at_level(logging.INFO):
        for words in (3, 30, 30):
            predictor.answer([Example("0", ("sun " * words,), None)])
    assert caplog.text.count("1 of 1 texts (100.0%) are cut to 16 tokens") == 1


def test_long_files_keep_their_order(predict, monkeypatch):
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 7)
    texts = [f"{'river ' * (n * 7 % 13)}stone" for n in range(40)]
    found = predict("one", "\n".join(texts))
    assert [line["texts"][0] for line in found] == texts
    one_by_one = {text: predict("one", text)[0]["probabilities"] for text in set(texts)}
    for text, line in zip(texts, found, strict=True):
        assert line["probabilities"] == pytest.approx(one_by_one[text], abs=1e-5)


# --- Pipes ---


def test_a_line_in_a_line_out(models, tmp_path):
    """On a pipe each line is answered before the next one is written, a burst in large chunks."""
    source, target = tmp_path / "source", tmp_path / "target"
    os.mkfifo(source)
    os.mkfifo(target)
    sizes = []
    found = {}
    chunks = prediction_stream.as_they_come

    def counted(rows):
        for chunk in chunks(rows):
            sizes.append(len(chunk))
            yield chunk

    def work():
        config, params, tokenizer = finetuned.read_finetuned(str(models["one"]), None)
        predictor = finetuned.make_predictor(config, params, tokenizer, np.dtype(np.float32))
        from convbert_jax.data import prediction_input
        from convbert_jax.data.text_lines import Stream
        from convbert_jax.finetuning import prediction_output

        reads = prediction_input.describe_model_input(config)
        with open(source, "rb") as lines, open(target, "wb") as output:
            rows = prediction_input.open_input(Stream("pipe", lines), "lines", reads)
            found["count"] = prediction_stream.predict_stream(
                counted(rows),
                predictor.answer,
                prediction_output.open_lines(output, ".jsonl"),
                reads,
                "pipe",
            )

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    with open(source, "wb", buffering=0) as lines, open(target, "rb") as answers:
        waited = []
        for number in range(4):
            start = time.monotonic()
            lines.write(b"the sun %d\n" % number)
            assert json.loads(answers.readline())["texts"] == [f"the sun {number}"]
            waited.append(time.monotonic() - start)
        assert min(waited[1:]) < 1.0  # the first one is compiled
        assert sizes == [1, 1, 1, 1]
        burst = b"".join(b"a moon %d\n" % number for number in range(5_000))
        threading.Thread(target=lambda: (lines.write(burst), lines.close())).start()
        texts = [json.loads(line)["texts"][0] for line in answers]
    worker.join(60)
    assert texts == [f"a moon {number}" for number in range(5_000)]
    assert found["count"] == 5_004
    assert max(sizes) == prediction_stream.AT_ONCE
    assert len(sizes) < 40


def test_whoever_reads_may_have_enough(models, tmp_path):
    """As `head -1` has; no error, and nothing is waited for."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("the sun\n" * 20_000)
    os.mkfifo(target)
    counts = []
    arguments = map(str, (models["one"], source, target))
    worker = threading.Thread(
        target=lambda: counts.append(prediction.predict(*arguments)), daemon=True
    )
    worker.start()
    with open(target, "rb") as answers:
        assert json.loads(answers.readline())["id"] == 0
    worker.join(60)
    assert counts == [0]


def test_closed_or_full_is_a_sentence(models, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("the sun\n")
    model = str(models["one"])
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
        prediction.predict(model, str(source), "/dev/full")
    for name, arguments in (("stdin", ("-", "/dev/null")), ("stdout", (str(source), "-"))):
        monkeypatch.setattr(f"sys.{name}", None)
        with pytest.raises(ConfigError, match="is closed; name a file"):
            prediction.predict(model, *arguments)


def test_a_fault_of_a_pipe_comes_after_its_rows():
    def rows():
        yield "a"
        raise DataError("broken")

    chunks = prediction_stream.as_they_come(rows())
    assert next(chunks) == ["a"]
    with pytest.raises(DataError, match="broken"):
        next(chunks)


def test_batches_are_as_large_as_what_is_there():
    assert [choose_batch_size(n, 128) for n in (0, 1, 2, 64, 65, 1_024)] == [1, 1, 16, 16, 128, 128]
    assert [choose_batch_size(n, 4) for n in (1, 2, 3)] == [1, 4, 4]


# --- Attacks ---

NAMED = ("in.txt", "in.csv", "in.tsv", "in.jsonl", "in.json", "in.txt.gz", "in.conll")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("model", MODELS)
def test_hostile_inputs_are_answered_or_refused(predict, tmp_path, model, name):
    """Under seven names each: an answer for every row, or one sentence and no output."""
    content = HOSTILE[name]
    content = content if isinstance(content, bytes) else content.encode()
    for file in NAMED:
        output = "out.tsv" if file == "in.csv" else "out.jsonl"
        try:
            found = predict(model, content, file, output)
        except UserError as error:
            said = str(error)
        else:
            said = ""
            if file == "in.txt":
                assert len(found) == content.count(b"\n") + (not content.endswith(b"\n"))
            for line in found if output == "out.jsonl" else ():
                assert ("error" in line) != ("prediction" in line)
        assert (tmp_path / output).exists() == (not said)
        assert len(said) < 1_000
        assert said[-1:] in (".", "")
        assert not (tmp_path / f"{output}.unfinished").exists()
