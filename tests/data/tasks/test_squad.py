"""SQuAD from its files and from TFDS, errors of invalid files, and windows."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import squad
from convbert_jax.data.tasks.squad import Answer, Question, cut, make_windows, most_context
from tests.data.tfds_sets import prepare_tfds
from tests.refusals import refused

CONTEXT = "Lamu is a town. It has caf\u00e9s."
QUESTIONS = [
    Question("a", "What is Lamu?", CONTEXT, (Answer("a town", 8), Answer("town", 10))),
    Question("b", "Has it mines?", CONTEXT, impossible=True),
]


def as_rows(questions):
    for q in questions:
        answers = [{"text": a.text, "answer_start": a.start} for a in q.answers]
        yield {"id": q.id, "question": q.text, "is_impossible": q.impossible, "answers": answers}


def write(path, questions):
    plausible = {"plausible_answers": [{"text": "town", "answer_start": 10}]}
    entries = [row | plausible for row in as_rows(questions)]
    paragraph = {"context": questions[0].context, "qas": entries}
    content = {"version": "v2.0", "data": [{"title": "Lamu", "paragraphs": [paragraph]}]}
    data = json.dumps(content).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_original_files(tmp_path, caplog):
    for number, name in enumerate(("dev-v2.0.json", "v2.0/dev-v2.0.json.gz")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / name, QUESTIONS)
        assert squad.read("v2", "validation", folder) == QUESTIONS
        assert squad.read("v2", "validation", folder / name) == QUESTIONS
    assert "11873" in caplog.text
    caplog.clear()
    write(tmp_path / "train-v1.1-part.json", QUESTIONS[:1])  # a different name
    assert squad.read("v1", "train", tmp_path) == QUESTIONS[:1]
    assert "train-v1.1-part.json" in caplog.text


def test_tfds_directory(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")

    text = tfds.features.Text()
    answers = tfds.features.Sequence({"text": text, "answer_start": np.int32})
    features = dict.fromkeys(("id", "title", "context", "question"), text)
    features |= {"answers": answers, "is_impossible": np.bool_}
    rows = [row | {"title": "Lamu", "context": CONTEXT} for row in as_rows(QUESTIONS)]
    spec = f"tfds:{prepare_tfds(tmp_path, features, {'validation': rows})}"
    assert sorted(squad.read("v2", "validation", spec), key=lambda q: q.id) == QUESTIONS
    with refused(DataError, value="train"):
        squad.read("v2", "train", spec)
    with refused(DataError, "dataset_info.json", path=tmp_path):
        squad.read("v2", "train", f"tfds:{tmp_path}")


def test_misplaced_answers_are_counted(caplog):
    right, wrong = QUESTIONS[0], Question("c", "?", CONTEXT, (Answer("mines", 3),))
    other = Question("d", "?", CONTEXT, (Answer("town", 8),))
    assert squad.misplaced([right, wrong, other]) == [wrong, other]
    assert squad.usable_for_training([right, wrong, other]) == [right]
    (message,) = caplog.messages
    for part in ("2 of 3", "c", "'mines'", "3"):
        assert part in message
    with refused(DataError, "answer_start"):
        squad.usable_for_training([wrong])
    with refused(DataError, value="e"):
        squad.usable_for_training([right, Question("e", "?", CONTEXT)])


def test_missing_files_are_named(tmp_path):
    names = ("--config.finetune.data=FOLDER", "train-v2.0.json", "dev-v2.0.json", "https://")
    for folder in ("", str(tmp_path / "nowhere")):
        with refused(DataError, *names, folder):
            squad.check_present("v2", folder)
    with refused(DataError, "train-v2.0.json", path=tmp_path):
        squad.check_present("v2", str(tmp_path))
    path = write(tmp_path / "train-v2.0.json", QUESTIONS)
    with refused(DataError, field="config.finetune.data", value=str(path)):
        squad.check_present("v2", str(path))
    with refused(DataError, "train-v1.1.json", path=tmp_path):
        squad.read("v1", "train", tmp_path)
    with refused(DataError, value="test"):
        squad.read("v1", "test", tmp_path)


def test_bad_files(tmp_path):
    path = tmp_path / "dev-v1.1.json"

    def read(*mentions, **parts):
        with refused(DataError, *mentions, **parts):
            squad.read("v1", "validation", tmp_path)

    for content in ('{"data": [{"paragraphs": ', "[" * 99_999, b"\xff", "", "5", '{"data": 5}'):
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(data)
        read(path=path)
        path.unlink()
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(data)
        read(path=packed)
        packed.unlink()
    path.write_text('{"data": [{"paragraphs": [{"qas": []}]}]}')
    read("'context'", path=path)
    path.write_text('{"data": []}')
    read(path)
    write(path, QUESTIONS)
    read(path, value=1)
    write(path, QUESTIONS[:1] * 2)
    read(path, value="a")


def test_fields_of_another_type(tmp_path):
    path = tmp_path / "dev-v1.1.json"
    for field, values in {
        "question": (5, None, ["a"]),
        "context": (5, None, {}),
        "answers": (
            *(5, "x", [5], [{"text": 5, "answer_start": 0}]),
            [{"text": "x", "answer_start": 1e999}],
            [{"text": "\ud800", "answer_start": 0}],
        ),
        "id": (None, [1]),
        "is_impossible": ("false",),
    }.items():
        for value in values:
            entry = {"id": "a", "question": "?", "answers": [{"text": "one", "answer_start": 0}]}
            paragraph = {"context": CONTEXT, "qas": [entry]}
            (paragraph if field == "context" else entry)[field] = value
            path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
            with refused(DataError, path=path):
                squad.read("v1", "validation", tmp_path)


def test_real_files(real_data, caplog):
    folder = real_data / "squad"
    dev = squad.read("v1", "validation", folder)
    assert len(dev) == 10_570
    assert not caplog.records
    assert squad.misplaced(dev) == []
    assert len({q.context for q in dev}) == 2_067
    second = squad.read("v2", "validation", folder)
    assert len(second) == 6_078
    assert {6078, 11873} <= set(caplog.records[-1].args)
    assert squad.misplaced(second) == []
    assert all(bool(q.answers) != q.impossible for q in second)
    train = squad.read("v1", "train", folder)
    assert len(train) == 87_599  # the larger of two candidate files
    assert squad.usable_for_training(train) == train


# --- Windows cover the context, and every answer can be recovered ---


@pytest.fixture(scope="module", params=["sentencepiece", "wordpiece", "bpe"])
def tokenizer(request, trained):
    return trained(kind=request.param)


@given(tokens=st.integers(1, 400), room=st.integers(1, 80), stride=st.integers(1, 130))
def test_windows_cover_the_context(tokens, room, stride):
    parts = cut(tokens, room, stride)
    covered = np.zeros(tokens, int)
    for first, size in parts:
        assert 1 <= size <= room
        covered[first : first + size] += 1
    assert covered.all()
    starts = [first for first, _ in parts]
    assert starts == sorted(set(starts))
    # The chosen window has the token and maximizes the smaller side of its context.
    for place, index in enumerate(most_context(tokens, parts)):
        sides = [
            min(place - first, first + size - 1 - place) if first <= place < first + size else -1
            for first, size in parts
        ]
        assert sides[index] == max(sides)


def test_a_context_of_a_million_tokens_takes_little_memory():
    parts = cut(1_000_000, 300, 128)
    tracemalloc.start()
    best = most_context(1_000_000, parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert (np.diff(best) >= 0).all()
    assert best[-1] == len(parts) - 1


WORDS = ["bade", "Lamu", "dé", "\ufb01", "1980s", "(½)", "\u6771\u4eac", "a\u0301b", "x,"]
BLANKS = [" ", "  ", "\u00a0", "\n"]


@settings(max_examples=100)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=60),
    blank=st.sampled_from(BLANKS),
    stride=st.integers(1, 20),
    data=st.data(),
)
def test_every_answer_can_be_recovered(tokenizer, words, blank, stride, data):
    context = blank.join(words)
    begin = data.draw(st.integers(0, len(words) - 1))
    end = data.draw(st.integers(begin, len(words) - 1))
    text = blank.join(words[begin : end + 1])
    start = len(blank.join([*words[:begin], ""])) if begin else 0
    question = Question("q", "Bade lamu dume?", context, (Answer(text, start),))
    windows = make_windows([question], tokenizer, length=40, query=12, stride=stride)
    rows = windows.rows

    # Each token has its best context in exactly one window.
    chosen = np.zeros(len(windows.offsets[0]), int)
    for row in rows:
        size = len(row.tokens) - row.context_at - 1
        assert len(row.tokens) <= 40
        assert row.tokens[0] == tokenizer.special.cls
        assert row.tokens[-1] == row.tokens[row.context_at - 1] == tokenizer.special.sep
        chosen[row.first : row.first + size] += row.best
    assert (chosen == 1).all()

    # Tokens of an answer give back its text, with at most one token more.
    first, last = windows.answers[0]
    room = 40 - rows[0].context_at - 1
    having = [row for row in rows if row.end]
    assert windows.without_answer == len(rows) - len(having)
    if last - first < room and stride <= room - (last - first):
        assert having
    assert windows.lost_answers == (not having)
    for row in having:
        got = windows.text([question], row, row.start, row.end)
        assert text.strip() in got
        shift = row.first - row.context_at
        assert (row.start + shift, row.end + shift) == (first, last)
        if blank != "\u00a0":  # words are split at blanks
            assert got == text


def test_long_and_impossible_questions(tokenizer):
    context = "lamu bade " * 40
    question = Question("q", "bade " * 50, context, (Answer("lamu", 0),))
    windows = make_windows([question, question], tokenizer, length=64, query=16, stride=32)
    assert windows.cut_questions == 2
    assert all(row.context_at == 18 for row in windows.rows)
    assert {row.question for row in windows.rows} == {0, 1}
    question = Question("q", "bade?", context, impossible=True)
    windows = make_windows([question], tokenizer, length=64, query=16, stride=32)
    assert not any(row.start or row.end for row in windows.rows)
    assert windows.without_answer == 0
    assert windows.answers == [None]
    blank = "" if tokenizer.kind == "bpe" else " \n"  # byte-level BPE encodes white space
    for question, length, parts in (
        (Question("q", "bade?", "lamu"), 67, {"field": "config.finetune.length", "value": 67}),
        (Question("q", blank, "lamu"), 68, {"value": "q"}),
        (Question("q", "bade", ""), 68, {"value": "q"}),
    ):
        with refused(DataError, **parts):
            make_windows([question], tokenizer, length=length, query=64, stride=32)
