"""Windows over contexts: nothing of a context is lost, every answer can be had back."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.squad import Answer, Question
from convbert_jax.data.tasks.squad_windows import cut, make_windows, most_context
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer


@pytest.fixture(scope="module", params=["sentencepiece", "wordpiece"])
def tokenizer(request, documents, tmp_path_factory):
    section = TokenizerSection(kind=request.param, vocab_size=300)
    return train_tokenizer(documents, section, tmp_path_factory.mktemp("windows"))


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
    best = most_context(tokens, parts)
    # The one chosen has the token, and no other has more tokens on its poorer side.
    for place, index in enumerate(best):
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


WORDS = st.lists(
    st.sampled_from(
        ["bade", "Lamu", "d\u00e9", "\ufb01", "1980s", "(\u00bd)", "\u6771\u4eac", "a\u0301b", "x,"]
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
    words=WORDS,
    blank=st.sampled_from([" ", "  ", "\u00a0", "\n"]),
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
    assert context[start : start + len(text)] == text
    windows = make_windows([question], tokenizer, length=40, query=12, stride=stride)
    rows = windows.rows

    # Each token has its best context in exactly one window.
    tokens = len(windows.offsets[0])
    chosen = np.zeros(tokens, int)
    for row in rows:
        size = len(row.tokens) - row.context_at - 1
        assert len(row.tokens) <= 40
        assert row.tokens[0] == tokenizer.special.cls
        assert row.tokens[-1] == row.tokens[row.context_at - 1] == tokenizer.special.sep
        chosen[row.first : row.first + size] += row.best
    assert (chosen == 1).all()

    # Where a window has the answer, its tokens give back its text, a token at most longer.
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
        assert (row.start - row.context_at + row.first, row.end - row.context_at + row.first) == (
            first,
            last,
        )
        if blank != "\u00a0" and "" not in words:  # words are split at blanks: nothing more
            assert got == text


def test_long_question_is_cut(tokenizer):
    question = Question("q", "bade " * 50, "lamu bade " * 40, (Answer("lamu", 0),))
    windows = make_windows([question, question], tokenizer, length=64, query=16, stride=32)
    assert windows.cut_questions == 2
    assert all(row.context_at == 18 for row in windows.rows)
    assert {row.question for row in windows.rows} == {0, 1}


def test_impossible_question_has_no_target(tokenizer):
    question = Question("q", "bade?", "lamu bade " * 40, impossible=True)
    windows = make_windows([question], tokenizer, length=64, query=16, stride=32)
    assert not any(row.start or row.end for row in windows.rows)
    assert windows.without_answer == 0
    assert windows.answers == [None]


def test_faults(tokenizer):
    question = Question("q", "bade?", "lamu", (Answer("lamu", 0),))
    with pytest.raises(DataError, match=r"length to 68 or more, or config\.finetune\.query"):
        make_windows([question], tokenizer, length=67, query=64, stride=32)
    with pytest.raises(DataError, match="Question q has an empty question"):
        make_windows([Question("q", " \n", "lamu")], tokenizer, length=68, query=64, stride=32)
    with pytest.raises(DataError, match="Question q has an empty context"):
        make_windows([Question("q", "bade", "")], tokenizer, length=68, query=64, stride=32)
