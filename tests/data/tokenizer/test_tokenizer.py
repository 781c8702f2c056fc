"""Trained vocabularies: reproducible and complete, with exact offsets."""

import dataclasses
import pickle
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import DataError, TokenizerError
from convbert_jax.data.tokenizer.tokenizer import (
    check_tokenizer,
    cover,
    fit_offsets,
    follow_file,
    load_tokenizer,
    train_tokenizer,
)
from convbert_jax.interfaces import SpecialIds
from tests.refusals import refused

BARE = {"lowercase": True, "strip_accents": True}
KINDS = {
    "unigram": BARE,
    "bpe": {"algorithm": "bpe", "lowercase": False},
    "wordpiece": {"kind": "wordpiece"} | BARE,
    "byte-level": {"kind": "bpe"},
}
SPECIAL_TEXT = "[PAD] [CLS] x [SEP] [MASK][MASK] [UNK] <pad> <s>"
# Known and unknown letters, composed and combining accents, characters that expand (ligatures,
# fractions) or vanish, other scripts, and all kinds of white space.
ALPHABET = (
    "abdeiorABDI .,-'1\u00e9\u00c5e\u0301o\u0308\ufb01\u00bd\u00df\u0130\u6771\u4eac\ud55c"
    "\u1112\u1161\u0e33\u200b\u00ad\u00a0\t\n\u2028\x07\ufffd\U0001f600"
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, trained):
    return trained(**KINDS[request.param])


def test_special_tokens_are_the_first_five(tokenizer):
    assert tokenizer.special == SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
    assert tokenizer.pieces(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.vocab_size == len(tokenizer.entries) == 300


def test_text_comes_back(tokenizer, documents):
    text = documents[3].replace("\n", " ")
    decoded = tokenizer.decode(tokenizer.encode([text])[0])
    expected = text.lower() if tokenizer.section.lowercase else text
    if tokenizer.kind == "bpe":
        assert decoded == text
        return
    assert decoded.replace(" ", "") == expected.replace(" ", "")
    plain, dirty = tokenizer.encode(["bade lamu", "\0bade\t\x07\u200b \r\nlamu\0"])
    assert plain == dirty


@settings(max_examples=25)
@given(text=st.text(max_size=60))
def test_no_special_token_comes_out_of_text(tokenizer, text):
    ids = tokenizer.encode([text, text + "\n[MASK]", SPECIAL_TEXT, "a [CLS]b"])
    assert not {0, 2, 3, 4} & {i for row in ids for i in row}
    assert all(0 <= i < tokenizer.vocab_size for row in ids for i in row)
    assert all(ids[1:])


def test_another_process_loads_the_same_file_or_none(tokenizer, documents, tmp_path):
    tokenizer.encode(["load it"])
    data = pickle.dumps(tokenizer)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert copy.encode([SPECIAL_TEXT]) == tokenizer.encode([SPECIAL_TEXT])
    assert copy.fingerprint == tokenizer.fingerprint
    again = train_tokenizer(iter(documents), tokenizer.section, tmp_path)
    assert again.path.read_bytes() == tokenizer.path.read_bytes()
    assert again.fingerprint == tokenizer.fingerprint
    data = pickle.dumps(again)
    train_tokenizer(documents[:200], tokenizer.section, tmp_path)
    with refused(TokenizerError, path=again.path):
        pickle.loads(data).encode(["Document 1."])
    again.path.unlink()
    with refused(TokenizerError, path=again.path):
        pickle.loads(data).encode(["Document 1."])


def test_a_vocabulary_is_loaded_with_the_settings_of_its_training(tokenizer, tmp_path):
    section, folder = tokenizer.section, tokenizer.path.parent
    assert load_tokenizer(section, folder).fingerprint == tokenizer.fingerprint
    wrong = {"vocab_size": 299, "lowercase": not section.lowercase, "train_megabytes": 7}
    wrong |= {"strip_accents": not section.strip_accents, "sentinels": 3}
    for name, value in wrong.items():
        other = dataclasses.replace(section, **{name: value})
        with refused(TokenizerError, path=folder, field=f"config.tokenizer.{name}", value=value):
            load_tokenizer(other, folder)
    by_path = dataclasses.replace(section, path=str(tokenizer.path))
    assert load_tokenizer(by_path, tmp_path).fingerprint == tokenizer.fingerprint
    kind = "sentencepiece" if section.kind == "wordpiece" else "wordpiece"
    for name, value in {"vocab_size": 301, "kind": kind}.items():
        right = f"--config.tokenizer.{name}={getattr(section, name)}"
        with refused(TokenizerError, right, field=f"config.tokenizer.{name}", value=value):
            load_tokenizer(dataclasses.replace(by_path, **{name: value}), tmp_path)
    with refused(TokenizerError, path=tmp_path, field="config.tokenizer.path"):
        load_tokenizer(section, tmp_path)


def test_a_size_that_the_text_cannot_give(tokenizer, documents, tmp_path):
    """The error suggests a size that works; the folder stays empty."""
    field = "config.tokenizer.vocab_size"
    with refused(TokenizerError, field=field, value=30_000) as caught:
        size = dataclasses.replace(tokenizer.section, vocab_size=30_000)
        train_tokenizer(documents[:40], size, tmp_path)
    assert not list(tmp_path.iterdir())
    largest = int(str(caught.value).split(f"--{field}=")[1].split()[0])
    works = dataclasses.replace(tokenizer.section, vocab_size=largest)
    assert train_tokenizer(documents[:40], works, tmp_path).vocab_size == largest
    with refused(TokenizerError, field=field, value=20) as caught:
        train_tokenizer(documents, dataclasses.replace(works, vocab_size=20), tmp_path)
    assert int(str(caught.value).split(f"--{field}=")[1].split()[0].rstrip(",")) > 20
    with refused(TokenizerError, field="config.data.source"):
        train_tokenizer([], works, tmp_path)


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "bpe"])
def test_what_the_texts_raise_is_not_taken_for_a_poor_vocabulary(kind, tmp_path):
    def texts(fault):
        yield from ["some words"] * 100
        raise fault

    for fault in (KeyboardInterrupt(), DataError("a file is damaged")):
        with pytest.raises(type(fault)) as caught:
            train_tokenizer(texts(fault), TokenizerSection(kind=kind, vocab_size=300), tmp_path)
        assert caught.value is fault
        assert not any(tmp_path.iterdir())


def test_sentinels_are_ids_that_no_text_has(tokenizer, documents, tmp_path):
    section = dataclasses.replace(tokenizer.section, sentinels=3)
    tokenizer = train_tokenizer(documents, section, tmp_path)
    names = ["[SPAN_0]", "[SPAN_1]", "[SPAN_2]"]
    assert tokenizer.vocab_size == 300
    assert tokenizer.pieces(tokenizer.special.sentinels) == names
    assert set(tokenizer.special.sentinels) <= set(tokenizer.special.never_hidden)
    (ids,) = tokenizer.encode([" ".join(names)])
    assert not set(tokenizer.special.sentinels) & set(ids)
    assert load_tokenizer(section, tmp_path).special == tokenizer.special
    with refused(TokenizerError, field="config.tokenizer.sentinels", value=0):
        load_tokenizer(dataclasses.replace(section, sentinels=0), tmp_path)


def test_sentinels_of_others_are_in_order():
    five = {"pad": 0, "unknown": 1, "cls": 2, "sep": 3, "mask": 4}
    extra = {"<extra_id_1>": 8, "<extra_id_10>": 5, "<extra_id_0>": 9, "[other]": 7}
    assert SpecialIds(**five, extra=extra).sentinels == (9, 8, 5)
    assert SpecialIds(**five).sentinels == ()


def test_a_text_is_cut_anew_by_a_seed(tokenizer, documents):
    text = documents[5].replace("\n", " ")
    section = tokenizer.section
    if section.kind != "sentencepiece" or section.algorithm == "bpe":
        with refused(TokenizerError, path=tokenizer.path, field="config.parallel.sampling"):
            tokenizer.sample(text, 0.2, 1)
        return
    drawn = [tokenizer.sample(text, 0.2, seed) for seed in (1, 2**31, 2**32 - 1, 1)]
    assert drawn[0] == drawn[3] != drawn[1]
    (best,) = tokenizer.encode([text])
    assert {tokenizer.decode(ids) for ids in drawn} == {tokenizer.decode(best)}


@pytest.mark.parametrize(("kind", "lowercase", "strip_accents"), [
    ("sentencepiece", True, True), ("sentencepiece", True, False), ("sentencepiece", False, True),
    ("sentencepiece", False, False), ("wordpiece", True, False), ("wordpiece", False, True),
])  # fmt: skip
def test_case_and_accents_are_those_of_the_settings(
    kind, lowercase, strip_accents, documents, tmp_path
):
    fields = {"lowercase": lowercase, "strip_accents": strip_accents}
    section = TokenizerSection(kind=kind, vocab_size=300, **fields)
    words = ["Émile Émile là là voilà", "ABER aber über ÜBER", "été Été emile Emile uber ete la"]
    texts = words * 30 + documents
    tokenizer = train_tokenizer(texts, section, tmp_path)
    check_tokenizer(tokenizer, texts)
    expected = "Émile ÜBER été"
    expected = expected.lower() if lowercase else expected
    if strip_accents:
        expected = expected.translate(str.maketrans("ÉÜéüà", "EUeua"))
    assert tokenizer.decode(tokenizer.encode(["Émile ÜBER été"])[0]) == expected
    composed, combining = tokenizer.encode(["bádé", "ba\u0301de\u0301"])
    assert kind == "wordpiece" or composed == combining
    found = follow_file(TokenizerSection(path=str(tokenizer.path)))
    assert (found.kind, found.vocab_size) == (kind, 300)
    assert {name: getattr(found, name) for name in fields} == fields
    check_tokenizer(load_tokenizer(found, tmp_path), texts)
    for name, value in fields.items():  # the error suggests the right setting
        wrong = dataclasses.replace(found, **{name: not value})
        with refused(TokenizerError, f"--config.tokenizer.{name}={value}", path=tokenizer.path):
            check_tokenizer(load_tokenizer(wrong, tmp_path), texts)


def test_every_frequent_character_of_a_text_has_an_entry(tmp_path):
    """Frequent characters are not limited to a fixed number, as Chinese requires."""
    characters = [chr(0x4E00 + i) for i in range(1_400)]
    texts = ["".join(characters[i : i + 100]) for i in range(0, 1_400, 100)] * 5
    section = TokenizerSection(kind="wordpiece", vocab_size=5_600)
    with refused(TokenizerError, "vocab_size=1405 ", field="config.tokenizer.vocab_size"):
        train_tokenizer(texts, section, tmp_path)
    section = dataclasses.replace(section, vocab_size=1_405)
    assert set(characters) < set(train_tokenizer(texts, section, tmp_path).entries)


# --- Offsets ---


def _hidden(character):
    category = unicodedata.category(character)
    return category[0] == "Z" or category in ("Cc", "Cf")


def _strip(text):
    kept = [i for i, character in enumerate(text) if not _hidden(character)]
    return text[kept[0] : kept[-1] + 1] if kept else ""


@settings(max_examples=200)
@given(text=st.text(alphabet=ALPHABET, min_size=1, max_size=40), data=st.data())
def test_offsets_of_any_text(tokenizer, text, data):
    """The tokens covering a span include all of its characters that became tokens.

    If the span starts and ends at token boundaries, they give back exactly the span.
    """
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert ids == tokenizer.encode([text])[0]
    assert offsets.shape == (len(ids), 2)
    assert (np.diff(offsets, axis=0) >= 0).all()
    for first, last in offsets:
        assert 0 <= first <= last <= len(text)
        piece = text[first:last]
        assert not piece or not (_hidden(piece[0]) or _hidden(piece[-1])), repr(piece)
        assert last == len(text) or last == first or unicodedata.category(text[last])[0] != "M"
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin + 1, len(text)))
    seen = {i for first, last in offsets for i in range(first, last)} & set(range(begin, end))
    tokens = cover(offsets, begin, end)
    if tokens is None:
        assert not seen
        return
    first, last = offsets[tokens[0], 0], offsets[tokens[1], 1]
    assert not seen or (first <= min(seen) and last > max(seen))
    if begin in offsets[:, 0] and end in offsets[:, 1]:
        assert _strip(text[first:last]) == _strip(text[begin:end]) or first < begin or last > end


def test_words_come_back_exactly(tokenizer):
    for text, word in (
        ("Beyonc\u00e9  bade", "Beyonc\u00e9"),
        ("Beyonce\u0301 bade", "Beyonce\u0301"),
        ("a \ufb01ne bade", "\ufb01ne"),
        ("bade (\u00bd) lamu", "\u00bd"),
        ("bade \u6771\u4eac lamu", "\u6771\u4eac"),
        ("\u00c5NGSTR\u00d6M  unit", "\u00c5NGSTR\u00d6M"),
        ("bade\u200b\u00a0 Lamu\n\n.", "Lamu"),
    ):
        ((_, offsets),) = tokenizer.encode_with_offsets([text])
        begin = text.index(word)
        first, last = cover(offsets, begin, begin + len(word))
        assert text[offsets[first, 0] : offsets[last, 1]] == word


def test_offsets_of_nothing():
    assert fit_offsets("", []).shape == (0, 2)
    assert cover(fit_offsets("  ", [(0, 2)]), 0, 2) is None
