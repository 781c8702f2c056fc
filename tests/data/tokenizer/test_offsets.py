"""Token offsets point at the original text, whatever the vocabulary's normalization does to it."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection
from convbert_jax.data.tokenizer.offsets import cover, fit
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer

SECTIONS = {
    "unigram": TokenizerSection(kind="sentencepiece", vocab_size=300),
    "cased": TokenizerSection(
        kind="sentencepiece", vocab_size=300, lowercase=False, strip_accents=False
    ),
    "wordpiece": TokenizerSection(kind="wordpiece", vocab_size=300),
}
# Letters that a vocabulary here knows and does not, accents of both kinds, characters that become
# several (ligatures, fractions) or none, other scripts, white space of all kinds.
ALPHABET = (
    "abdeiorABDI .,-'1\u00e9\u00c5e\u0301o\u0308\ufb01\u00bd\u00df\u0130\u6771\u4eac\ud55c"
    "\u1112\u1161\u0e33\u200b\u00ad\u00a0\t\n\u2028\x07\ufffd\U0001f600"
)


@pytest.fixture(scope="module", params=list(SECTIONS))
def tokenizer(request, documents, tmp_path_factory):
    section = SECTIONS[request.param]
    return train_tokenizer(documents, section, tmp_path_factory.mktemp("offsets"))


def _hidden(character):
    category = unicodedata.category(character)
    return category[0] == "Z" or category in ("Cc", "Cf")


def _strip(text):
    kept = [i for i, character in enumerate(text) if not _hidden(character)]
    return text[kept[0] : kept[-1] + 1] if kept else ""


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_offsets_of_any_text(tokenizer, text):
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert ids == tokenizer.encode([text])[0]
    assert offsets.shape == (len(ids), 2)
    begin, end = offsets.T
    assert (begin >= 0).all()
    assert (end >= begin).all()
    assert (end <= len(text)).all()
    assert (np.diff(offsets, axis=0) >= 0).all()
    for first, last in offsets:
        piece = text[first:last]
        assert not piece or not (_hidden(piece[0]) or _hidden(piece[-1])), repr(piece)
        assert last == len(text) or last == first or unicodedata.category(text[last])[0] != "M"


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet=ALPHABET, min_size=1, max_size=40), data=st.data())
def test_a_span_is_covered_by_its_tokens(tokenizer, text, data):
    """What the tokens of a span give back holds every character of it that became a token, and
    is the span itself where it begins and ends with tokens.
    """
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin + 1, len(text)))
    ((_, offsets),) = tokenizer.encode_with_offsets([text])
    seen = {i for first, last in offsets for i in range(first, last)} & set(range(begin, end))
    tokens = cover(offsets, begin, end)
    if tokens is None:
        assert not seen
        return
    first, last = offsets[tokens[0], 0], offsets[tokens[1], 1]
    if seen:
        assert first <= min(seen)
        assert last > max(seen)
    if begin in offsets[:, 0] and end in offsets[:, 1]:
        assert _strip(text[first:last]) == _strip(text[begin:end]) or first < begin or last > end


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Beyonc\u00e9  bade", "Beyonc\u00e9"),
        ("Beyonce\u0301 bade", "Beyonce\u0301"),
        ("a \ufb01ne bade", "\ufb01ne"),
        ("bade (\u00bd) lamu", "\u00bd"),
        ("bade \u6771\u4eac lamu", "\u6771\u4eac"),
        ("\u00c5NGSTR\u00d6M  unit", "\u00c5NGSTR\u00d6M"),
        ("bade\u200b\u00a0 Lamu\n\n.", "Lamu"),
    ],
)
def test_words_come_back_exactly(tokenizer, text, word):
    ((_, offsets),) = tokenizer.encode_with_offsets([text])
    begin = text.index(word)
    first, last = cover(offsets, begin, begin + len(word))
    assert text[offsets[first, 0] : offsets[last, 1]] == word


def test_nothing_to_place():
    assert fit("", []).shape == (0, 2)
    assert cover(fit("  ", [(0, 2)]), 0, 2) is None
