"""Tables of labeled text: the rows read from each format, and the locations in errors."""

import csv
import gzip
import io
import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers.rows import FORMATS, BadRows, TableFormat, read_table
from convbert_jax.data.tasks.own_task import open_task
from tests.refusals import refused


def write(folder, name, text, encoding="utf-8"):
    data = text if isinstance(text, bytes) else text.encode(encoding)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(folder, train, **fields):
    """Return (texts, label or tag names) of each row."""
    section = TaskSection(folder=str(folder), train=train, heldout_fraction=0.0, **fields)
    task = open_task(section)

    def name(label):
        return " ".join(map(name, label)) if isinstance(label, tuple) else task.labels[label]

    return [(*example.texts, name(example.label)) for example in task.read("train")]


def as_csv(rows):
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = [("good film", "yes"), ('a "bad" one, really', "no"), ("so so", "no")]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]
NESTED = [{"data": {"text": text, "gold": {"label": label}}} for text, label in ROWS[:2]]
NESTED += [{"data": {"text": "x", "gold": {"label": "no"}}, "data.text": "so so"}]
DOTS = {"texts": ("data.text",), "label": "data.gold.label"}
LONG = ("word " * 40_000).strip()
TAGS = {"kind": "tagging"}
GERMEVAL = """#\thttp://example.org/x [2009-10-17]
1\tIn\tO\tO
2\tBonn\tB-LOC\tO

#\thttp://example.org/y [2009-10-18]
1\tTroia\tB-OTH\tB-LOC
2\t-\tI-OTH\tO

"""
GERMAN = [("In Bonn", "O B-LOC"), ("Troia -", "B-OTH I-OTH")]
GERMAN_FIELDS = TAGS | {"format": "conll", "texts": ("1",), "label": "2"}
CONLLU = """# newdoc id = a
# sent_id = a-1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\tGloss=to go
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tir\tir\tVERB\t_\t_\t_\t_\t1:conj\t_
3\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_

# sent_id = a-2
0.1\tes\tser\tAUX\t_\t_\t_\t_\t0:root\t_
1\tSí\tsí\tINTJ\t_\t_\t0\troot\t_\t_
"""
CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\nLovelace NNP I-PER\nwrote VBD O\n\nLondon NNP B-LOC\n"
ADA = [("Ada Lovelace wrote", "B-PER I-PER O"), ("London", "B-LOC")]
NAMED = "EU NNP B-ORG\nrejects VBZ O\n"


@pytest.mark.parametrize(("name", "text", "fields", "rows"), [
    ("a.tsv", "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS), {}, ROWS),
    ("a.tsv.gz", "label\tother\ttext\n" + "".join(f"{y}\t-\t{x}\n" for x, y in ROWS), {}, ROWS),
    ("a.tsv", "1\tp\tone\tmore\n0\tq\ttwo\n", {
        "columns": ("label", "name", "text"), "rest_in_last": True, "id": "name",
    }, [("one\tmore", "1"), ("two", "0")]),
    ("a.tsv", "1\tp\tone\n0\tq\ttwo\n", {
        "columns": ("label", "name", "text"), "texts": ("-1",), "label": "0",
    }, [("one", "1"), ("two", "0")]),
    ("a.tsv", "text\tlabel\nx\t1\ny\t0\n", {"labels": ("0=bad", "1=good")},
     [("x", "good"), ("y", "bad")]),
    ("a[b].tsv", "text\tlabel\nx\ta\ny\tb\n", {}, [("x", "a"), ("y", "b")]),
    ("c.csv", as_csv([("text", "label"), *ROWS]), {}, ROWS),
    ("windows.csv", "\ufeff" + as_csv([("text", "label"), *ROWS]), {}, ROWS),
    ("blank.csv", f"\ntext,label\n\nx,a\n\n\n{LONG},b\n\n", {}, [("x", "a"), (LONG, "b")]),
    ("d.jsonl", as_jsonl(OBJECTS), {}, ROWS),
    ("d.ndjson", as_jsonl(OBJECTS), {}, ROWS),
    ("d.json", as_jsonl(OBJECTS), {"format": "jsonl"}, ROWS),
    ("e.json", json.dumps(OBJECTS), {}, ROWS),
    ("f.json#train", json.dumps({"train": OBJECTS, "x": []}, indent=1), {}, ROWS),
    ("g.json", json.dumps(ROWS), {"texts": ("0",), "label": "1"}, ROWS),
    ("nested.jsonl", as_jsonl(NESTED), DOTS, ROWS),
    ("nested.json", json.dumps(NESTED), DOTS, ROWS),
    ("bool.jsonl", as_jsonl([{"text": "a", "label": True}, {"text": "b", "label": False}]), {},
     [("a", "true"), ("b", "false")]),
    ("p.txt", "1 x y\n0 z\n", {"format": "pattern", "pattern": "(?P<label>.) (?P<text>.+)"},
     [("x y", "1"), ("z", "0")]),
    ("a.conll", CONLL, TAGS, ADA),
    ("a.jsonl", as_jsonl({"text": w.split(), "label": t.split()} for w, t in ADA), TAGS, ADA),
    ("germeval.tsv", GERMEVAL, GERMAN_FIELDS, GERMAN),
    ("blanks.tsv", GERMEVAL.replace("\t", " ").replace("#", "# sent_id ="), GERMAN_FIELDS, GERMAN),
    ("crlf.tsv.gz", GERMEVAL.replace("\n", "\r\n"), GERMAN_FIELDS, GERMAN),
    ("a.conllu", CONLLU, TAGS, [("Vamos nos mar", "VERB PRON NOUN"), ("Sí", "INTJ")]),
    ("a.conll", NAMED, TAGS, [("EU rejects", "B-ORG O")]),
    ("a.conll", NAMED, TAGS | {"label": "1"}, [("EU rejects", "NNP VBZ")]),
    ("a.conll", NAMED, TAGS | {"columns": ("text", "label", "ner")}, [("EU rejects", "NNP VBZ")]),
    ("a.conll", NAMED, TAGS | {"columns": ("text", "pos", "ner"), "label": "ner"},
     [("EU rejects", "B-ORG O")]),
    # Words that look like comments, numbers and ranges.
    ("a.conll", "#\tO\nParis\tB-LOC\n", TAGS, [("# Paris", "O B-LOC")]),
    ("a.conll", "# O\n#one B-TAG\nParis O\n", TAGS, [("# #one Paris", "O B-TAG O")]),
    ("a.conll", "Paris O\n# B-X\n", TAGS, [("Paris #", "O B-X")]),
    ("a.conll", "# source of it\n\n#\tO\nParis\tB-X\n", TAGS, [("# Paris", "O B-X")]),
    ("a.conll", "# source\n#\tO\nParis\tB-X\n", TAGS, [("# Paris", "O B-X")]),
    ("a.conll", "2-3 CD O\n1.5 CD B-X\n", TAGS, [("2-3 1.5", "O B-X")]),
    ("a.conll", "1 CD O\n2-3 CD B-X\n", TAGS, [("1 2-3", "O B-X")]),
    ("a.conll", "1 O\n1-2 B-X\n", TAGS, [("1 1-2", "O B-X")]),
    ("a.conll", "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\n6-4 CD I-NP O\n", TAGS,
     [("EU 6-4", "B-ORG O")]),
    ("a.conll", "a\t\tO\nbc\tB-X\n", TAGS, [("a bc", "O B-X")]),
], ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "")  # fmt: skip
def test_rows(name, text, fields, rows, tmp_path):
    write(tmp_path, name.partition("#")[0], text)
    assert read(tmp_path, name, **fields) == rows


def test_several_files(tmp_path):
    """Files with one column each, concatenated files, and globs."""
    for name, text in (("s1", "a b \nc\n"), ("s2.gz", "d\ne \n"), ("y", "no\nyes\n")):
        write(tmp_path, name, text)
    fields = {"format": "parallel", "columns": ("one", "two", "label"), "texts": ("one", "two")}
    assert read(tmp_path, "s1,s2.gz,y", **fields) == [("a b", "d", "no"), ("c", "e", "yes")]
    write(tmp_path, "y", "no\n")
    with refused(DataError, path=tmp_path / "y", line=2):
        read(tmp_path, "s1,s2.gz,y", labels=("no", "yes"), **fields)
    write(tmp_path, "p1.tsv", "text\tlabel\nx\tno\n")
    write(tmp_path, "p2.tsv", "text\tlabel\ny\tyes\n")
    for train in ("p1.tsv,p2.tsv", "p?.tsv"):
        assert read(tmp_path, train) == [("x", "no"), ("y", "yes")]


HEADER = "text\tlabel\n"
PATTERN = {"format": "pattern", "pattern": "(?P<label>[0-9]) (?P<text>.*)"}
WORDS = TAGS | {"labels": ("O", "B-X")}


@pytest.mark.parametrize(("name", "text", "fields", "line", "mentions"), [
    ("a.tsv", "body\tlabel\nx\ta\n", {}, None, ["'text'", "body, label", "config.task.texts"]),
    ("a.tsv", HEADER + "x\ta\ny\ta\tb\n", {}, 3, [3, 2]),
    ("a.tsv", HEADER + "x\ta\n \tb\n", {}, 3, ["'text'"]),
    ("a.tsv", HEADER + "x\t\n", {}, 2, ["'label'"]),
    ("a.tsv", HEADER + "x\tc\n", {"labels": ("a", "b")}, 2, ["'c'", "a, b"]),
    ("a.tsv", HEADER + "x\ta\n\ny\tb\n", {}, 3, [1, 2]),
    ("a.tsv", "", {}, None, []),
    ("a.tsv", HEADER, {}, None, []),
    ("a.tsv", "1\tx\ty\n", {"columns": ("label", "text")}, 1, [3, 2]),
    ("a.tsv", HEADER + "x\ta\ny\tb\n", {"columns": ("text", "label")}, 1, ["text, label"]),
    ("a.tsv", "text,label\nx\n", {}, None, ["commas"]),
    ("a.tsv", (HEADER + "naïve\ta\n").encode("latin-1"), {}, 2, ["utf-8", 2, "0xEF"]),
    ("a.tsv", (HEADER + "x\ta\n").encode("utf-16"), {}, None, ["UTF-16"]),
    ("a.tsv", HEADER + "x\ta\n", {"encoding": "latin-x"}, None, ["'latin-x'"]),
    ("a.tsv.gz", None, {}, None, []),
    ("a.csv", "text;label\nx\n", {}, None, ["';'"]),
    ("a.csv", "text\tlabel\nx\n", {}, None, ["tabs"]),
    ("a.csv", "body\nx\n", {}, None, ["config.task.texts", "config.task.label"]),
    ("a.csv", "text,label\na,b\nhello, world,a\n", {}, 3, [3, 2]),
    ("a.csv", "text,label,label\na,b,c\n", {}, None, ["'label'"]),
    ("a.csv", 'text,label\n"x,a\n', {}, 2, []),
    ("a.csv", 'text,label\nx,a\n"y\nz",b\n"v,b\nw,a\n', {"bad_rows": "skip"}, 5, []),
    ("a.jsonl", '{"text": "x"}\n', {}, 1, ["'label'", "text"]),
    ("a.jsonl", '{"text": 3, "label": "a"}\n', {}, 1, ["int", "'text'"]),
    ("a.jsonl", '{"text": "x", "label": "a"}\n{"text": \n', {}, 2, []),
    ("a.jsonl", '[\n{"text": "x"}\n', {}, 1, []),
    ("a.jsonl", "[1]\n", {}, 1, []),
    ("a.jsonl", '{"text": "x", "label": ["2"]}\n', {}, 1, ["list", "'label'"]),
    ("a.jsonl", '{"text": "x", "label": NaN}\n', {}, 1, ["'label'"]),
    ("a.jsonl", '{"text": "x", "label": "\\ud800"}\n', {}, 1, []),
    ("a.jsonl", json.dumps(OBJECTS, indent=1), {}, 1, ["json"]),
    ("a.jsonl", as_jsonl(NESTED), DOTS | {"texts": ("data.body",)}, 1,
     ["'data.body'", "data.text, data.gold.label"]),
    ("a.jsonl", '{"text": "x", "lab": "1"}\n', {"bad_rows": "skip"}, None, ["'label'", "line 1"]),
    ("a.json", '{"rows": []}', {}, None, ["FILE#KEY", "rows"]),
    ("a.json#no", '{"rows": []}', {}, None, ["'no'", "rows"]),
    ("a.json", "[", {}, None, []),
    ("a.json", "", {}, None, []),
    ("a.json", "[]", {}, None, []),
    ("a.json", "[5]", {}, None, []),
    ("a.json", '["a"]', {}, None, []),
    ("a.json", '[{"text": "x", "label": "a"}, 5]', {}, 2, []),
    ("a.json", '[["x", "a"], 5]', {"columns": ("text", "label")}, 2, []),
    ("a.json", as_jsonl(OBJECTS), {}, None, ["jsonl"]),
    ("a.txt", "x", {}, None, ["config.task.format", "tsv, csv"]),
    ("a.txt", "1:x\n", PATTERN, 1, []),
    ("a.txt", "1 x\n", {"format": "pattern", "pattern": "("}, None, []),
    ("a.jsonl", '{"text": ["a", "b"], "label": ["O"]}\n', WORDS, 1, [1, 2]),
    ("a.jsonl", '{"text": ["a b"], "label": ["O"]}\n', WORDS, 1, ["'a b'", "'text'"]),
    ("a.jsonl", '{"text": "a b", "label": ["O", "O"]}\n', WORDS, 1, ["'text'"]),
    ("a.jsonl", '{"text": [], "label": []}\n', WORDS, 1, ["'text'"]),
    ("a.jsonl", '{"text": ["a"], "label": "O"}\n', WORDS, 1, ["'label'"]),
    ("a.jsonl", '{"text": ["a"], "label": ["B-Y"]}\n', WORDS, 1, ["'B-Y'", "O, B-X"]),
    ("a.conll", "a O\nb\n", WORDS, 2, [1, 2]),
    ("a.conll", "a O\n# of a source\nb B-X\n", TAGS, 2, []),
    ("a.conll", NAMED, TAGS | {"columns": ("text", "pos", "ner")}, None, ["'label'"]),
    ("a.conll", NAMED, TAGS | {"columns": ("text", "label")}, None, [3, 2]),
], ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "")  # fmt: skip
def test_faults(name, text, fields, line, mentions, tmp_path):
    """Also without configured labels, where labels are collected from the rows."""
    text = gzip.compress(HEADER.encode() * 99)[:20] if text is None else text
    path = tmp_path / name.partition("#")[0]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    by_config = {"encoding", "pattern"} & set(fields) and not line  # no file is invalid
    for labels in [fields["labels"]] if "labels" in fields else [(), ("a", "b")]:
        with refused(DataError, *mentions, path=None if by_config else path, line=line) as caught:
            read(tmp_path, name, **fields | {"labels": labels})
        assert "\n" not in str(caught.value)


def test_a_pattern_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("convbert_jax.data.readers.rows.MATCHING_SECONDS", 0.2)
    path = write(tmp_path, "rows.txt", "x a\n" + "y " + "a" * 60 + "!\n")
    begun = time.perf_counter()
    with refused(DataError, path=path, line=2):
        read(tmp_path, path.name, format="pattern", pattern="(?P<label>.) (?P<text>(a|aa)+)$")
    assert time.perf_counter() - begun < 20


# --- Properties ---

cells = st.text(st.characters(exclude_characters="\t\r\n", exclude_categories=["Cs"]), max_size=8)
any_cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8)
tokens = st.tuples(st.sampled_from(["#", "##x", "1", "2-3", "1.1", "a"]), st.just("O"))
sentences = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4)


def read_values(path, names):
    form = TableFormat(path.name.split(".")[1])
    return list(read_table(path, names, form, BadRows(path, "error")))


@settings(max_examples=60)
@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8))
def test_tsv_round_trip(tmp_path_factory, rows):
    """A row's first cell may not be blank; its last cell keeps trailing white space."""
    rows = [(f"x{a}", b, f"{c}x") for a, b, c in rows]
    text = "a\tb\tc\n" + "".join("\t".join(row) + "\r\n" for row in rows)
    path = write(tmp_path_factory.mktemp("tsv"), "a.tsv.gz", text)
    expected = [(n, (c, a, b)) for n, (a, b, c) in enumerate(rows, start=2)]
    assert read_values(path, ("c", "a", "b")) == expected


@settings(max_examples=60)
@given(st.lists(st.tuples(any_cell, any_cell), min_size=1, max_size=8))
def test_csv_round_trip(tmp_path_factory, rows):
    """Cells may contain quotes, separators and line breaks."""
    rows = [(f"x{a}", f"{b}x") for a, b in rows]
    path = write(tmp_path_factory.mktemp("csv"), "a.csv", as_csv([("a", "b"), *rows]))
    assert [values for _, values in read_values(path, ("a", "b"))] == rows


@settings(max_examples=60)
@given(sentences, st.sampled_from("\t "))
def test_conll_round_trip(tmp_path_factory, sentences, separator):
    """A file with only words and tags has no comments or numbers."""
    text = "\n".join("".join(f"{separator.join(w)}\n" for w in words) for words in sentences)
    path = write(tmp_path_factory.mktemp("conll"), "a.conll", text)
    found = read_values(path, ("0", "-1"))
    assert [[*zip(*columns, strict=True)] for _, columns in found] == sentences


# --- Any content: usable examples or a one-line error, never a traceback ---

ROW = b'{"text": "a", "label": "x"}\n'
CONTENTS = [
    b"",
    b"\n \n",
    ROW + b'{"text": "\\ud800", "label": "y"}\n',  # unpaired surrogate
    ROW + b'{"text": "a", "label": "\\ud800"}\n',
    ROW + b'{"text": "a", "label": "y", "\\udfff": 1}\n',
    b"[" * 99_999,
    b'{"a":' * 99_999,
    b'{"text": "a", "label": ' + b"9" * 5_000 + b"}\n",
    b"5",
    b"null\n5\n",
    b'"x"\n',
    b"[1, 2]\n",
    b'{"data": 5}',
    b'{"text": 5, "label": "x"}\n{"text": "b", "label": "y"}\n',
    b'{"text": {"a": 1}, "label": [1]}\n',
    b'{"text": ["a", "b"], "label": 5}\n',
    b'{"text": ["a"], "label": {"q": 1}}\n',
    b'{"text": ["a", "b"], "label": ["x", null]}\n',
    b'{"text": "a", "label": 1e999}\n{"text": "b", "label": NaN}\n',
    b"[5, 6]",
    b'["ab", "cd"]',
    b"[null]",
    b"[[]]",
    b'[["a", "x"], ["b", "y"], {"text": 1}]',
    b'[{"text": "a", "label": "x"}, 5]',
    b'text,label\n"a,x\n' + b"b,y\n" * 9,
    b"text,label\na\x00,x\nb,y\n",
    b"\x1f\x8b\x08\x00broken",
    "text,label\na,x\n".encode("utf-16"),
    b"text,label\na,\xff\n",
    b"text,label\ra,x\rb,y\r",
    b"EU\nrejects O\n",
    b"EU B-ORG\nrejects O\n\n",
    b"text,label\n" + b"a" * 1_000_000 + b",x\nb,y\n",
]
KINDS = (
    ("classification", "", "error"),
    ("regression", ".gz", "skip"),
    ("tagging", "", "skip"),
    ("tagging", ".gz", "error"),
)


@pytest.mark.parametrize("form", FORMATS)
def test_any_content(tmp_path, form):
    for content, (kind, ending, bad_rows) in itertools.product(CONTENTS, KINDS):
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
        assert 0 < len(message) < 600 + len(str(path)), content
        assert "\n" not in message, content
