"""Text in other languages than English: what a vocabulary keeps of it, and what is refused."""

# ruff: noqa: RUF001  (texts with look-alike characters are what is tested)
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
from tests.language_texts import LANGUAGES, make_texts

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
    """A vocabulary by the advice of the errors, which may be followed once."""
    try:
        return train_tokenizer(texts, section, folder)
    except TokenizerError as error:
        advised = int(re.search(r"--config\.tokenizer\.vocab_size=(\d+)", str(error))[1])
        return train_tokenizer(texts, dataclasses.replace(section, vocab_size=advised), folder)


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer.encode([text])[0])


def without_spaces(text):
    return "".join(text.split())


# --- What is chosen ---


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_default_vocabulary_keeps_the_letters_of_a_language(language, kind, tmp_path, caplog):
    """German was read as `die apfel sind schon uber koln`, and Hindi was refused."""
    texts = make_texts(language, 300)
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
    """Names and phonetic signs stand in English encyclopedias too."""
    english = "The city of Istanbul lies on both sides of the strait in the north west of it. " * 50
    assert choose_normalization(TokenizerSection(), [english, TURKISH[:9], "/ðə/"]).lowercase
    assert not choose_normalization(TokenizerSection(), [english, TURKISH * 9]).lowercase
    assert not choose_normalization(TokenizerSection(), ["Azərbaycan dili"]).lowercase


@pytest.mark.parametrize("fields", [
    {"lowercase": True, "strip_accents": True, "normalization": "nfkc"},
    {"lowercase": False, "strip_accents": True, "normalization": "identity"},
])  # fmt: skip
def test_named_settings_stay(fields):
    section = TokenizerSection(**fields)
    for is_generative in (True, False):
        assert choose_normalization(section, [TURKISH], is_generative=is_generative) == section


def test_a_loaded_vocabulary_has_what_was_chosen(tmp_path):
    made = train([TURKISH] * 30, tmp_path)
    section = TokenizerSection(vocab_size=made.vocab_size)
    found = load_tokenizer(section, tmp_path)
    assert found.section == made.section
    assert found.section.lowercase is False
    assert found.section.normalization == "nfkc"
    with pytest.raises(TokenizerError, match=r"config\.tokenizer\.lowercase=True"):
        load_tokenizer(dataclasses.replace(section, lowercase=True), tmp_path)
    by_file = dataclasses.replace(section, path=str(made.path))
    assert load_tokenizer(by_file, tmp_path).section == follow_file(by_file)
    assert follow_file(by_file, {"tokenizer.lowercase"}).lowercase is False


# --- Lower case ---


@pytest.mark.parametrize("text", [TURKISH, CHEROKEE, "Straße STRASSE ẞ Σας ΟΔΟΣ"])
@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
@pytest.mark.parametrize("strip_accents", [True, False])
def test_no_entry_of_a_lower_case_vocabulary_is_upper_case(kind, text, strip_accents, tmp_path):
    """SentencePiece left "İ" as it is and made capitals of Cherokee; then that was refused."""
    texts = [text] * 30
    tokenizer = train(texts, tmp_path, kind=kind, lowercase=True, strip_accents=strip_accents)
    entries = [entry for entry in tokenizer.entries if entry not in BERT_SPECIAL]
    assert [entry for entry in entries if entry != entry.lower()] == []
    by_file = dataclasses.replace(tokenizer.section, path=str(tokenizer.path))
    check_tokenizer(load_tokenizer(by_file, tmp_path), texts)
    if not strip_accents:
        expected = "".join(character.lower() for character in text)  # a final sigma is not found
        assert without_spaces(round_trip(tokenizer, text)) == without_spaces(expected)


# --- Width and Unicode form ---


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_generated_text_keeps_its_width(algorithm, tmp_path):
    """No translator could write the punctuation of its references, and scored 55 BLEU at most."""
    texts = [*FULL_WIDTH, "Ça coûte 5\u00a0m² …", "ﾊﾝｶｸ ｶﾞ"]
    tokenizer = train(texts * 20, tmp_path, is_generative=True, algorithm=algorithm)
    assert [round_trip(tokenizer, text) for text in texts] == texts
    assert round_trip(tokenizer, "C\u0327a cou\u0302te") == "Ça coûte"


def test_what_a_vocabulary_cannot_write_is_told(tmp_path):
    kept = train(FULL_WIDTH * 20, tmp_path / "nfc", is_generative=True)
    assert kept.describe_lost(FULL_WIDTH) == ""
    for fields in ({"normalization": "nfkc"}, {"kind": "wordpiece", "lowercase": True}):
        tokenizer = train([*FULL_WIDTH, "Äpfel"] * 20, tmp_path / str(len(fields)), **fields)
        assert ("，" in tokenizer.describe_lost(FULL_WIDTH)) == ("normalization" in fields)
        assert ("Ä" in tokenizer.describe_lost(["Äpfel"])) == tokenizer.section.lowercase


@pytest.mark.parametrize(("form", "expected"), [
    ("nfkc", "é ,1 m2"), ("nfc", "é ，１ m²"), ("identity", "e\u0301 ，１ m²"),
])  # fmt: skip
@pytest.mark.parametrize("lowercase", [True, False])
def test_unicode_forms(form, expected, lowercase, tmp_path):
    text = "e\u0301 ，１ m²"
    tokenizer = train([text] * 20, tmp_path, normalization=form, lowercase=lowercase)
    assert tokenizer.normalize(text) == round_trip(tokenizer, text) == expected
    by_file = TokenizerSection(path=str(tokenizer.path))
    assert follow_file(by_file).normalization == form
    other = "nfc" if form == "identity" else "identity"
    wrong = dataclasses.replace(tokenizer.section, path=by_file.path, normalization=other)
    with pytest.raises(TokenizerError, match=rf"--config\.tokenizer\.normalization={form}"):
        check_tokenizer(load_tokenizer(wrong, tmp_path), [text])


def test_lower_case_composes_as_unicode_does(tmp_path):
    """Our own table of SentencePiece against Python."""
    rng = random.Random(0)
    letters = "aeoEAOIiWwЕеИйΩωᾳקश가ᄒ" + "ﾊｶ"
    marks = "\u0301\u0302\u0323\u0308\u0306\u0345\u0327\u1161\u11ab\uff9e"
    texts = ["".join(rng.choice(letters + marks) for _ in range(8)) for _ in range(500)]
    tokenizer = train(texts, tmp_path, lowercase=True)
    composed = [
        text
        for text in texts
        if tokenizer.normalize(text) != unicodedata.normalize("NFKC", text).lower().strip()
    ]
    assert len(composed) < len(texts) / 4  # marks in an order that is not Unicode's


# --- Characters that stand alone ---


def test_a_trained_vocabulary_of_hanzi_is_accepted(tmp_path):
    """Following the advice gave ever smaller vocabularies, of which none was accepted."""
    rng = random.Random(0)
    weights = [1 / (i + 20) for i in range(len(HANZI))]
    shuffled = rng.sample(HANZI, len(HANZI))
    texts = ["".join(rng.choices(shuffled, weights, k=240)) + "。" for _ in range(500)]
    for kind in ("wordpiece", "sentencepiece"):
        section = TokenizerSection(kind=kind, vocab_size=4_096)
        tokenizer = train_up_to(texts, section, tmp_path / kind)
        check_tokenizer(tokenizer, texts)
        assert tokenizer.vocab_size > 3_500


@pytest.mark.parametrize("step", [1, 2, 5])
def test_an_undamaged_list_of_hanzi_is_accepted(step, tmp_path):
    """18% of these are valid UTF-8 in gbk by chance."""
    path = tmp_path / "vocab.txt"
    entries = [*BERT_SPECIAL, *HANZI[::step]]
    path.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
    section = follow_file(TokenizerSection(path=str(path)))
    check_tokenizer(load_tokenizer(section, tmp_path), [])


def test_a_list_of_hanzi_that_are_misread_latin_letters_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    letters = [chr(code) for code in [*range(0xC0, 0x180), *range(0x391, 0x450)]]
    misread = [letter.encode().decode("gbk", "ignore") for letter in letters]
    entries = [*BERT_SPECIAL, *dict.fromkeys(filter(None, misread)), *HANZI[:100]]
    path.write_text("".join(f"{entry}\n" for entry in dict.fromkeys(entries)), encoding="utf-8")
    section = follow_file(TokenizerSection(path=str(path)))
    with pytest.raises(TokenizerError, match="gbk"):
        check_tokenizer(load_tokenizer(section, tmp_path), [])


# --- What is lost ---


def test_long_words_are_counted_by_their_characters(tmp_path):
    """64% of these characters were lost, as 1% of the tokens."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in range(50, 350)]
    fields = {"kind": "wordpiece", "vocab_size": 60, "lowercase": False}
    tokenizer = train_tokenizer(texts, TokenizerSection(**fields), tmp_path / "short")
    with pytest.raises(TokenizerError, match=r"max_word_chars=200.*kind=sentencepiece"):
        check_tokenizer(tokenizer, texts)
    lost = sum(len(part) for spans in tokenizer.unknown_spans(texts) for part in spans)
    assert lost == sum(len(text) for text in texts if len(text) > 200)
    section = TokenizerSection(max_word_chars=400, **fields)
    check_tokenizer(train_tokenizer(texts, section, tmp_path / "long"), texts)


@pytest.mark.parametrize("text", [
    "މާލެއަކީ ދިވެހިރާއްޖޭގެ ވެރިރަށެވެ.",  # Dhivehi
    "שפּראַך און ליטעראַטור",  # Yiddish
    "ئۇيغۇر تىلى ئەڭ ئۇزۇن",  # Uyghur
    "ߒߞߏ ߦߋ߫ ߛߓߍߛߎ߲ ߠߋ߬",  # N'Ko
    "𞤀𞤣𞤤𞤢𞤥 𞤨𞤵𞥅𞤤𞤢𞤪",  # Adlam
    "हिन्दी भाषा",
])  # fmt: skip
def test_stripping_letters_is_refused_in_every_script(text):
    section = TokenizerSection(strip_accents=True)
    with pytest.raises(TokenizerError, match=r"config\.tokenizer\.strip_accents=True"):
        refuse_lost_letters(section, [text])
    refuse_lost_letters(choose_normalization(TokenizerSection(), [text]), [text])
