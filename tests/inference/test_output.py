"""Prediction output: tables and lines, written completely or not at all, by one process."""

import csv
import errno
import io
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from convbert_jax.config import ConfigError, UserError
from convbert_jax.data.errors import DataError
from convbert_jax.data.input_rows import InputRow
from convbert_jax.inference import loading
from convbert_jax.inference import stream as prediction_stream
from convbert_jax.inference.predictor import QuestionAnswerer
from convbert_jax.recipes import prediction
from tests.inference.conftest import LABELS, as_table, stop_after
from tests.refusals import refused


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
        assert found[2]["error"].startswith("line 5 ")
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
    with refused(DataError, "line 1"):
        predict("one", json.dumps(objects[0]))


ODD = [  # columns with reserved names, which a table renames or serializes
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


def test_an_output_is_whole_or_not_there(predict, models, tmp_path, monkeypatch):
    for output in ("out.jsonl", "out.tsv", "out.jsonl.gz"):
        with monkeypatch.context() as patch:
            stop_after(0, patch)
            with pytest.raises(KeyboardInterrupt):
                predict("one", "the sun", output=output)
        assert not (tmp_path / output).exists()
        assert predict("one", "the sun", output=output)
        assert not (tmp_path / f"{output}.unfinished").exists()
    with refused(ConfigError, tmp_path / "out.jsonl"):
        prediction.predict(str(models["one"]), "-", str(tmp_path / "out.jsonl"))
    with refused(ConfigError, tmp_path / "no"):
        prediction.predict(str(models["one"]), "-", str(tmp_path / "no" / "out.jsonl"))
    with refused(ConfigError, tmp_path / "no"):
        prediction.predict(str(models["one"]), str(tmp_path / "no"), "-")
    for paths in (("-", "~nobody-here/out.jsonl"), ("~nobody-here/in.txt", "-")):
        with refused(UserError, "~nobody-here"):
            prediction.predict(str(models["one"]), *paths)


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.jsonl.gz"])
def test_two_starts_do_not_write_one_output(predict, models, tmp_path, monkeypatch, output):
    answer, said = prediction_stream.answer_rows, []

    def starts_again(*arguments):
        with refused(ConfigError, tmp_path / output):
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
    assert "out.jsonl.unfinished" in caplog.text


def test_numbers_that_are_none(predict, monkeypatch):
    """NaN is not valid JSON: an input NaN becomes null, a model's NaN an error."""
    (line,) = predict("one", '{"text": "sun", "n": NaN, "m": 1e999, "o": [-Infinity, 1.5]}')
    assert (line["n"], line["m"], line["o"]) == (None, None, [None, 1.5])
    said = [{"prediction": "bad", "probabilities": {"bad": math.nan, "good": math.nan}}]
    row, reads = InputRow(0, 1, texts=("sun",)), SimpleNamespace(kind="classification")
    for prediction_of_it in (said, [{"prediction": math.inf}]):
        (line,) = prediction_stream.answer_rows([row], lambda _: prediction_of_it, reads)  # noqa: B023
        assert line["error"].startswith("line 1 ")
        assert "prediction" not in line
    said = [{"prediction": "", "start": -1, "probabilities": {"": 1.0}, "null_odds": math.inf}]
    (line,) = prediction_stream.answer_rows([row], lambda _: said, SimpleNamespace(kind="span"))
    assert line["error"].startswith("line 1 ")


def test_a_model_of_nan_gives_no_answers(models, predict, monkeypatch):
    """It must not report "no answer" either."""
    text = "the sun\ta moon over the tree"
    assert math.isfinite(predict("answers", text)[0]["null_odds"])
    config, params, tokenizer = loading.read_finetuned(str(models["answers"]), None)
    params = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    model = QuestionAnswerer(config, params, tokenizer, np.dtype(np.float32))
    monkeypatch.setattr(prediction, "make_predictor", lambda *_: model)
    with refused(DataError, "line 1", "NaN"):
        predict("answers", text)


def test_closed_or_full_is_a_sentence(models, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("the sun\n")
    model = str(models["one"])
    with refused(ConfigError, "/dev/full", "No space left"):
        prediction.predict(model, str(source), "/dev/full")
    for name, arguments in (("stdin", ("-", "/dev/null")), ("stdout", (str(source), "-"))):
        monkeypatch.setattr(f"sys.{name}", None)
        with refused(ConfigError, field=None):
            prediction.predict(model, *arguments)
