"""Prediction input: the rows and columns that are read, and rows that cannot be predicted."""

import gzip
import json
import logging

import pytest

import convbert_jax
from convbert_jax.config import ConfigError
from convbert_jax.data.errors import DataError
from convbert_jax.inference import loading
from convbert_jax.interop.matching import replace
from tests.inference.conftest import MODELS, PAIRS, as_table
from tests.refusals import refused

REVIEWS = [("the sun", "good", "a"), ('a "moon", small', "bad", "b"), ("over under", "good", "c")]
NAMES = ("review", "label", "key")
OBJECTS = [dict(zip(NAMES, row, strict=True)) for row in REVIEWS]
TABLES = {
    "a.csv": as_table(",", REVIEWS, NAMES),
    "bom.csv": "\ufeff" + as_table(",", REVIEWS, NAMES),
    "blank.csv": as_table(",", REVIEWS, NAMES).replace("\r\n", "\r\n\r\n"),
    "a.tsv": "\n".join("\t".join(row) for row in (NAMES, *REVIEWS)),
    "a.jsonl": "\n".join(map(json.dumps, OBJECTS)),
    "a.json": json.dumps(OBJECTS),
    "a.txt": "\n".join(map(json.dumps, OBJECTS)),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_fine_tuning_read_can_be_predicted(predict, name):
    """Files with the training columns; labels and other columns are copied to the output."""
    expected = predict("one", "\n".join(row[0] for row in REVIEWS))
    found = predict("one", TABLES[name], name)
    assert [line["id"] for line in found] == ["a", "b", "c"]
    for line, (review, label, key), plain in zip(found, REVIEWS, expected, strict=True):
        assert (line["review"], line["label"], line["key"]) == (review, label, key)
        assert line["prediction"] == plain["prediction"]
        assert line["probabilities"] == pytest.approx(plain["probabilities"])
        assert plain["texts"] == [review]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_nested_column_is_read_under_its_dotted_name(predict, name):
    rows = [{"data": {"body": review}, "key": key} for review, _, key in REVIEWS]
    found = predict("one", "\n".join(map(json.dumps, rows)), name, texts=("data.body",))
    expected = predict("one", "\n".join(row[0] for row in REVIEWS))
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected]
    assert [line["data.body"] for line in found] == [review for review, _, _ in REVIEWS]


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
    conllu = "# text = the sun\n1-2\tx\tX\n1\tthe\tX\n2\tsun\tX\n\n# a = b\n1\tmoon\tX\n"
    table = predict("tags", conllu, "a.conllu", texts=("1",))
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
    config, *rest = loading.read_finetuned(str(models["one"]), None)
    config = replace(config, {"task.columns": ("label", "review"), "task.train": "train.tsv"})
    monkeypatch.setattr(loading, "read_finetuned", lambda *_: (config, *rest))
    for content in ("good\tthe sun\nbad\ta moon", "label\treview\ngood\tthe sun\nbad\ta moon"):
        found = predict("one", content, "a.tsv")
        assert [(line["review"], line["label"]) for line in found] == [
            ("the sun", "good"), ("a moon", "bad"),
        ]  # fmt: skip
    assert [line["review"] for line in predict("one", "the sun\na moon", "a.tsv")] == [
        "the sun", "a moon",
    ]  # fmt: skip
    with refused(DataError, 3):
        predict("one", "1\t2\t3", "a.tsv")
    fields = {"task.format": "pattern", "task.pattern": "(?P<label>.*?): (?P<review>.*)"}
    config = replace(config, fields | {"task.columns": (), "task.train": "train.label"})
    found = predict("one", "good: the sun\nbroken\n", "new.label")
    assert (found[0]["review"], found[0]["label"]) == ("the sun", "good")
    assert "line 2" in found[1]["error"]


@pytest.mark.parametrize("number", [True, False])
def test_columns_by_number(models, predict, monkeypatch, number):
    """Columns by position as in training: the texts and the id; new text has no label."""
    config, *rest = loading.read_finetuned(str(models["one"]), None)
    names = {"label": "-1", "id": "0", "texts": ("1",)}
    if not number:
        names = {"label": "label", "id": "key", "texts": ("review",)}
    own = {f"task.{field}": value for field, value in names.items()}
    own |= {"outputs.columns": names["texts"], "task.columns": ("key", "review", "label")}
    config = replace(config, own | {"task.train": "train.tsv"})
    monkeypatch.setattr(loading, "read_finetuned", lambda *_: (config, *rest))
    for content in (
        "a\tthe sun\tgood\n1\ta moon\tbad",
        "a\tthe sun\n1\ta moon",
        "review\tkey\nthe sun\ta\na moon\t1",
    ):
        found = predict("one", content, "a.tsv")
        assert [(line["id"], line["review"]) for line in found] == [
            ("a", "the sun"), ("1", "a moon"),
        ]  # fmt: skip
    assert predict("one", "1\ta moon", "a.tsv")[0]["review"] == "a moon"  # not a header


def test_ids_by_number_in_lists(models, predict, monkeypatch):
    config, *rest = loading.read_finetuned(str(models["one"]), None)
    config = replace(config, {"task.id": "-1", "outputs.columns": ("0",), "task.texts": ("0",)})
    monkeypatch.setattr(loading, "read_finetuned", lambda *_: (config, *rest))
    found = predict("one", '[["the sun", "a"], ["a moon", "b"]]', "a.json")
    assert [(line["id"], line["0"]) for line in found] == [("a", "the sun"), ("b", "a moon")]


@pytest.mark.parametrize("columns", [("words", "tag"), ("words", "pos", "tag"), ()])
def test_words_without_tags(models, predict, monkeypatch, columns):
    """A tagger trained on column files also reads words without tags."""
    config, *rest = loading.read_finetuned(str(models["tags"]), None)
    own = {"task.columns": columns, "task.label": "tag", "task.train": "train.conll"}
    word = columns[:1] or ("0",)
    config = replace(config, own | {"outputs.columns": word, "task.texts": word})
    monkeypatch.setattr(loading, "read_finetuned", lambda *_: (config, *rest))
    for width in {1, len(columns) - 1, len(columns)} - {-1, 0}:
        rows = [(word, *"xy"[: width - 1]) for word in ("the", "sun")]
        content = "\n".join(map(" ".join, rows)) + "\n\nmoon x y"[: 4 + 2 * width]
        found = predict("tags", content, "a.conll")
        assert [line[word[0]] for line in found] == [["the", "sun"], ["moon"]]
    found = predict("tags", b"the\n\nsun\n\xff\n", "a.conll")
    assert [line["id"] for line in found] == [0, 1]
    assert found[1]["error"].startswith("line 3 ")
    assert "0xFF" in found[1]["error"]
    if columns:
        with refused(DataError, 4, len(columns), "words"):
            predict("tags", "the a b c\n", "a.conll")


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.json"])
def test_what_is_too_deep_to_be_written(predict, name):
    """Nesting of 100 or more levels is an error of its row; 99 levels are copied."""
    rows = [f'{{"text": "sun", "x": {"[" * depth}{"]" * depth}}}' for depth in (99, 100, 700)]
    content = f"[{','.join(rows)}]" if name == "in.json" else "\n".join(rows)
    found = predict("one", content, name)
    assert json.dumps(found[0]["x"]) == "[" * 99 + "]" * 99
    for line in found[1:]:
        assert "100" in line["error"]


def test_text_is_not_taken_for_json(predict, caplog):
    texts = ["{the sun", "{}", '{"rev": 1}', "[1]", '"moon"', "{{a}} moon", "null", "{'text': 1}"]
    found = predict("one", "\n".join(texts))
    assert [line["texts"] for line in found] == [[text] for text in texts]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_as_many_columns_as_the_model_reads(predict):
    with refused(ConfigError, 2, "said", "meant", field="texts", value=1):
        predict("pair", "a\tb", texts=("said",))


def test_each_row_has_its_answer(predict, caplog):
    """A bad line neither stops the prediction nor shifts later answers."""
    lines = [b"the sun", b"", b"caf\xe9", b'{"texts": 5}', b'{"text": "x', b"  ", b"a moon", b""]
    with caplog.at_level(logging.WARNING):
        found = predict("one", b"\n".join(lines) + b"\n")
    assert [line["id"] for line in found] == list(range(8))
    assert [line.get("texts") for line in found] == [["the sun"], *[None] * 5, ["a moon"], None]
    says = {
        1: ("line 2 ",),
        2: ("line 3 ", "byte 3", "0xE9"),
        3: ("line 4 ", "int", "texts"),
        4: ("line 5 ", "JSON"),
        7: ("line 8 ",),
    }
    for number, parts in says.items():
        assert all(part in found[number]["error"] for part in parts)
    (warning,) = [r.getMessage() for r in caplog.records if "line 2" in r.getMessage()]
    assert "6 of 8" in warning
    alone = predict("one", "a moon")
    assert found[6]["probabilities"] == pytest.approx(alone[0]["probabilities"])


def test_an_empty_line_of_json_lines_is_called_that(predict):
    found = predict("one", '{"text": "sun"}\n \n{"text": "a\\ud800"}\n5', "a.jsonl")
    starts = [line.get("error", "")[:6] for line in found]
    assert starts == ["", "line 2", "line 3", "line 4"]


@pytest.mark.parametrize("name", MODELS)
def test_half_of_a_surrogate_pair_stops_no_other_row(name, models):
    model = convbert_jax.load(models[name])
    good = {"tags": ["a"], "one": "a"}.get(name, ("a", "b"))
    bad = {"tags": ["a", "\ud800"], "one": "\ud800"}.get(name, ("a", "\ud800"))
    others = dict(zip(("said", "meant"), ("a", "b"), strict=True)) | {"note": [{"a": "\ud800"}]}
    found = model.predict([bad, good, {"texts": ["\udc7f", "a"], "note": "b"}, others])
    assert "prediction" in found[1]
    assert found[1]["prediction"] == model.predict([good])[0]["prediction"]
    assert "line 1" in found[0]["error"]
    assert "character 0" in found[0]["error"]
    assert ["error" in line for line in found] == [True, False, True, True]
    json.dumps(found, ensure_ascii=False).encode("utf-8")  # can be serialized


def test_a_context_without_a_token_stops_no_other(predict):
    """Uses a zero-width space: Python does not strip it, and the vocabulary drops it."""
    found = predict("answers", "the sun\ta moon\nthe sun\t\u200b\n\u200b\tover\nthe sun\ta moon")
    starts = [line.get("error", "")[:6] for line in found]
    assert starts == ["", "line 2", "line 3", ""]
    assert found[0]["probabilities"] == pytest.approx(found[3]["probabilities"])


def test_rows_of_a_table_keep_their_numbers(predict):
    found = predict("one", "review,x\nsun,1\n,2\nmoon,3,4\ntree,5\n", "a.csv")
    assert [(line["id"], line.get("review")) for line in found] == [
        (0, "sun"), (1, None), (2, None), (3, "tree"),
    ]  # fmt: skip
    assert found[1]["error"].startswith("line 3 ")
    assert found[1]["x"] == "2"
    assert found[2]["error"].startswith("line 4 has 3 ")


def test_nothing_that_can_be_predicted_is_an_error(predict, tmp_path):
    for content, place in (("", "in.txt"), ("\n\n", "line 1")):
        with refused(DataError, place):
            predict("one", content)
        assert not (tmp_path / "out.jsonl").exists()
    with refused(DataError, "line 1"):
        predict("pair", "the sun\na moon")
    with refused(DataError, "review", "a, b"):
        predict("one", "a,b\n1,2\n", "a.csv")


def test_doubled_ids_are_told(predict, caplog):
    lines = ['{"id": 5, "text": "sun"}', '{"id": 6, "text": "sun"}', '{"id": 5, "text": "sun"}']
    predict("one", "\n".join([*lines, "plain", "plain"]))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(part in warning for part in ("line 3", "line 1", "5"))


def test_packed_files(predict, tmp_path):
    plain = predict("one", "the sun\na moon\n")
    assert predict("one", gzip.compress(b"the sun\na moon\n"), "in.txt.gz", "out.jsonl.gz") == plain
    for broken in (b"the sun\n", gzip.compress(b"the sun\n" * 999)[:30], b""):
        with refused(DataError, "in.txt.gz"):
            predict("one", broken, "in.txt.gz")
