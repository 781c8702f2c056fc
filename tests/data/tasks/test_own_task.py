"""Tasks of one's own: every format, every fault in one sentence, and the real data sets."""

import csv
import dataclasses
import gzip
import io
import json
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.public_data import TEXT_FOLDERS
from convbert_jax.config.own_task import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.table_files import read_table
from convbert_jax.data.tables.table_formats import BadRows, TableFormat
from convbert_jax.data.tasks import own_rows
from convbert_jax.data.tasks.labelled_text import require_labels
from convbert_jax.data.tasks.own_task import open_task


def section(folder, **fields) -> TaskSection:
    return TaskSection(name="toy", folder=str(folder), **fields)


def write(folder, name, text, encoding="utf-8"):
    data = text.encode(encoding)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def read(folder, split="train", **fields):
    return open_task(section(folder, **fields)).read(split)


# --- Formats ---

ROWS = [("good film", "yes"), ('a "bad" one, really', "no"), ("so so", "no")]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]


def as_csv(rows):
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


FILES = {
    "a.tsv": "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS),
    "b.tsv.gz": "label\tother\ttext\n" + "".join(f"{y}\t-\t{x}\n" for x, y in ROWS),
    "c.csv": as_csv([("text", "label"), *ROWS]),
    "windows.csv": "\ufeff" + as_csv([("text", "label"), *ROWS]),
    "d.jsonl": "".join(json.dumps(row) + "\n" for row in OBJECTS),
    "e.json": json.dumps(OBJECTS),
    "f.json": json.dumps({"train": OBJECTS, "x": []}, indent=1),
}


@pytest.mark.parametrize("name", FILES)
def test_formats(tmp_path, name):
    write(tmp_path, name, FILES[name])
    train = f"{name}#train" if name == "f.json" else name
    task = open_task(section(tmp_path, train=train, heldout_fraction=0.0))
    assert task.labels == ("no", "yes")
    assert task.metrics == ("accuracy", "macro_f1")
    assert not task.has("validation")
    examples = pickle.loads(pickle.dumps(task)).read("train")
    assert [(example.texts[0], task.labels[example.label]) for example in examples] == ROWS
    assert [example.id for example in examples] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_nested_columns(tmp_path, name):
    """A column with a dot in its name comes before a field of another column."""
    rows = [{"data": {"text": text, "gold": {"label": label}}} for text, label in ROWS]
    rows[2]["data.text"] = "another text"
    document = json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows))
    write(tmp_path, name, document)
    fields = {"texts": ("data.text",), "label": "data.gold.label", "heldout_fraction": 0.0}
    task = open_task(section(tmp_path, train=name, **fields))
    texts = [*(text for text, _ in ROWS[:2]), "another text"]
    assert [example.texts[0] for example in task.read("train")] == texts
    assert [task.labels[example.label] for example in task.read("train")] == ["yes", "no", "no"]
    with pytest.raises(DataError, match=r"'data\.body' \(it has: data\.text, data\.gold\.label\)"):
        read(tmp_path, train=name, **fields | {"texts": ("data.body",)})


def test_columns_without_a_header(tmp_path):
    write(tmp_path, "a.tsv", "1\tp\tone\tmore\n0\tq\ttwo\n")
    fields = {"columns": ("label", "name", "text"), "rest_in_last": True, "heldout_fraction": 0.0}
    examples = read(tmp_path, train="a.tsv", id="name", **fields)
    assert [example.texts[0] for example in examples] == ["one\tmore", "two"]
    assert [example.id for example in examples] == ["p", "q"]
    numbers = read(tmp_path, train="a.tsv", **fields | {"texts": ("-1",), "label": "0"})
    assert [example.texts for example in numbers] == [example.texts for example in examples]


def test_labels_with_names_of_their_own(tmp_path):
    write(tmp_path, "a.tsv", "text\tlabel\nx\t1\ny\t0\n")
    task = open_task(
        section(tmp_path, train="a.tsv", labels=("0=bad", "1=good"), heldout_fraction=0.0)
    )
    assert task.labels == ("bad", "good")
    assert task.spellings == ("0", "1")
    assert [example.label for example in task.read("train")] == [1, 0]


def test_json_labels_are_text(tmp_path):
    lines = [{"text": "a", "label": True}, {"text": "b", "label": False}]
    write(tmp_path, "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    task = open_task(section(tmp_path, train="a.jsonl"))
    assert task.labels == ("false", "true")


def test_pairs_from_parallel_files_and_two_parts(tmp_path):
    write(tmp_path, "s1", "a b \nc\n")
    write(tmp_path, "s2.gz", "d\ne \n")
    write(tmp_path, "y", "no\nyes\n")
    fields = {"format": "parallel", "columns": ("one", "two", "label"), "texts": ("one", "two")}
    task = open_task(section(tmp_path, train="s1,s2.gz,y", heldout_fraction=0.0, **fields))
    assert task.texts == 2
    assert [example.texts for example in task.read("train")] == [("a b", "d"), ("c", "e")]
    write(tmp_path, "y", "no\n")
    with pytest.raises(DataError, match="y ends before line 2, where the others go on"):
        read(tmp_path, train="s1,s2.gz,y", labels=("no", "yes"), **fields)

    write(tmp_path, "p1.tsv", "text\tlabel\nx\tno\n")
    write(tmp_path, "p2.tsv", "text\tlabel\ny\tyes\n")
    for train in ("p1.tsv,p2.tsv", "p?.tsv"):
        both = read(tmp_path, train=train, heldout_fraction=0.0)
        assert [(example.id, example.texts[0]) for example in both] == [("0", "x"), ("1", "y")]


def test_regression(tmp_path):
    write(tmp_path, "a.tsv", "one\ttwo\tscore\na\tb\t4.5\nc\td\t1\n")
    fields = {"kind": "regression", "texts": ("one", "two"), "label": "score", "scale": 5.0}
    task = open_task(section(tmp_path, train="a.tsv", heldout_fraction=0.0, **fields))
    assert task.labels == ()
    assert task.metrics == ("spearman", "pearson")
    assert task.scale == 5.0
    assert [example.label for example in task.read("train")] == [4.5, 1.0]
    for value in ("high", "nan", "inf"):
        write(tmp_path, "a.tsv", f"one\ttwo\tscore\na\tb\t{value}\n")
        with pytest.raises(DataError, match=f"line 2 has the label '{value}', which is not a "):
            task.read("train")


CONLL = """-DOCSTART- -X- O

Ada NNP B-PER
Lovelace NNP I-PER
wrote VBD O

London NNP B-LOC
"""


def test_tagging(tmp_path):
    write(tmp_path, "a.conll", CONLL)
    words = [
        {"words": ["Ada", "Lovelace", "wrote"], "tags": ["B-PER", "I-PER", "O"]},
        {"words": ["London"], "tags": ["B-LOC"]},
    ]
    write(tmp_path, "b.jsonl", "".join(json.dumps(line) + "\n" for line in words))
    for name, texts, label in (("a.conll", "0", "-1"), ("b.jsonl", "words", "tags")):
        fields = {"kind": "tagging", "texts": (texts,), "label": label, "heldout_fraction": 0.0}
        task = open_task(section(tmp_path, train=name, **fields))
        assert task.labels == ("B-LOC", "B-PER", "I-PER", "O")
        assert task.metrics == ("span_f1", "accuracy")
        first, second = task.read("train")
        assert first.texts == ("Ada Lovelace wrote",)
        assert first.label == (1, 2, 3)
        assert second.label == (0,)


def test_tagging_faults(tmp_path):
    fields = {"kind": "tagging", "texts": ("w",), "label": "t", "labels": ("O", "B-X")}
    for line, words in (
        ({"w": ["a", "b"], "t": ["O"]}, "line 1 has 1 tags for 2 words"),
        ({"w": ["a b"], "t": ["O"]}, "line 1 has the word 'a b' in 'w', which is empty or has a"),
        ({"w": "a b", "t": ["O", "O"]}, "line 1 has no list of words in 'w'"),
        ({"w": [], "t": []}, "line 1 has no words in 'w'"),
        ({"w": ["a"], "t": "O"}, "line 1 has no list of tags in 't'"),
        ({"w": ["a"], "t": ["B-Y"]}, "has the label 'B-Y', which is not one of: O, B-X"),
    ):
        write(tmp_path, "a.jsonl", json.dumps(line) + "\n")
        with pytest.raises(DataError, match=words):
            read(tmp_path, train="a.jsonl", **fields)
    write(tmp_path, "a.conll", "a O\nb\n")
    with pytest.raises(DataError, match="line 2 has 1 columns instead of 2"):
        read(tmp_path, train="a.conll", **fields | {"texts": ("0",), "label": "1"})


# --- CoNLL: comments, CoNLL-U, columns without names ---

GERMEVAL = """#\thttp://example.org/x [2009-10-17]
1\tIn\tO\tO
2\tBonn\tB-LOC\tO

#\thttp://example.org/y [2009-10-18]
1\tTroia\tB-OTH\tB-LOC
2\t-\tI-OTH\tO

"""
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


def read_tags(folder, name, text, **fields):
    """Words and tags of each sentence."""
    write(folder, name, text)
    fields = {"kind": "tagging", "heldout_fraction": 0.0, "train": name, **fields}
    task = open_task(section(folder, **fields))
    return [
        (example.texts[0].split(" "), [task.labels[tag] for tag in example.label])
        for example in task.read("train")
    ]


def test_comments_of_germeval_are_no_words(tmp_path):
    sentences = [(["In", "Bonn"], ["O", "B-LOC"]), (["Troia", "-"], ["B-OTH", "I-OTH"])]
    for name, text in (
        ("germeval.tsv", GERMEVAL),
        ("blanks.tsv", GERMEVAL.replace("\t", " ").replace("#", "# sent_id =")),
        ("crlf.tsv.gz", GERMEVAL.replace("\n", "\r\n")),
    ):
        found = read_tags(tmp_path, name, text, format="conll", texts=("1",), label="2")
        assert found == sentences, name


def test_ranges_and_empty_nodes_of_conllu_are_no_words(tmp_path):
    found = read_tags(tmp_path, "a.conllu", CONLLU)  # FORM and UPOS by default
    assert found == [(["Vamos", "nos", "mar"], ["VERB", "PRON", "NOUN"]), (["Sí"], ["INTJ"])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#\tO\nParis\tB-LOC\n", ["#", "Paris"]),
        ("# O\n#one B-TAG\nParis O\n", ["#", "#one", "Paris"]),
        ("#a O\n#b B-X\n", ["#a", "#b"]),
        ("Paris O\n# B-X\n", ["Paris", "#"]),
        ("# source of it\n\n#\tO\nParis\tB-X\n", ["#", "Paris"]),
        ("# source\n#\tO\nParis\tB-X\n", ["#", "Paris"]),
        ("2-3 CD O\n1.5 CD B-X\n", ["2-3", "1.5"]),
        ("1 CD O\n2-3 CD B-X\n", ["1", "2-3"]),
        ("1 O\n1-2 B-X\n", ["1", "1-2"]),
        ("-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\n6-4 CD I-NP O\n", ["EU", "6-4"]),
        ("a\t\tO\nbc\tB-X\n", ["a", "bc"]),
    ],
)
def test_words_that_look_like_comments_and_ranges(tmp_path, text, words):
    """The words and the tags are the first and the last column by default."""
    assert [found for found, _ in read_tags(tmp_path, "a.conll", text)] == [words]


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["#", "##x", "#", "1", "2-3", "1.1", "a"]), st.just("O")),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from("\t "),
)
def test_conll_round_trip(tmp_path_factory, sentences, separator):
    """A file of words and tags alone has neither comments nor numbers."""
    path = tmp_path_factory.mktemp("conll") / "a.conll"
    rows = ("".join(f"{separator.join(row)}\n" for row in sentence) for sentence in sentences)
    write(path.parent, path.name, "\n".join(rows))
    found = list(read_table(path, ("0", "-1"), TableFormat("conll"), BadRows(path, "error")))
    assert [[*zip(*columns, strict=True)] for _, columns in found] == sentences


def test_a_comment_within_a_sentence_is_a_fault(tmp_path):
    with pytest.raises(DataError, match=r"a\.conll line 2 "):
        read_tags(tmp_path, "a.conll", "a O\n# of a source\nb B-X\n")


def test_columns_of_conll_that_are_named_stay(tmp_path):
    text = "EU NNP B-ORG\nrejects VBZ O\n"
    for fields, tags in (
        ({}, ["B-ORG", "O"]),
        ({"label": "1"}, ["NNP", "VBZ"]),
        ({"columns": ("text", "label", "ner")}, ["NNP", "VBZ"]),
        ({"columns": ("text", "pos", "ner"), "label": "ner"}, ["B-ORG", "O"]),
    ):
        assert read_tags(tmp_path, "a.conll", text, **fields) == [(["EU", "rejects"], tags)]
    with pytest.raises(DataError, match="label"):  # of the columns that are named none
        read_tags(tmp_path, "a.conll", text, columns=("text", "pos", "ner"))


# --- Hidden labels ---


def test_minus_one_in_a_test_split_is_no_label(tmp_path, caplog):
    write(tmp_path, "a.jsonl", '{"text": "good", "label": 0}\n{"text": "bad", "label": 1}\n')
    for content, labels in (
        ('{"text": "fine", "label": -1}\n{"text": "so", "label": "-1"}\n', [None, None]),
        ('{"text": "fine", "label": -1.0}\n{"text": "so", "label": 1}\n', [None, 1]),
    ):
        write(tmp_path, "t.jsonl", content)
        for names in ((), ("0=bad", "1=good")):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                found = read(tmp_path, "test", train="a.jsonl", test="t.jsonl", labels=names)
            assert [example.label for example in found] == labels
            told = [message for message in caplog.messages if "-1" in message]
            assert len(told) == 1
            assert "t.jsonl line 1" in told[0]
    for split in ("train", "validation"):
        fields = {"train": "a.jsonl", "labels": ("0", "1"), "heldout_fraction": 0.0}
        with pytest.raises(DataError, match=r"t\.jsonl line 1 .*'-1"):
            read(tmp_path, split, **fields | {split: "t.jsonl"})


def test_minus_one_is_a_label_where_training_rows_have_it(tmp_path):
    lines = [{"text": str(label), "label": label} for label in (-1, 0, 1)]
    for name in ("a.jsonl", "t.jsonl"):
        write(tmp_path, name, "".join(json.dumps(line) + "\n" for line in lines))
    found = read(tmp_path, "test", train="a.jsonl", test="t.jsonl")
    assert [example.label for example in found] == [0, 1, 2]
    fields = {"kind": "regression", "train": "a.jsonl", "test": "t.jsonl"}
    assert [e.label for e in read(tmp_path, "test", **fields)] == [-1, 0, 1]
    write(tmp_path, "a.jsonl", '{"text": "x", "label": 0.5}\n')
    assert [e.label for e in read(tmp_path, "test", **fields)] == [None, 0, 1]


def test_hidden_tags(tmp_path):
    write(tmp_path, "a.conll", "EU B-ORG\nrejects O\n")
    write(tmp_path, "t.conll", "EU -1\nis -1\n")
    found = read(tmp_path, "test", kind="tagging", train="a.conll", test="t.conll")
    assert [example.label for example in found] == [None]


# --- Held-out rows ---


@pytest.mark.parametrize("labels", [(), ("0", "1")])
def test_training_files_are_parsed_once(tmp_path, monkeypatch, labels):
    """For their labels, the rows to train on and those held out."""
    write(tmp_path, "a.tsv", HEADER + "".join(f"text {n}\t{n % 2}\n" for n in range(99)))
    opened = []
    monkeypatch.setattr(
        own_rows,
        "read_table",
        lambda *args, **fields: opened.append(args[0]) or read_table(*args, **fields),
    )
    task = open_task(section(tmp_path, train="a.tsv", labels=labels))
    assert len(task.read("train")) + len(task.read("validation")) == 99
    assert len(opened) == 1
    assert len(task.read("train")) > 0  # again, from the file
    assert len(opened) == 2


def test_held_out_rows_are_a_part_of_the_training_rows(tmp_path):
    rows = [f"text {n // 2}\t{n % 2}" for n in range(1_000)]  # every text twice
    write(tmp_path, "a.tsv", "\n".join(["text\tlabel", *rows]))
    task = open_task(section(tmp_path, train="a.tsv", heldout_fraction=0.2))
    train, validation = task.read("train"), task.read("validation")
    assert len(train) + len(validation) == 1_000
    assert 140 <= len(validation) <= 260
    assert not {example.texts for example in train} & {example.texts for example in validation}
    assert not {example.id for example in train} & {example.id for example in validation}
    with pytest.raises(DataError, match="toy has no test split: config"):
        task.read("test")


# --- Faults ---

HEADER = "text\tlabel\n"
FAULTS = {
    "missing column": (
        "body\tlabel\nx\ta\n",
        r"no column 'text' \(it has: body, label\); set ",
    ),
    "wrong columns": (HEADER + "x\ta\ny\ta\tb\n", "line 3 has 3 columns instead of 2"),
    "unknown label": (HEADER + "x\tc\n", "line 2 has the label 'c', which is not one of: a, b"),
    "empty text": (HEADER + "x\ta\n \tb\n", "line 3 has an empty text in 'text'"),
    "no label": (HEADER + "x\t\n", "line 2 has no label in 'label'"),
    "empty file": ("", "a.tsv is empty; check the file"),
    "header only": (HEADER, r"a\.tsv has no rows; check the file"),
    "blank line": (HEADER + "x\ta\n\ny\tb\n", "line 3 has 1 columns instead of 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_file(tmp_path, name):
    text, words = FAULTS[name]
    write(tmp_path, "a.tsv", text)
    with pytest.raises(DataError, match=words) as caught:
        read(tmp_path, train="a.tsv", labels=("a", "b"))
    assert len(str(caught.value).splitlines()) == 1


def test_faults_of_other_formats(tmp_path):
    for name, text, words in (
        ("a.jsonl", '{"text": "x"}\n', r"line 1 has no 'label' \(it has: text\)"),
        ("a.jsonl", '{"text": 3, "label": "a"}\n', "line 1 has int instead of text in 'text'"),
        ("a.jsonl", '{"text": \n', "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.csv", 'text,label\n"x,a\n', "line 2 is not csv: unexpected end of data"),
        ("a.json", '{"rows": []}', r"name the list as FILE#KEY \(it has: rows\)"),
        ("a.json#no", '{"rows": []}', r"has no list 'no' \(it has: rows\)"),
        ("a.json", "[", "is not JSON"),
        ("a.json", "[]", "has no rows"),
        ("a.txt", "x", r"a\.txt .* config\.task\.format .* tsv, csv"),
        ("a.tsv.gz", None, "is a damaged gzip file"),
    ):
        if text is None:
            (tmp_path / name).write_bytes(gzip.compress(HEADER.encode() * 99)[:20])
        else:
            write(tmp_path, name.partition("#")[0], text)
        with pytest.raises(DataError, match=words):
            read(tmp_path, train=name, labels=("a", "b"))
    write(tmp_path, "a.tsv", HEADER + "na\u00efve\ta\n", "iso-8859-1")
    with pytest.raises(DataError, match=r"line 2 is not utf-8 \(byte 2 of the line is 0xEF\)"):
        read(tmp_path, train="a.tsv", labels=("a", "b"))
    fields = {"train": "a.tsv", "labels": ("a", "b"), "heldout_fraction": 0.0}
    assert read(tmp_path, encoding="iso-8859-1", **fields)[0].texts == ("na\u00efve",)
    with pytest.raises(DataError, match="encoding 'latin-x' is unknown"):
        read(tmp_path, encoding="latin-x", **fields)
    for pattern, words in (
        ("(?P<text>.*) (?P<label>[0-9])", "line 1 does not match the pattern"),
        ("(", "is no regular expression"),
    ):
        with pytest.raises(DataError, match=words):
            read(tmp_path, format="pattern", pattern=pattern, encoding="iso-8859-1", **fields)


def test_faults_of_a_section(tmp_path):
    write(tmp_path, "a.tsv", HEADER + "x\ta\ny\tb\n")
    for fields, words in (
        ({"kind": "ranking"}, "config.task.kind='ranking' is unknown; choose one of: classif"),
        ({"format": "xls"}, "config.task.format='xls' is unknown"),
        ({"bad_rows": "drop"}, "config.task.bad_rows='drop' is unknown"),
        ({"texts": ()}, "must name one or two columns"),
        ({"texts": ("a", "b", "c")}, "config.task.texts=a,b,c must name one or two columns"),
        ({"kind": "tagging", "texts": ("a", "b")}, "must name one column of words"),
        ({"label": ""}, r"config\.task\.label is empty"),
        ({"label": "text"}, "config.task.label=text is one of config.task.texts"),
        ({"texts": ("text", "text")}, "config.task.texts=text,text names one column twice"),
        ({"swap_pairs": True}, "swap_pairs needs two columns"),
        ({"heldout_fraction": 1.0}, "must be from 0 to below 1"),
        ({"scale": 0.0}, "must be greater than 0"),
        ({"train": ""}, "config.task names no file"),
        ({"train": "b.tsv"}, "There is no file .*b.tsv; check config.task.folder"),
        ({"labels": ("a", "a")}, "config.task.labels has 'a' twice"),
        ({"label": "text", "texts": ("label",), "train": "b?.tsv"}, "There is no file"),
        ({"train": "", "test": "a.tsv"}, r"config\.task\.labels is empty.* config\.task\.train"),
    ):
        with pytest.raises(DataError, match=words):
            open_task(section(tmp_path, **{"train": "a.tsv"} | fields))
    write(tmp_path, "one.tsv", HEADER + "x\ta\ny\ta\n")
    with pytest.raises(DataError, match="training rows of toy have 1 label in column 'label'"):
        open_task(section(tmp_path, train="one.tsv"))


LISTS = '{"text": ["a", "b"], "label": ["X", "Y"]}\n'


@pytest.mark.parametrize(
    ("name", "text", "fields", "words"),
    [
        ("a.jsonl", '{"text": "x", "lab": "1"}\n', {}, r"line 1 has no 'label' .it has: text, lab"),
        ("a.jsonl", '[\n{"text": "x"}\n', {}, "line 1 is not JSON"),
        ("a.tsv", "1\tx\ty\n", {"columns": ("label", "text")}, "line 1 has 3 columns instead of 2"),
        ("a.csv", "text,label\na,b\nhello, world,a\n", {}, "line 3 has 3 columns instead of 2"),
        (
            "a.txt",
            "x\n",
            {"format": "pattern", "pattern": "(?P<label>.):(?P<text>.*)"},
            "line 1 does not match the pattern",
        ),
        ("a.jsonl", '{"text": "x", "label": ["2"]}\n', {}, "line 1 has a list in 'label', where"),
        ("a.jsonl", '{"text": "x", "label": NaN}\n', {}, "line 1 has no label in 'label'"),
        ("a.jsonl", LISTS.replace("[", "").replace("]", ""), {}, "line 1 is not JSON"),
        (
            "a.jsonl",
            '{"text": "a b", "label": "X Y"}\n',
            {"kind": "tagging"},
            "line 1 has no list of words in 'text'",
        ),
        ("a.csv", "text,label,label\na,b,c\n", {}, "has the column 'label' twice"),
    ],
)
def test_faults_are_told_where_the_labels_are_of_the_rows(tmp_path, name, text, fields, words):
    """They once were left out in silence, and what came of that was blamed."""
    write(tmp_path, name, text)
    with pytest.raises(DataError, match=words):
        open_task(section(tmp_path, train=name, **fields))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_rows_to_score_on_are_not_trained_on(tmp_path, split):
    """A glob for all files took those of the other split along."""
    for name in ("a.tsv", "b.tsv"):
        write(tmp_path, name, HEADER + "x\ta\ny\tb\n")
    with pytest.raises(
        DataError, match=rf"config\.task\.{split} reads .*b\.tsv, which config\.task"
    ):
        read(tmp_path, train="*.tsv", **{split: "b.tsv"})
    fields = {"heldout_fraction": 0.0, split: "b.tsv"}
    assert len(read(tmp_path, train="a.tsv", **fields)) == 2
    write(tmp_path, "c.json", json.dumps({"train": OBJECTS, "dev": OBJECTS}))
    assert len(read(tmp_path, train="c.json#train", **fields | {split: "c.json#dev"})) == 3


@pytest.mark.parametrize(("name", "first", "words"), [
    ("a.csv", "text;label", "have ';' between them: save it with a comma there"),
    ("a.csv", "text\tlabel", "have tabs between them: save it with a comma there"),
    ("a.tsv", "text,label", "have commas between them: save it with a tab there"),
    ("a.csv", "body", "set config.task.texts and config.task.label"),
])  # fmt: skip
def test_another_separator_is_named(tmp_path, name, first, words):
    write(tmp_path, name, f"{first}\nx\n")
    with pytest.raises(DataError, match=words):
        read(tmp_path, train=name)


def test_json_under_the_name_of_the_other_kind(tmp_path):
    write(tmp_path, "a.json", FILES["d.jsonl"])
    with pytest.raises(DataError, match=r"line 2 column 1; an object a line is the format jsonl"):
        read(tmp_path, train="a.json")
    assert len(read(tmp_path, train="a.json", format="jsonl", heldout_fraction=0.0)) == len(ROWS)
    write(tmp_path, "a.json", "")
    with pytest.raises(DataError, match=r"a\.json is not JSON"):
        read(tmp_path, train="a.json")
    write(tmp_path, "a.jsonl", json.dumps(OBJECTS, indent=1))
    with pytest.raises(DataError, match=r"line 1 is not JSON: .*several lines is the format json,"):
        read(tmp_path, train="a.jsonl")


def test_a_header_is_no_row(tmp_path):
    """With the columns named it was one, and its label a label of its own."""
    write(tmp_path, "a.tsv", HEADER + "x\ta\ny\tb\n")
    with pytest.raises(DataError, match=r"line 1 is not a row but the names .*: text, label;"):
        read(tmp_path, train="a.tsv", columns=("text", "label"))


def test_skipped_rows_are_told_where_none_is_left(tmp_path):
    write(tmp_path, "a.jsonl", '{"text": "x", "lab": "1"}\n')
    with pytest.raises(DataError, match="has no rows that can be used; line 1 has no 'label'"):
        open_task(section(tmp_path, train="a.jsonl", bad_rows="skip"))


def test_names_with_brackets_are_names(tmp_path):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    write(folder, "a[b].tsv", HEADER + "x\ta\ny\tb\n")
    for name in ("a[b].tsv", "*.tsv"):
        fields = {"train": name, "heldout_fraction": 0.0}
        assert [example.texts[0] for example in read(folder, **fields)] == ["x", "y"]


def test_rows_may_be_skipped(tmp_path, caplog):
    write(tmp_path, "a.tsv", HEADER + "x\ta\n\tb\ny\tb\tc\nz\tb\n")
    with caplog.at_level(logging.WARNING):
        examples = read(tmp_path, train="a.tsv", bad_rows="skip", heldout_fraction=0.0)
    assert [example.texts[0] for example in examples] == ["x", "z"]
    assert "rows left out; the first: line 3 has an empty text" in caplog.text


def test_rows_keep_their_numbers_whatever_is_skipped(tmp_path):
    """So that predictions join to the file."""
    write(tmp_path, "a.tsv", HEADER + "x\ta\n\tb\ny\tb\tc\nz\tb\n")
    write(
        tmp_path, "b.jsonl", '{"text": "v", "label": "a"}\n{"text\n5\n{"text": "w", "label": "a"}\n'
    )
    fields = {"bad_rows": "skip", "heldout_fraction": 0.0, "labels": ("a", "b")}
    examples = read(tmp_path, train="a.tsv,b.jsonl", **fields)
    assert [(e.id, e.texts[0]) for e in examples] == [
        ("0", "x"),
        ("3", "z"),
        ("4", "v"),
        ("7", "w"),
    ]
    write(tmp_path, "c.conll", "a O\n\nb\nc O\n\nd O\n")
    fields |= {"kind": "tagging", "texts": ("0",), "label": "1", "labels": ("O", "B")}
    examples = read(tmp_path, train="c.conll", **fields)
    assert [(e.id, e.texts[0]) for e in examples] == [("0", "a"), ("2", "d")]  # never half of one


def test_two_rows_of_one_id_are_told(tmp_path, caplog):
    write(tmp_path, "a.tsv", "n\ttext\tlabel\n7\tx\ta\n8\ty\tb\n7\tz\tb\n")
    with caplog.at_level(logging.WARNING):
        read(tmp_path, train="a.tsv", id="n", heldout_fraction=0.0)
    assert "a.tsv line 4 is that of" in caplog.text
    assert "a.tsv line 2" in caplog.text


def test_csv_as_other_readers_have_it(tmp_path):
    """Blank lines are no rows, a field may be long, and an open quotation mark eats no rows."""
    long = "word " * 40_000
    write(tmp_path, "a.csv", f"\ntext,label\n\nx,a\n\n\n{long},b\n\n")
    examples = read(tmp_path, train="a.csv", heldout_fraction=0.0)
    assert [(e.id, e.texts[0]) for e in examples] == [("0", "x"), ("1", long.strip())]
    write(tmp_path, "a.csv", 'text,label\nx,a\n"y\nz",b\n"v,b\nw,a\n')
    with pytest.raises(DataError, match=r"a\.csv line 5 is not csv: unexpected"):
        read(tmp_path, train="a.csv", labels=("a", "b"), bad_rows="skip")
    write(tmp_path, "a.csv", 'text,label\nx,a\n"y"y,b\nz,b\n')
    examples = read(tmp_path, train="a.csv", heldout_fraction=0.0, bad_rows="skip")
    assert [(e.id, e.texts[0]) for e in examples] == [("0", "x"), ("2", "z")]


@pytest.mark.parametrize(
    "document", ["[5]", '["a"]', '[{"text": "x", "label": "a"}, 5]', '[["x"], 5]']
)
def test_json_that_is_no_table(tmp_path, document):
    write(tmp_path, "a.json", document)
    with pytest.raises(DataError):
        read(tmp_path, train="a.json", labels=("a", "b"))


def test_a_test_file_without_labels_cannot_be_scored(tmp_path):
    write(tmp_path, "a.tsv", HEADER + "x\ta\ny\tb\n")
    write(tmp_path, "t.tsv", "text\nx\ny\n")
    task = open_task(section(tmp_path, train="a.tsv", test="t.tsv"))
    examples = task.read("test")
    assert [example.label for example in examples] == [None, None]
    with pytest.raises(DataError, match="test split of toy has no labels, so it cannot be scored"):
        require_labels(task, "test", examples)
    write(tmp_path, "t.tsv", HEADER + "x\ta\ny\t\n")
    with pytest.raises(DataError, match="test split of toy has 1 rows without a label"):
        require_labels(task, "test", task.read("test"))
    require_labels(task, "train", read(tmp_path, train="a.tsv", heldout_fraction=0.0))


# --- Properties ---

# What a cell of a tsv may hold; the first column may not be blank, the last keeps its ends.
cells = st.text(st.characters(exclude_characters="\t\r\n", exclude_categories=["Cs"]), max_size=8)
tables = st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8)


@given(tables)
def test_tsv_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tsv") / "a.tsv.gz"
    rows = [(f"x{a}", b, f"{c}x") for a, b, c in rows]
    write(path.parent, path.name, "a\tb\tc\n" + "".join("\t".join(row) + "\r\n" for row in rows))
    found = list(read_table(path, ("c", "a", "b"), TableFormat("tsv"), BadRows(path, "error")))
    assert found == [(n, (c, a, b)) for n, (a, b, c) in enumerate(rows, start=2)]


any_cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8)


@given(st.lists(st.tuples(any_cell, any_cell), min_size=1, max_size=8))
def test_csv_round_trip(tmp_path_factory, rows):
    """Quotes, separators and line ends inside cells too."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    rows = [(f"x{a}", f"{b}x") for a, b in rows]
    write(path.parent, path.name, as_csv([("a", "b"), *rows]))
    found = list(read_table(path, ("a", "b"), TableFormat("csv"), BadRows(path, "error")))
    assert [values for _, values in found] == rows


# --- The real data sets, by their configs ---

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


def in_folder(section, real_data, name):
    return dataclasses.replace(section, folder=str(real_data / TEXT_FOLDERS[name]))


@pytest.mark.parametrize("name", REAL)
def test_without_a_folder_the_flag_and_the_files_are_named(name, tmp_path, monkeypatch):
    from configs import text
    from convbert_jax.config import from_config_dict

    monkeypatch.chdir(tmp_path)
    section = from_config_dict(text.get_config(name)).task
    with pytest.raises(DataError, match=r"--config\.task\.folder=FOLDER") as refused:
        open_task(section)
    files = [getattr(section, split) for split in ("train", "validation", "test")]
    for file in ",".join(filter(None, files)).split(","):
        assert file.partition("#")[0] in str(refused.value)


@pytest.mark.parametrize("name", REAL)
def test_real_data_by_config(real_data, name, caplog):
    from configs import text
    from convbert_jax.config import from_config_dict

    config = from_config_dict(text.get_config(name))
    assert config.finetune.tasks == ("own",)
    task = open_task(in_folder(config.task, real_data, name))
    splits, rows, labels = REAL[name]
    assert tuple(split for split in task.splits if task.has(split)) == splits
    if isinstance(labels, tuple):
        assert task.labels == labels
    else:
        assert len(task.labels) == labels
    examples = [example for split in splits for example in task.read(split)]
    assert len(examples) == rows
    assert all(example.label is not None and all(example.texts) for example in examples)
    if name == "qqp_part":
        assert "line 1 has 5 columns instead of 6" in caplog.text
    else:
        assert "left out" not in caplog.text


def test_trec_is_not_utf8(real_data):
    from configs import text
    from convbert_jax.config import from_config_dict

    section = in_folder(from_config_dict(text.get_config("trec")).task, real_data, "trec")
    train = open_task(section).read("train")
    assert any("sister\u00f0city" in example.texts[0] for example in train)
