"""A vocabulary of the user's own, with any config: its file tells kind, size and case."""

import dataclasses
import json
import logging

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.tokenizer import (
    check_tokenizer,
    follow_file,
    load_tokenizer,
    train_tokenizer,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DEFAULT = TokenizerSection()
WORDPIECE = TokenizerSection(kind="wordpiece", vocab_size=100)


def write(folder, entries):
    path = folder / "vocab.txt"
    path.write_text("".join(f"{entry}\n" for entry in [*SPECIAL, *entries]), encoding="utf-8")
    return str(path)


def with_path(section, path):
    return dataclasses.replace(section, path=str(path))


@pytest.mark.parametrize("section", [DEFAULT, WORDPIECE])
def test_kind_and_size_are_those_of_the_file(section, tmp_path, caplog):
    path = write(tmp_path, ["a", "b", "##a", "##b"])
    with caplog.at_level(logging.INFO):
        found = follow_file(with_path(section, path))
    assert (found.kind, found.vocab_size) == ("wordpiece", 9)
    assert (found.lowercase, found.strip_accents) == (True, True)
    assert "config.tokenizer.vocab_size=9" in caplog.text
    assert load_tokenizer(found, tmp_path).encode(["a ab"]) == [[5, 5, 8]]
    assert follow_file(found) == found


@pytest.mark.parametrize(("given", "section"), [
    ("tokenizer.kind", TokenizerSection(kind="sentencepiece")),
    ("tokenizer.vocab_size", TokenizerSection(vocab_size=100)),
])  # fmt: skip
def test_what_was_asked_for_and_is_not_so_is_an_error(given, section, tmp_path):
    found = follow_file(with_path(section, write(tmp_path, ["a"])), {given})
    with pytest.raises(TokenizerError, match=rf"set --config\.{given}="):
        load_tokenizer(found, tmp_path)


def test_a_cased_list_is_cased(tmp_path):
    path = write(tmp_path, ["Berlin", "caf\u00e9", "a", "##a", "b"])
    found = follow_file(with_path(DEFAULT, path))
    assert (found.lowercase, found.strip_accents) == (False, False)
    tokenizer = load_tokenizer(found, tmp_path)
    check_tokenizer(tokenizer, ["Berlin caf\u00e9 a"])
    assert tokenizer.pieces(tokenizer.encode(["Berlin caf\u00e9"])[0]) == ["Berlin", "caf\u00e9"]
    asked = with_path(dataclasses.replace(DEFAULT, lowercase=True), path)
    asked = follow_file(asked, {"tokenizer.lowercase"})
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.lowercase=False"):
        check_tokenizer(load_tokenizer(asked, tmp_path), [])


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("accents", [True, False, None])
def test_a_tokenizer_json_says_its_case(tmp_path, documents, lowercase, accents):
    trained = train_tokenizer(documents, dataclasses.replace(WORDPIECE, vocab_size=300), tmp_path)
    content = json.loads(trained.path.read_text())
    content["normalizer"] |= {"lowercase": lowercase, "strip_accents": accents}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    found = follow_file(with_path(DEFAULT, path))
    assert (found.kind, found.vocab_size, found.lowercase) == ("wordpiece", 300, lowercase)
    assert found.strip_accents == (lowercase if accents is None else accents)
    load_tokenizer(found, tmp_path)


@pytest.mark.parametrize(("stated", "expected"), [(77, 77), (None, 100)])
def test_a_tokenizer_json_states_its_longest_word(tmp_path, documents, stated, expected):
    """A vocab.txt has the 200 of BERT's code, `tokenizers` 100 where nothing is stated."""
    trained = train_tokenizer(documents, dataclasses.replace(WORDPIECE, vocab_size=300), tmp_path)
    content = json.loads(trained.path.read_text())
    content["model"].pop("max_input_chars_per_word")
    content["model"] |= {"max_input_chars_per_word": stated} if stated else {}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    found = follow_file(with_path(DEFAULT, path))
    assert found.max_word_chars == expected
    assert follow_file(with_path(DEFAULT, write(tmp_path, ["a"]))).max_word_chars == 200
    kept, lost = load_tokenizer(found, tmp_path).encode(["b" * expected, "b" * (expected + 1)])
    assert 1 not in kept
    assert lost == [1]


@pytest.mark.parametrize("cased", [True, False])
def test_a_sentencepiece_model_says_its_case(tmp_path, documents, cased):
    section = TokenizerSection(vocab_size=300, lowercase=not cased, strip_accents=not cased)
    trained = train_tokenizer(documents, section, tmp_path)
    found = follow_file(with_path(WORDPIECE, trained.path))
    assert (found.kind, found.vocab_size) == ("sentencepiece", 300)
    assert (found.lowercase, found.strip_accents) == (not cased, not cased)
    check_tokenizer(load_tokenizer(found, tmp_path), documents[:5])


def test_a_flipped_bit_in_a_sentencepiece_model_is_one_sentence(tmp_path, documents):
    """In a piece, which the library hands out as it is, and Python then cannot decode."""
    trained = train_tokenizer(documents, TokenizerSection(vocab_size=300), tmp_path)
    content = bytearray(trained.path.read_bytes())
    content[content.index(b"[MASK]") + 1] ^= 128
    trained.path.write_bytes(content)
    section = TokenizerSection(vocab_size=300)
    with pytest.raises(TokenizerError, match="is not a SentencePiece model"):
        load_tokenizer(section, tmp_path)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "spiece.model"])
@pytest.mark.parametrize("section", [DEFAULT, WORDPIECE])
def test_a_missing_file_is_no_such_file(tmp_path, name, section):
    for read in (follow_file, lambda section: load_tokenizer(section, tmp_path)):
        with pytest.raises(TokenizerError, match=rf"{name} cannot be read: No such file"):
            read(with_path(section, tmp_path / name))


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'{"model": 3}', b"\xff\xfe", b"[" * 100_000, b'{"model": {"vocab": {}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 99999999999}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": -7}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": "b"}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 0}}, "added_tokens": 5}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 0}}, "normalizer": [1]}',
    b'{"model": {"vocab": {"a": 0}}, "normalizer": {"type": "BertNormalizer"}}',
])  # fmt: skip
def test_a_damaged_tokenizer_json_is_one_sentence(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json (is damaged|lacks|holds)"):
        follow_file(with_path(DEFAULT, path))


def test_the_vocabulary_of_bert(real_data):
    found = follow_file(with_path(DEFAULT, real_data / "vocab" / "bert-base-uncased-vocab.txt"))
    uncased = {"lowercase": True, "strip_accents": True, "normalization": "identity"}
    expected = dataclasses.replace(DEFAULT, kind="wordpiece", vocab_size=30_522, **uncased)
    assert found == with_path(expected, found.path)


@pytest.mark.parametrize(("part", "rules", "words"), [
    ("pre_tokenizer", {"type": "Whitespace"}, "the pre_tokenizer Whitespace"),
    ("pre_tokenizer", None, "no pre_tokenizer"),
    ("normalizer", {"type": "Lowercase"}, "the normalizer Lowercase"),
    ("normalizer", "handle_chinese_chars", "handle_chinese_chars=false"),
])  # fmt: skip
def test_what_a_tokenizer_json_does_otherwise_is_told(
    part, rules, words, tmp_path, documents, caplog
):
    """Its entries were taken, and what else it says passed over."""
    trained = train_tokenizer(documents, dataclasses.replace(WORDPIECE, vocab_size=300), tmp_path)
    follow_file(with_path(DEFAULT, trained.path))
    assert "Here its entries alone" not in caplog.text
    content = json.loads(trained.path.read_text())
    if isinstance(rules, str):
        content[part][rules] = False
    else:
        content[part] = rules
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    follow_file(with_path(DEFAULT, path))
    assert f"theirs.json has {words}. Here its entries alone are used" in caplog.text
