"""Text in other languages: what a vocabulary keeps, and which settings are refused."""

# ruff: noqa: RUF001  (the tests need look-alike characters)
import contextlib
import dataclasses
import itertools
import logging
import random
import re
import unicodedata

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.normalization import choose_normalization, refuse_lost_letters
from convbert_jax.data.tokenizer.tokenizer import (
    check_tokenizer,
    follow_file,
    load_tokenizer,
    settle_normalization,
    train_tokenizer,
)
from tests.language_texts import make_texts
from tests.refusals import refused

FULL_WIDTH = [
    "今天天气很好，我们一起去公园吧！",
    "他问：“你叫什么名字？”",
    "会议于（上海）举行；价格是１２３元。",
]
# The 3,755 common characters of GB2312, level 1.
HANZI = [
    character
    for high, low in itertools.product(range(0xB0, 0xD8), range(0xA1, 0xFF))
    if (character := bytes([high, low]).decode("gb2312", "ignore"))
]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TURKISH = "İstanbul'da ışık İNCİ okullar ÇİÇEK Irmak göl büyük ırmağı İzmirliler"
CHEROKEE = "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᎠᏂᏣᎳᎩ ᎤᏁᎬᎢ ᏗᎦᎴᏅᎯ"


def train(texts, folder, *, is_generative=False, **fields):
    section = TokenizerSection(vocab_size=300, **fields)
    section = settle_normalization(section, texts, is_generative=is_generative)
    return train_up_to(texts, section, folder)


def train_up_to(texts, section, folder):
    """Train a vocabulary; on an error, retry once with the size that it suggests."""
    try:
        return train_tokenizer(texts, section, folder)
    except TokenizerError as error:
        advised = int(re.search(r"--config\.tokenizer\.vocab_size=(\d+)", str(error))[1])
        return train_tokenizer(texts, dataclasses.replace(section, vocab_size=advised), folder)


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer.encode([text])[0])


def without_spaces(text):
    return "".join(text.split())


# --- Default settings ---


@pytest.mark.parametrize(("language", "kind"), [
    ("german", "sentencepiece"), ("turkish", "sentencepiece"), ("turkish", "wordpiece"),
    ("chinese", "wordpiece"), ("japanese", "sentencepiece"), ("thai", "wordpiece"),
    ("arabic", "sentencepiece"), ("hindi", "sentencepiece"), ("korean", "wordpiece"),
])  # fmt: skip
def test_a_default_vocabulary_keeps_the_letters_of_a_language(language, kind, tmp_path, caplog):
    """Covers umlauts (German) and vowel signs (Hindi), among others."""
    texts = make_texts(language, 200)
    caplog.set_level(logging.INFO)
    tokenizer = train(texts, tmp_path, kind=kind)
    check_tokenizer(tokenizer, texts)
    keeps_case = language == "turkish"
    assert tokenizer.section.lowercase is not keeps_case
    assert tokenizer.section.strip_accents is False
    for text in texts[:50]:
        expected = text if keeps_case else text.lower()
        if kind == "sentencepiece":
            expected = unicodedata.normalize("NFKC", expected)
        assert without_spaces(round_trip(tokenizer, text)) == without_spaces(expected)
    (line,) = (r.getMessage() for r in caplog.records if "->" in r.getMessage())
    examples = re.findall(r"'([^']+)' -> '([^']+)'", line)
    assert len(examples) == 3
    for word, read in examples:
        assert any(word in text for text in texts)
        assert read == " ".join(tokenizer.normalize(word).split())


def test_some_words_of_turkish_do_not_decide_about_case():
    """Foreign names and phonetic signs also occur in English encyclopedias."""
    english = "The city of Istanbul lies on both sides of the strait in the north west of it. " * 50
    assert choose_normalization(TokenizerSection(), [english, TURKISH[:9], "/ðə/"]).lowercase
    assert not choose_normalization(TokenizerSection(), [english, TURKISH * 9]).lowercase
    assert not choose_normalization(TokenizerSection(), ["Azərbaycan dili"]).lowercase
    for fields in (
        {"lowercase": True, "strip_accents": True, "normalization": "nfkc"},
        {"lowercase": False, "strip_accents": True, "normalization": "identity"},
    ):  # explicit settings stay
        section = TokenizerSection(**fields)
        for is_generative in (True, False):
            assert choose_normalization(section, [TURKISH], is_generative=is_generative) == section


def test_a_loaded_vocabulary_has_what_was_chosen(tmp_path):
    made = train([TURKISH] * 30, tmp_path)
    section = TokenizerSection(vocab_size=made.vocab_size)
    found = load_tokenizer(section, tmp_path)
    assert found.section == made.section
    assert (found.section.lowercase, found.section.normalization) == (False, "nfkc")
    with refused(TokenizerError, field="config.tokenizer.lowercase", value=True):
        load_tokenizer(dataclasses.replace(section, lowercase=True), tmp_path)
    by_file = dataclasses.replace(section, path=str(made.path))
    assert load_tokenizer(by_file, tmp_path).section == follow_file(by_file)
    assert follow_file(by_file, {"tokenizer.lowercase"}).lowercase is False


# --- Lower case, width and Unicode normalization ---


@pytest.mark.parametrize(("kind", "strip_accents"), [
    ("sentencepiece", True), ("sentencepiece", False), ("wordpiece", True), ("wordpiece", False),
])  # fmt: skip
def test_no_entry_of_a_lower_case_vocabulary_is_upper_case(kind, strip_accents, tmp_path):
    """Covers "İ" and Cherokee, which SentencePiece's case folding handles differently."""
    texts = [TURKISH, CHEROKEE, "Straße STRASSE ẞ Σας ΟΔΟΣ"] * 30
    tokenizer = train(texts, tmp_path, kind=kind, lowercase=True, strip_accents=strip_accents)
    entries = [entry for entry in tokenizer.entries if entry not in BERT_SPECIAL]
    assert [entry for entry in entries if entry != entry.lower()] == []
    by_file = dataclasses.replace(tokenizer.section, path=str(tokenizer.path))
    check_tokenizer(load_tokenizer(by_file, tmp_path), texts)
    for text in texts[:3] if not strip_accents else ():
        expected = "".join(character.lower() for character in text)  # no final sigma
        assert without_spaces(round_trip(tokenizer, text)) == without_spaces(expected)


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_generated_text_keeps_its_width(algorithm, tmp_path):
    """Without full-width punctuation, a translation model could not match its references."""
    texts = [*FULL_WIDTH, "Ça coûte 5\u00a0m² …", "ﾊﾝｶｸ ｶﾞ"]
    tokenizer = train(texts * 20, tmp_path, is_generative=True, algorithm=algorithm)
    assert [round_trip(tokenizer, text) for text in texts] == texts
    assert round_trip(tokenizer, "C\u0327a cou\u0302te") == "Ça coûte"
    assert tokenizer.describe_lost(FULL_WIDTH) == ""


def test_characters_that_a_vocabulary_cannot_write_are_listed(tmp_path):
    for fields in ({"normalization": "nfkc"}, {"kind": "wordpiece", "lowercase": True}):
        tokenizer = train([*FULL_WIDTH, "Äpfel"] * 20, tmp_path / str(len(fields)), **fields)
        assert ("，" in tokenizer.describe_lost(FULL_WIDTH)) == ("normalization" in fields)
        assert ("Ä" in tokenizer.describe_lost(["Äpfel"])) == tokenizer.section.lowercase


@pytest.mark.parametrize(("form", "lowercase", "expected"), [
    ("nfkc", True, "é ,1 m2 strasse"), ("nfc", False, "é ，１ m² STRASSE"),
    ("nfc", True, "é ，１ m² strasse"), ("identity", True, "e\u0301 ，１ m² strasse"),
    ("identity", False, "e\u0301 ，１ m² STRASSE"),
])  # fmt: skip
def test_unicode_forms(form, lowercase, expected, tmp_path):
    text = "e\u0301 ，１ m² STRASSE"
    tokenizer = train([text] * 20, tmp_path, normalization=form, lowercase=lowercase)
    assert tokenizer.normalize(text) == round_trip(tokenizer, text) == expected
    by_file = TokenizerSection(path=str(tokenizer.path))
    assert follow_file(by_file).normalization == form
    other = "nfc" if form == "identity" else "identity"
    wrong = dataclasses.replace(tokenizer.section, path=by_file.path, normalization=other)
    with refused(TokenizerError, f"--config.tokenizer.normalization={form}", path=tokenizer.path):
        check_tokenizer(load_tokenizer(wrong, tmp_path), [text])


def test_lower_case_composes_as_unicode_does(tmp_path):
    """Compares our SentencePiece normalization table with Python."""
    rng = random.Random(0)
    letters = "aeoEAOIiWwЕеИйΩωᾳקश가ᄒ" + "ﾊｶ"
    marks = "\u0301\u0302\u0323\u0308\u0306\u0345\u0327\u1161\u11ab\uff9e"
    texts = ["".join(rng.choice(letters + marks) for _ in range(8)) for _ in range(500)]
    tokenizer = train(texts, tmp_path, lowercase=True)
    assert tokenizer.normalize("한국어 ﬁne STRASSE") == "한국어 fine strasse"
    composed = [
        text
        for text in texts
        if tokenizer.normalize(text) != unicodedata.normalize("NFKC", text).lower().strip()
    ]
    assert len(composed) < len(texts) / 4  # marks in a non-canonical order


# --- Single characters ---


def test_a_list_of_hanzi_is_refused_only_if_they_are_misread_latin_letters(tmp_path):
    """By chance, 18% of the hanzi are valid UTF-8 when encoded as gbk."""
    letters = [chr(code) for code in [*range(0xC0, 0x180), *range(0x391, 0x450)]]
    misread = dict.fromkeys(letter.encode().decode("gbk", "ignore") for letter in letters)
    damaged = dict.fromkeys([*filter(None, misread), *HANZI[:100]])
    for entries in (HANZI, HANZI[::2], HANZI[::5], damaged):
        path = tmp_path / "vocab.txt"
        text = "".join(f"{entry}\n" for entry in [*BERT_SPECIAL, *entries])
        path.write_text(text, encoding="utf-8")
        tokenizer = load_tokenizer(follow_file(TokenizerSection(path=str(path))), tmp_path)
        with refused(TokenizerError, "gbk") if entries is damaged else contextlib.nullcontext():
            check_tokenizer(tokenizer, [])


# --- Lost text ---


def test_long_words_are_counted_by_their_characters(tmp_path):
    """Here 64% of the characters are lost, but only 1% of the tokens."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in range(50, 350)]
    fields = {"kind": "wordpiece", "vocab_size": 60, "lowercase": False}
    tokenizer = train_tokenizer(texts, TokenizerSection(**fields), tmp_path / "short")
    with refused(TokenizerError, "max_word_chars=200", "kind=sentencepiece", 349):
        check_tokenizer(tokenizer, texts)
    lost = sum(len(part) for spans in tokenizer.unknown_spans(texts) for part in spans)
    assert lost == sum(len(text) for text in texts if len(text) > 200)
    section = TokenizerSection(max_word_chars=400, **fields)
    check_tokenizer(train_tokenizer(texts, section, tmp_path / "long"), texts)


ENGLISH = "In 1905, Albert Einstein published four papers; the third introduced relativity. " * 3


@pytest.mark.parametrize(("text", "shown", "left"), [
    ("य\u0939 द\u0941\u0928", "\u0926\u0941\u0928", "\u0926\u0928"),
    (9 * "あ" + "\u30da\u3044" * 9, "\u30da\u3044", "\u30d8\u3044"),  # voiced kana
    ("\u0e17\u0e35\u0e48", "\u0e17\u0e35\u0e48", "\u0e17"),
    ("މާލެއަކީ ދިވެހިރާއްޖޭގެ ވެރިރަށެވެ.", "", ""),  # Dhivehi
    ("שפּראַך און ליטעראַטור", "", ""),  # Yiddish
    ("ئۇيغۇر تىلى ئەڭ ئۇزۇن", "", ""),  # Uyghur
    ("ߒߞߏ ߦߋ߫ ߛߓߍߛߎ߲ ߠߋ߬", "", ""),  # N'Ko
    ("𞤀𞤣𞤤𞤢𞤥 𞤨𞤵𞥅𞤤𞤢𞤪", "", ""),  # Adlam
], ids=range(8))  # fmt: skip
def test_stripping_letters_is_refused_in_every_script(text, shown, left):
    """In Hindi this would remove vowels, in Japanese voicing."""
    section = TokenizerSection(strip_accents=True)
    field = "config.tokenizer.strip_accents"
    with refused(TokenizerError, shown, left, f"--{field}=False", field=field, value=True):
        refuse_lost_letters(section, [ENGLISH, *[text] * 100])
    refuse_lost_letters(section, [*[ENGLISH] * 300, text])  # one word among many
    refuse_lost_letters(choose_normalization(TokenizerSection(), [text]), [text])


def test_accents_and_points_may_be_stripped():
    hebrew, arabic = "ש\u05c1\u05b8לו\u05b9ם", "السّ\u064eلام"
    for text in (
        "Voilà, le café",
        "Алексей",
        "한국어",
        arabic,
        hebrew,
        "Tiếng Việt",
        "\u2764\ufe0f",
    ):
        refuse_lost_letters(TokenizerSection(strip_accents=True), [text])
