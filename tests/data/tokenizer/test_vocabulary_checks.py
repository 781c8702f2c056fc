import dataclasses
import gzip

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
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
    section = TokenizerSection(kind="wordpiece", path=str(path), vocab_size=size)
    section = dataclasses.replace(section, **fields)
    check_tokenizer(load_tokenizer(section, path.parent), section, sample)


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
    with pytest.raises(TokenizerError, match=r"tokens of the text are unknown.*max_unknown_rate"):
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
        check_tokenizer(tokenizer, section, documents)


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
def test_trained_vocabularies_pass(kind, lowercase, strip_accents, documents, tmp_path):
    section = TokenizerSection(
        kind=kind, vocab_size=300, lowercase=lowercase, strip_accents=strip_accents
    )
    texts = documents + ["Voilà, le café préféré."] * 20
    check_tokenizer(train_tokenizer(texts, section, tmp_path), section, texts)


def test_model_that_keeps_case_needs_the_setting(documents, tmp_path):
    cased = TokenizerSection(vocab_size=300, lowercase=False)
    path = train_tokenizer(documents, cased, tmp_path).path
    section = TokenizerSection(vocab_size=300, path=str(path))
    with pytest.raises(
        TokenizerError, match=r"keeps upper-case letters; set --config\.tokenizer\.lo"
    ):
        check_tokenizer(load_tokenizer(section, tmp_path), section, documents)
