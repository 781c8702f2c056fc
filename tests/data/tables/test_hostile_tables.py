"""Labelled files of any content: examples that can be used, or one sentence; never a traceback."""

import gzip
import time

import pytest

from convbert_jax.config import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.table_formats import FORMATS
from convbert_jax.data.tables.text_lines import decode_lines
from convbert_jax.data.tasks.own_task import open_task

ROW = b'{"text": "a", "label": "x"}\n'
CONTENTS = {
    "empty": b"",
    "blank": b"\n \n",
    "half a surrogate pair in a text": ROW + b'{"text": "\\ud800", "label": "y"}\n',
    "half a surrogate pair in a label": ROW + b'{"text": "a", "label": "\\ud800"}\n',
    "half a surrogate pair in a name": ROW + b'{"text": "a", "label": "y", "\\udfff": 1}\n',
    "deep lists": b"[" * 99_999,
    "deep objects": b'{"a":' * 99_999,
    "long number": b'{"text": "a", "label": ' + b"9" * 5_000 + b"}\n",
    "a number": b"5",
    "null": b"null\n5\n",
    "a string": b'"x"\n',
    "a list": b"[1, 2]\n",
    "an object in the place of a list": b'{"data": 5}',
    "a number as text": b'{"text": 5, "label": "x"}\n{"text": "b", "label": "y"}\n',
    "an object as text": b'{"text": {"a": 1}, "label": [1]}\n',
    "a number for tags": b'{"text": ["a", "b"], "label": 5}\n',
    "an object for tags": b'{"text": ["a"], "label": {"q": 1}}\n',
    "null among tags": b'{"text": ["a", "b"], "label": ["x", null]}\n',
    "infinity": b'{"text": "a", "label": 1e999}\n{"text": "b", "label": NaN}\n',
    "a list of numbers": b"[5, 6]",
    "a list of texts": b'["ab", "cd"]',
    "a list of null": b"[null]",
    "a list of nothing": b"[[]]",
    "lists and objects": b'[["a", "x"], ["b", "y"], {"text": 1}]',
    "objects and numbers": b'[{"text": "a", "label": "x"}, 5]',
    "an open quotation": b'text,label\n"a,x\n' + b"b,y\n" * 9,
    "NUL": b"text,label\na\x00,x\nb,y\n",
    "not gzip": b"\x1f\x8b\x08\x00broken",
    "UTF-16": "text,label\na,x\n".encode("utf-16"),
    "not UTF-8": b"text,label\na,\xff\n",
    "only carriage returns": b"text,label\ra,x\rb,y\r",
    "one column of words": b"EU\nrejects O\n",
    "words": b"EU B-ORG\nrejects O\n\n",
    "long line": b"text,label\n" + b"a" * 3_000_000 + b",x\nb,y\n",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("form", FORMATS)
def test_any_content(tmp_path, form, content):
    for kind, ending, bad_rows in (
        ("classification", "", "error"),
        ("regression", ".gz", "skip"),
        ("tagging", "", "skip"),
        ("tagging", ".gz", "error"),
    ):
        path = tmp_path / f"rows{ending}"
        path.write_bytes(content)
        section = TaskSection(
            kind=kind,
            format=form,
            train=str(path),
            test=str(path),
            columns=() if form in ("tsv", "csv", "jsonl") else ("text", "label"),
            pattern=r"(?P<text>.*)[, ](?P<label>.*)",
            bad_rows=bad_rows,
        )
        message = "one line"
        try:
            task = open_task(section)
            for split in ("train", "validation", "test"):
                for example in task.read(split):
                    "".join((example.id, *example.texts)).encode("utf-8")
        except DataError as error:
            message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 600 + len(str(path))


def read(path, **fields):
    section = TaskSection(train=str(path), heldout_fraction=0.0, labels=("x", "y"), **fields)
    return open_task(section).read("train")


def test_fields_of_csv_may_be_long(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "word " * 40_000 + ",x\n")
    assert len(read(path)[0].texts[0]) == 199_999


def test_a_pattern_without_end_is_stopped(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("x a\n" + "y " + "a" * 60 + "!\n")
    begun = time.perf_counter()
    with pytest.raises(DataError, match=r"line 2: pattern .* finds no end in 2 s"):
        read(path, format="pattern", pattern="(?P<label>.) (?P<text>(a|aa)+)$")
    assert time.perf_counter() - begun < 20
    fine = read(path, format="pattern", pattern="(?P<label>.) (?P<text>.+)")
    assert [example.label for example in fine] == [0, 1]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"rows\.txt cannot be read: No such file"):
        list(decode_lines(tmp_path / "rows.txt", "utf-8"))


def test_a_file_that_is_no_gzip(tmp_path):
    path = tmp_path / "rows.csv.gz"
    path.write_text("text,label\na,x\n")
    with pytest.raises(DataError, match=r"rows\.csv\.gz is a damaged gzip file"):
        read(path)
    path.write_bytes(gzip.compress(b"text,label\na,x\n"))
    assert read(path)[0].texts == ("a",)
