"""Byte-level BPE: lossless on any text, with the special tokens and rules of its file."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.layouts import split_sentences
from convbert_jax.data.tasks.labelled_text import encode_words
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    follow_file,
    load_tokenizer,
    make_tokenizer,
    train_tokenizer,
)
from convbert_jax.inference.texts import encode_masked, fill_mask
from convbert_jax.interfaces import SpecialIds
from tests.refusals import refused

MODERNBERT = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
LFM2 = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Splits words, numbers of up to three digits and line ends, as LFM2 and Llama 3 do.
LFM2_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


@pytest.fixture(scope="module")
def tokenizer(trained):
    return trained(kind="bpe")


def write_foreign(path, texts, special, *, words="", form=None, space=False, spaces=(), **model):
    """Writes a tokenizer.json of another maker, with `special` tokens first."""
    made = tokenizers.Tokenizer(models.BPE(**model))
    made.normalizer = form
    parts = [pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not words)]
    if words:
        parts.insert(0, pre_tokenizers.Split(tokenizers.Regex(words), "isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence(parts) if words else parts[0]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(iter(texts), trainer)
    made.add_tokens([tokenizers.AddedToken(run, normalized=True) for run in spaces])
    made.enable_truncation(4)
    made.enable_padding()
    made.save(str(path))
    return path


def open_foreign(path) -> Tokenizer:
    return load_tokenizer(follow_file(TokenizerSection(path=str(path))), path.parent)


@settings(max_examples=300)
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert not set(tokenizer.special.by_name.values()) & set(ids)
    lines = tokenizer.split_lines(text)
    assert "".join(lines).strip() == text.strip()
    assert "".join(map(tokenizer.decode, tokenizer.encode(lines))).strip() == text.strip()


def test_a_trained_file_is_loaded_by_its_path(tokenizer, documents, tmp_path):
    found = follow_file(TokenizerSection(path=str(tokenizer.path)))
    assert (found.kind, found.vocab_size) == ("bpe", 300)
    assert (found.lowercase, found.strip_accents, found.normalization) == (False, False, "identity")
    again = load_tokenizer(found, tmp_path)
    assert again.special == tokenizer.special
    assert again.encode(documents[:9]) == tokenizer.encode(documents[:9])
    check_tokenizer(again, [*documents, "\u0939 \u00c9 \u6771"])
    composing = dataclasses.replace(tokenizer.section, normalization="nfc")
    composed = train_tokenizer(documents, composing, tmp_path)
    assert composed.decode(composed.encode(["Cafe\u0301  X "])[0]) == "Caf\u00e9  X "
    assert follow_file(TokenizerSection(path=str(composed.path))).normalization == "nfc"


@pytest.mark.parametrize(("special", "options", "expected", "form"), [
    (
        MODERNBERT,
        {"form": normalizers.NFC(), "spaces": ["    ", "  "]},
        {"unknown": 0, "cls": 1, "sep": 2, "pad": 3, "mask": 4},
        "nfc",
    ),
    (
        ["<|endoftext|>", "<|padding|>"],  # GPT-NeoX
        {"form": normalizers.NFC(), "spaces": ["  "]},
        {"unknown": 1, "cls": 0, "sep": 0, "pad": 1, "mask": 1},
        "nfc",
    ),
    (
        LFM2,
        {"words": LFM2_WORDS, "ignore_merges": True},
        {"unknown": 0, "cls": 1, "sep": 4, "pad": 0, "mask": 0},
        "identity",
    ),
    (
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],  # RoBERTa
        {"space": True},
        {"cls": 0, "pad": 1, "sep": 2, "unknown": 3, "mask": 4},
        "identity",
    ),
], ids=["modernbert", "neox", "lfm2", "roberta"])  # fmt: skip
def test_files_of_other_makers(special, options, expected, form, documents, tmp_path):
    path = write_foreign(tmp_path / "tokenizer.json", documents, special, **options)
    ours, theirs = open_foreign(path), tokenizers.Tokenizer.from_file(str(path))
    assert ours.special == SpecialIds(**expected)
    assert (ours.kind, ours.section.normalization) == ("bpe", form)
    assert ours.entries == [theirs.id_to_token(i) for i in range(theirs.get_vocab_size())]
    check_tokenizer(ours, documents)
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    space = " " if "space" in options else ""
    texts = [*documents[:20], "a    b\n\n  c's 12345", " \u00e9\u6771\U0001f600 ", special[0]]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids).removeprefix(space) == text.removeprefix(space)


def test_files_that_lose_text_or_lack_special_tokens_are_refused(documents, tmp_path):
    path = tmp_path / "tokenizer.json"
    lowercase = normalizers.Lowercase()
    for special, options in ((MODERNBERT, {"form": lowercase}), (["[CLS]"], {})):
        write_foreign(path, documents, special, **options)
        with refused(TokenizerError, path=path, field="config.tokenizer.path"):
            open_foreign(path)
    content = json.loads(path.read_text())
    content["model"]["merges"] = [["no", "merge"]]
    path.write_text(json.dumps(content))
    with refused(TokenizerError, path=path, field="config.tokenizer.path"):
        open_foreign(path)
    write_foreign(path, documents, LFM2)
    section = follow_file(TokenizerSection(path=str(path)))
    make_tokenizer(section, tmp_path, documents, lambda _: documents, is_generative=True)
    with refused(TokenizerError, path=path, field="config.tokenizer.path"):
        make_tokenizer(section, tmp_path, documents, lambda _: documents, is_generative=False)


# --- Words, lines and masks ---


def test_begins_of_words(tokenizer):
    text = "lamu bade\nrafa 42 (tiko), nifo."
    (ids,) = tokenizer.encode([text])
    begins = tokenizer.begins_word
    assert sum(begins[ids]) == len(text.split()) - 1  # without the first
    assert not begins[list(tokenizer.special.by_name.values())].any()
    parts = [tokenizer.split_piece(i) for i in ids]
    assert "".join((" " if begins else "") + part for begins, part in parts).split() == text.split()
    (ids,) = tokenizer.encode([" \u6771"])
    assert len(ids) > 2
    assert tokenizer.split_piece(ids[-1])[0] is False


def test_offsets_of_characters_of_several_bytes(tokenizer):
    text = "bade \u6771\u4eac \U0001f600lamu"
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    for begin, character in enumerate(text):
        tokens = (offsets[:, 0] <= begin) & (begin < offsets[:, 1])
        assert tokens.any() != character.isspace()
    assert tokenizer.decode(np.asarray(ids)[offsets[:, 0] >= text.index("\u6771")]).endswith("lamu")


def test_sentences_keep_the_spaces_between_them(tokenizer):
    text = "Bade lamu.  Rafa tiko!\nNifo sane. Dume.\n"
    lines = tokenizer.split_lines(text)
    parts = [part for line in lines for part in split_sentences(line, keeps_spaces=True)]
    assert len(parts) == 4
    assert "".join(map(tokenizer.decode, tokenizer.encode(parts))) == text


def test_words_of_a_sentence_are_those_of_its_text(tokenizer):
    words = ["Bade", "lamu", "rafa", "."]
    rows = encode_words(tokenizer, [words], [None], length=32).rows
    ids = rows.by_token["tokens"][0, 1 : rows.lengths[0] - 1]
    assert tokenizer.decode(ids) == "Bade lamu rafa ."
    begins = rows.by_token["words"][0]
    assert sorted(begins[begins >= 0]) == [0, 1, 2, 3]


def test_a_mask_replaces_a_word_and_the_space_before_it(tokenizer):
    special = tokenizer.special
    (whole,) = tokenizer.encode(["bade lamu."])
    (first,) = tokenizer.encode(["bade"])
    (last,) = tokenizer.encode(["."])
    assert encode_masked(tokenizer, "bade [MASK].") == [*first, special.mask, *last]
    begins, piece = tokenizer.split_piece(whole[len(first)])
    assert begins
    assert fill_mask(tokenizer, "bade [MASK].", 0, whole[len(first)]) == f"bade {piece}."
    assert fill_mask(tokenizer, "bade [MASK]", 0, last[0]) == "bade."
