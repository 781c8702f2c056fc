import dataclasses
import gzip
import re

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.normalization import refuse_lost_letters
from convbert_jax.data.tokenizer.tokenizer import (
    check_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

SAMPLE = [
    "The Amazon is a river in South America.\nIts basin covers 7,050,000 square kilometers.",
    "In 1905, Albert Einstein published four papers; the third introduced special relativity.",
    "Many naïve readers in São Paulo know the café.",
]


@pytest.fixture
def bert_lines(real_data) -> list[str]:
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def check(path, sample=SAMPLE, **fields) -> None:
    size = len(path.read_bytes().split(b"\n")) - 1
    fields = {"vocab_size": size, "lowercase": True, "strip_accents": True} | fields
    section = TokenizerSection(kind="wordpiece", path=str(path), **fields)
    check_tokenizer(load_tokenizer(section, path.parent), sample)


def write(path, lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def test_the_standard_vocabulary_passes(real_data):
    check(real_data / "vocab" / "bert-base-uncased-vocab.txt")


def test_the_vocabulary_of_the_convbert_repository_is_refused(real_data, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(
        gzip.decompress((real_data / "vocab" / "convbert-repo-vocab.txt.gz").read_bytes())
    )
    with pytest.raises(TokenizerError) as error:
        check(path)
    message = str(error.value)
    for fault in (
        "30522 of its lines end in CR LF",
        "1346 entries contain the replacement character U+FFFD",
        "528 of 1900 non-ASCII entries are UTF-8 once misread as gbk",
        "1008 entries are duplicates",
        "use the standard bert-base-uncased vocabulary of the same length",
    ):
        assert fault in message
    assert "\n" not in message
    assert "unknown" not in message


def test_carriage_returns_alone(bert_lines, tmp_path):
    with pytest.raises(TokenizerError, match="30522 of its lines end in CR LF; use the standard"):
        check(write(tmp_path / "vocab.txt", bert_lines, end="\r\n"))


@pytest.mark.parametrize("charset", ["cp1252", "latin-1"])
def test_entries_misread_in_a_western_character_set(bert_lines, tmp_path, charset):
    def misread(line):
        try:
            return line.encode().decode(charset)
        except UnicodeDecodeError:
            return line

    lines = [misread(line) for line in bert_lines]
    with pytest.raises(TokenizerError, match="non-ASCII entries are UTF-8 once misread as"):
        check(write(tmp_path / "vocab.txt", lines))


def test_one_wrong_entry_is_a_duplicate(bert_lines, tmp_path):
    bert_lines[20_000] = bert_lines[10_000]
    with pytest.raises(TokenizerError, match="1 entries are duplicates"):
        check(write(tmp_path / "vocab.txt", bert_lines))


def test_missing_special_token(bert_lines, tmp_path):
    bert_lines[103] = "[MUSK]"
    with pytest.raises(TokenizerError, match=r"lacks the special tokens \[MASK\]"):
        check(write(tmp_path / "vocab.txt", bert_lines))


def test_moved_special_tokens(bert_lines, tmp_path):
    bert_lines.insert(1, "[extra]")
    with pytest.raises(TokenizerError, match=r"moved .*\[MASK\] is 104"):
        check(write(tmp_path / "vocab.txt", bert_lines))


SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize("entries", [
    ["[PAD]", *SPECIAL, *(f"[unused{i}]" for i in range(50))],  # a Korean list of its own
    ["[PAD]", *(f"[unused{i}]" for i in range(100)), *SPECIAL],  # one unused entry more
    ["[PAD]", *(f"[unused{i}]" for i in range(1, 40)), *SPECIAL],
])  # fmt: skip
def test_lists_of_other_makers_have_an_order_of_their_own(entries, tmp_path):
    """They were refused, with the advice to take an English vocabulary."""
    check(write(tmp_path / "vocab.txt", [*entries, *"abc"]), ["a b c"])


@pytest.mark.parametrize("entries", [
    ["[PAD]", "[unused0]", "[unused2]", "[unused1]", *SPECIAL],
    ["[PAD]", "[unused0]", "[unused1]", *SPECIAL[:1], "[extra]", *SPECIAL[1:]],
])  # fmt: skip
def test_their_order_must_be_whole(entries, tmp_path):
    with pytest.raises(TokenizerError, match=r"were moved .*; put an undamaged copy of it there"):
        check(write(tmp_path / "vocab.txt", [*entries, *"abc"]), ["a b c"])


def test_advice_for_a_list_that_is_not_berts(tmp_path):
    lines = ["[PAD]", *SPECIAL, "\u3042", "\u3044"]
    with pytest.raises(TokenizerError, match=r"7 of its lines end in CR LF; save it with LF alone"):
        check(write(tmp_path / "vocab.txt", lines, end="\r\n"), [])
    with pytest.raises(TokenizerError, match=r"duplicates, one of them '\u3042'; put an undamaged"):
        check(write(tmp_path / "vocab.txt", [*lines, "\u3042"]), [])


@pytest.mark.parametrize(("text", "shown", "left"), [
    ("\u092f\u0939 \u0926\u0941\u0928", "\u0926\u0941\u0928", "\u0926\u0928"),
    (9 * "\u3042" + "\u30da\u3044" * 9, "\u30da\u3044", "\u30d8\u3044"),
    ("\u0e17\u0e35\u0e48", "\u0e17\u0e35\u0e48", "\u0e17"),
])  # fmt: skip
def test_stripped_letters_are_refused_before_a_vocabulary_is_trained(text, shown, left):
    """Hindi lost its vowels and Japanese its voicing, without a word."""
    section = TokenizerSection(strip_accents=True)
    with pytest.raises(TokenizerError) as error:
        refuse_lost_letters(section, [*SAMPLE, *[text] * 100])
    message = str(error.value)
    there, read = re.search("'(.*)' would be read as '(.*)'; set --config.tok", message).groups()
    assert shown in there
    assert left in read
    assert message.endswith("set --config.tokenizer.strip_accents=False.")
    refuse_lost_letters(section, [*SAMPLE * 100, text])  # a word among others
    refuse_lost_letters(dataclasses.replace(section, strip_accents=False), [text])


@pytest.mark.parametrize("text", [
    "Voil\u00e0, le caf\u00e9", "\u0410\u043b\u0435\u043a\u0441\u0435\u0439",
    "\ud55c\uad6d\uc5b4", "\u0627\u0644\u0633\u0651\u064e\u0644\u0627\u0645",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd", "Ti\u1ebfng Vi\u1ec7t", "\u2764\ufe0f",
])  # fmt: skip
def test_accents_and_points_may_be_stripped(text):
    refuse_lost_letters(TokenizerSection(strip_accents=True), [text])


def test_wrong_size_names_the_right_one(real_data):
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.vocab_size=30522"):
        check(path, vocab_size=30_000)


def test_uncased_vocabulary_with_case_kept(real_data):
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.lowercase=True"):
        check(path, lowercase=False)


def test_uncased_vocabulary_with_accents_kept(real_data):
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.strip_accents=True"):
        check(path, strip_accents=False)


def test_cased_vocabulary_lower_cased(bert_lines, tmp_path):
    lines = [line.capitalize() if line.isalpha() else line for line in bert_lines]
    lines = list(dict.fromkeys(lines))
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.lowercase=False"):
        check(write(tmp_path / "vocab.txt", lines))


def test_accented_vocabulary_stripped(bert_lines, tmp_path):
    lines = [*bert_lines, *(f"{line}é" for line in bert_lines[2000:3000])]
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.strip_accents=False"):
        check(write(tmp_path / "vocab.txt", lines))


def test_text_in_another_script_is_unknown(real_data):
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    with pytest.raises(TokenizerError, match=r"config\.tokenizer\.max_unknown_rate=0\.02"):
        check(path, sample=["ᚠᛇᚻ ᛒᛦᚦ ᚠᚱᚩᚠᚢᚱ ᚠᛁᚱᚪ ᚷᛖᚻᚹᛦᛚᚳᚢᛗ and two words"])
    check(path, sample=["ᚠᛇᚻ ᛒᛦᚦ"], max_unknown_rate=1.0)


def test_user_defined_special_symbols_leak_and_are_refused(documents, tmp_path):
    import sentencepiece

    path = tmp_path / "leaky.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents),
            model_writer=file,
            vocab_size=300,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            user_defined_symbols=["[CLS]", "[SEP]", "[MASK]"],
            normalization_rule_name="nmt_nfkc_cf",
            minloglevel=2,
        )
    section = TokenizerSection(vocab_size=300, path=str(path), strip_accents=False)
    tokenizer = load_tokenizer(section, tmp_path)
    with pytest.raises(TokenizerError, match=r"'\[CLS\]' is encoded as the special token"):
        check_tokenizer(tokenizer, documents)


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
def test_trained_vocabularies_pass(kind, lowercase, strip_accents, documents, tmp_path):
    section = TokenizerSection(
        kind=kind, vocab_size=300, lowercase=lowercase, strip_accents=strip_accents
    )
    texts = documents + ["Voilà, le café préféré."] * 20
    check_tokenizer(train_tokenizer(texts, section, tmp_path), texts)


def test_model_that_keeps_case_needs_the_setting(documents, tmp_path):
    cased = TokenizerSection(vocab_size=300, lowercase=False)
    path = train_tokenizer(documents, cased, tmp_path).path
    section = TokenizerSection(vocab_size=300, path=str(path), lowercase=True)
    with pytest.raises(
        TokenizerError, match=r"keeps upper-case letters; set --config\.tokenizer\.lo"
    ):
        check_tokenizer(load_tokenizer(section, tmp_path), documents)
