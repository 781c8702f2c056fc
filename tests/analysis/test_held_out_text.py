"""A text taken apart: what was hidden and filled in, what was put in and suspected."""

import numpy as np

from convbert_jax.analysis.held_out_text import (
    Cloze,
    Suspects,
    describe_cloze,
    describe_suspects,
    find_suspects,
    pair_subwords,
)


def test_suspects_are_the_highest_scores():
    suspects = find_suspects(np.array([False, True, True, False]), np.array([-3.0, 2.0, -1.0, 0.5]))
    assert suspects.tolist() == [False, True, False, True]


def marked(*row) -> list[str]:
    """The lines of a row between what is said of it."""
    subwords = pair_subwords(*row)
    suspects = Suspects(subwords, rows=32, found=0.25, chance=0.125)
    *_, last = lines = describe_suspects(suspects)
    assert [number for number in ("32", "25%", "12%") if number not in last] == []
    return lines[2:-1]


def test_marked_sentence():
    lines = marked(
        ["the", "blue", "dog", "sat", "##s"],
        ["the", "black", "cat", "sat", "##s"],
        [False, True, False, True, False],
    )
    assert lines == ["  the [blue<black]! [dog<cat] sat!s"]


def test_marked_sentence_joins_sentencepiece_subwords():
    pieces = ["[CLS]", "\u2581con", "vert", ".", "[SEP]"]
    assert marked(pieces, pieces, [False] * 5) == ["  [CLS] convert. [SEP]"]


def test_hidden_subwords_are_told_from_the_others_and_right_ones_from_wrong():
    subwords = pair_subwords(
        ["the", "dog", "sat", "##ting", "on", "mats"],
        ["the", "cat", "sat", "##s", "on", "mats"],
        [False, True, True, True, False, False],
    )
    _, line, last = describe_cloze(Cloze(subwords, rows=32, right=1 / 3))
    assert line == "  the [dog<cat] [sat][ting<s] on mats"
    assert "32" in last
    assert "33%" in last
