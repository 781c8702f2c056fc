"""User-provided vocabularies: kind, size and case come from the file; damage is detected."""

import gzip
import json
import logging

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    follow_file,
    load_tokenizer,
)
from convbert_jax.interfaces import SpecialIds
from tests.refusals import refused

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SAMPLE = [
    "The Amazon is a river in South America.\nIts basin covers 7,050,000 square kilometers.",
    "In 1905, Albert Einstein published four papers; the third introduced special relativity.",
    "Many naïve readers in São Paulo know the café.",
]
BERT = "bert-base-uncased"


def write(folder, entries, end="\n"):
    path = folder / "vocab.txt"
    path.write_bytes("".join(entry + end for entry in entries).encode())
    return path


def follow(path, given=(), **fields):
    return follow_file(TokenizerSection(path=str(path), **fields), given)


def check(path, sample=SAMPLE, **fields) -> None:
    size = len(path.read_bytes().split(b"\n")) - 1
    fields = {"vocab_size": size, "lowercase": True, "strip_accents": True} | fields
    section = TokenizerSection(kind="wordpiece", path=str(path), **fields)
    check_tokenizer(load_tokenizer(section, path.parent), sample)


@pytest.fixture
def bert_file(real_data):
    return real_data / "vocab" / "bert-base-uncased-vocab.txt"


@pytest.fixture
def bert_lines(bert_file):
    return bert_file.read_text(encoding="utf-8").split("\n")[:-1]


# --- Settings from the file ---


def test_the_vocabulary_of_bert(bert_file, tmp_path):
    found = follow(bert_file)
    uncased = {"lowercase": True, "strip_accents": True, "normalization": "identity"}
    expected = TokenizerSection(kind="wordpiece", vocab_size=30_522, path=found.path, **uncased)
    assert found == expected
    tokenizer = load_tokenizer(found, tmp_path)
    check_tokenizer(tokenizer, SAMPLE)
    assert tokenizer.special == SpecialIds(pad=0, unknown=100, cls=101, sep=102, mask=103)
    assert tokenizer.encode(["Hello, WORLD!"]) == [[7592, 1010, 2088, 999]]
    assert tokenizer.pieces(tokenizer.encode(["unaffable"])[0]) == ["una", "##ffa", "##ble"]
    assert tokenizer.encode(["天x"]) == tokenizer.encode(["天 x"])  # ideographs are separate tokens


@pytest.mark.parametrize("fields", [{}, {"kind": "wordpiece", "vocab_size": 100}])
def test_kind_and_size_are_those_of_the_file(fields, tmp_path, caplog):
    path = write(tmp_path, [*SPECIAL, "a", "b", "##a", "##b"])
    with caplog.at_level(logging.INFO):
        found = follow(path, **fields)
    assert (found.kind, found.vocab_size, found.max_word_chars) == ("wordpiece", 9, 200)
    assert (found.lowercase, found.strip_accents) == (True, True)
    assert "config.tokenizer.vocab_size=9" in caplog.text
    assert load_tokenizer(found, tmp_path).encode(["a ab"]) == [[5, 5, 8]]
    assert follow_file(found) == found
    for name, wrong, right in (("kind", "sentencepiece", "wordpiece"), ("vocab_size", 100, 9)):
        asked = follow(path, {f"tokenizer.{name}"}, **{name: wrong})
        right = f"--config.tokenizer.{name}={right}"
        with refused(TokenizerError, right, field=f"config.tokenizer.{name}", value=wrong):
            load_tokenizer(asked, tmp_path)


def test_a_cased_list_is_cased(tmp_path):
    path = write(tmp_path, [*SPECIAL, "Berlin", "café", "a", "##a", "b"])
    found = follow(path)
    assert (found.lowercase, found.strip_accents) == (False, False)
    tokenizer = load_tokenizer(found, tmp_path)
    check_tokenizer(tokenizer, ["Berlin café a"])
    assert tokenizer.pieces(tokenizer.encode(["Berlin café"])[0]) == ["Berlin", "café"]
    asked = follow(path, {"tokenizer.lowercase"}, lowercase=True)
    with refused(TokenizerError, "--config.tokenizer.lowercase=False", path=path):
        check_tokenizer(load_tokenizer(asked, tmp_path), [])


@pytest.fixture
def rewrite(trained, tmp_path):
    """rewrite(change): a trained tokenizer.json after `change(content)`."""

    def write(change):
        content = json.loads(trained(kind="wordpiece").path.read_text())
        change(content)
        path = tmp_path / "theirs.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_a_tokenizer_json_says_case_and_longest_word(rewrite, tmp_path):
    """Default word length: 200 for vocab.txt as in BERT's code, 100 for `tokenizers`."""
    for lowercase in (True, False):
        for accents in (True, False, None):
            rules = {"lowercase": lowercase, "strip_accents": accents}
            found = follow(rewrite(lambda content: content["normalizer"].update(rules)))  # noqa: B023
            assert (found.kind, found.vocab_size, found.lowercase) == ("wordpiece", 300, lowercase)
            assert found.strip_accents == (lowercase if accents is None else accents)
            load_tokenizer(found, tmp_path)
    for stated, expected in ((77, 77), (None, 100)):
        path = rewrite(lambda content: content["model"].pop("max_input_chars_per_word"))
        if stated:
            path = rewrite(lambda content: content["model"].update(max_input_chars_per_word=stated))  # noqa: B023
        found = follow(path)
        assert found.max_word_chars == expected
        tokenizer = load_tokenizer(found, tmp_path)
        kept, lost = tokenizer.encode(["b" * expected, "b" * (expected + 1)])
        assert 1 not in kept
        assert lost == [1]


def test_rules_of_a_tokenizer_json_that_are_not_followed_are_named(rewrite, caplog):
    follow(rewrite(lambda content: None))
    assert "theirs.json" not in caplog.text
    for part, rules, words in (
        ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace"),
        ("pre_tokenizer", None, "pre_tokenizer"),
        ("normalizer", {"type": "Lowercase"}, "Lowercase"),
        ("normalizer", {"handle_chinese_chars": False}, "handle_chinese_chars=false"),
    ):
        caplog.clear()

        def change(content, part=part, rules=rules):
            kept = content[part] if rules and "type" not in rules else {}
            content[part] = rules and kept | rules

        follow(rewrite(change))
        (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
        assert words in warning.getMessage()


# --- Damage ---


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'{"model": 3}', b"\xff\xfe", b"[" * 100_000, b'{"model": {"vocab": {}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 99999999999}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": -7}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": "b"}}}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 0}}, "added_tokens": 5}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": 0}}, "normalizer": [1]}',
    b'{"model": {"vocab": {"a": 0}}, "normalizer": {"type": "BertNormalizer"}}',
    b'{"model": {"type": "BPE", "vocab": {"a": 0}}}', b'{"model": {"type": "WordPiece", '
    b'"max_input_chars_per_word": "7", "vocab": {"a": 0}}}',
], ids=range(15))  # fmt: skip
def test_a_damaged_tokenizer_json_is_named(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with refused(TokenizerError, path=path) as caught:
        follow(path)
    assert "\n" not in str(caught.value)


def test_other_files_that_are_no_vocabulary_are_named(trained, tmp_path):
    for name in ("vocab.txt", "tokenizer.json", "spiece.model"):
        path = tmp_path / name
        for read in (follow, lambda path: load_tokenizer(TokenizerSection(path=str(path)), "")):
            with refused(TokenizerError, path=path, field="config.tokenizer.path"):
                read(path)
    for name, kind, content in (
        ("vocab.txt", "wordpiece", b"[PAD]\n\xff\n"),
        ("vocab.txt", "wordpiece", b"\xef\xbb\xbf[PAD]\n"),
        ("a.pieces", "pieces", b"<pad>\n\xff\n"),
        ("a.pieces", "pieces", b"a\nb\n"),
        ("a.model", "sentencepiece", b'{"version": 1}'),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with refused(TokenizerError, path=path):
            Tokenizer(TokenizerSection(kind=kind), path)
    # A flipped bit in a piece: the library returns it, and Python cannot decode it.
    content = bytearray(trained().path.read_bytes())
    content[content.index(b"[MASK]") + 1] ^= 128
    path.write_bytes(content)
    with refused(TokenizerError, path=path, field="config.tokenizer.path"):
        follow(path)


def test_the_vocabulary_of_the_convbert_repository_is_refused(real_data, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(
        gzip.decompress((real_data / "vocab" / "convbert-repo-vocab.txt.gz").read_bytes())
    )
    faults = (30_522, "CR LF", 1_346, "U+FFFD", 528, 1_900, "gbk", 1_008, BERT)
    with refused(TokenizerError, *faults, path=path) as caught:
        check(path)
    assert "\n" not in str(caught.value)
    assert "max_unknown_rate" not in str(caught.value)  # the cause, not the effect


def _misread(charset):
    def read(line):
        try:
            return line.encode().decode(charset)
        except UnicodeDecodeError:
            return line

    return lambda lines: [read(line) for line in lines]


def _changed(index, entry):
    return lambda lines: [*lines[:index], entry, *lines[index + 1 :]]


@pytest.mark.parametrize(("change", "mentions"), [
    (lambda lines: [f"{line}\r" for line in lines], ["CR LF", 30_522, BERT]),
    (_misread("cp1252"), ["cp1252", BERT]),
    (_misread("latin-1"), ["cp1252", BERT]),
    (_changed(20_000, "the"), ["'the'", BERT]),
    (_changed(103, "[MUSK]"), ["[MASK]"]),
    (lambda lines: [lines[0], "[extra]", *lines[1:]], ["[MASK]", 104]),
    (
        lambda lines: dict.fromkeys(line.capitalize() if line.isalpha() else line
                                    for line in lines),
        ["--config.tokenizer.lowercase=False"],
    ),
    (
        lambda lines: [*lines, *(f"{line}é" for line in lines[2000:3000])],
        ["--config.tokenizer.strip_accents=False"],
    ),
], ids=range(8))  # fmt: skip
def test_a_damaged_copy_of_berts_list(change, mentions, bert_lines, tmp_path):
    path = write(tmp_path, change(bert_lines))
    with refused(TokenizerError, *mentions, path=path):
        check(path)


def test_settings_and_texts_that_do_not_fit_a_list(bert_file):
    runes = ["ᚠᛇᚻ ᛒᛦᚦ ᚠᚱᚩᚠᚢᚱ ᚠᛁᚱᚪ ᚷᛖᚻᚹᛦᛚᚳᚢᛗ and two words"]
    for mention, fields in (
        ("--config.tokenizer.vocab_size=30522", {"vocab_size": 30_000}),
        ("--config.tokenizer.lowercase=True", {"lowercase": False}),
        ("--config.tokenizer.strip_accents=True", {"strip_accents": False}),
        ("config.tokenizer.max_unknown_rate=0.02", {"sample": runes}),
    ):
        with refused(TokenizerError, mention, path=bert_file):
            check(bert_file, **fields)
    check(bert_file, runes, max_unknown_rate=1.0)


def test_lists_of_other_makers_have_an_order_of_their_own(tmp_path):
    """The special tokens may stand in other orders, as in vocabularies of other publishers."""
    pad, *rest = SPECIAL
    unused = [f"[unused{i}]" for i in range(100)]
    for entries in ([*SPECIAL, *unused[:50]], [pad, *unused, *rest], [pad, *unused[1:40], *rest]):
        check(write(tmp_path, [*entries, *"abc"]), ["a b c"])
    for entries in (
        [pad, unused[0], unused[2], unused[1], *rest],
        [pad, *unused[:2], rest[0], "[extra]", *rest[1:]],
    ):
        with refused(TokenizerError, "[MASK]") as caught:
            check(write(tmp_path, [*entries, *"abc"]), ["a b c"])
        assert BERT not in str(caught.value)
    for entries, end, mentions in (
        ([*SPECIAL, "あ", "い"], "\r\n", ("CR LF", 7)),
        ([*SPECIAL, "あ", "い", "あ"], "\n", ("'あ'",)),
    ):
        with refused(TokenizerError, *mentions) as caught:
            check(write(tmp_path, entries, end), [])
        assert BERT not in str(caught.value)


def test_special_tokens_that_come_out_of_text_are_refused(documents, tmp_path):
    import sentencepiece

    path = tmp_path / "leaky.model"
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    pieces = {"pad_piece": "[PAD]", "unk_piece": "[UNK]"}
    symbols = ["[CLS]", "[SEP]", "[MASK]"]
    rules = {"normalization_rule_name": "nmt_nfkc_cf", "minloglevel": 2}
    options = {"vocab_size": 300, "user_defined_symbols": symbols} | ids | pieces | rules
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents), model_writer=file, **options
        )
    section = TokenizerSection(vocab_size=300, path=str(path), strip_accents=False)
    with refused(TokenizerError, "[CLS]", path=path):
        check_tokenizer(load_tokenizer(section, tmp_path), documents)
