"""Our vocabularies in Hugging Face's format tokenize text the same way."""

# ruff: noqa: RUF001  (the tests need look-alike characters)
import gzip
import json
import random
import shutil
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from convbert_jax.inference.texts import encode_masked
from convbert_jax.interop import huggingface_tokenizer
from convbert_jax.interop.huggingface_tokenizer import OtherTokenizerError
from convbert_jax.interop.networks import ConversionError
from tests.interop.conftest import WORDS
from tests.refusals import refused

NASTY = [
    "", "   ", "\n\n", "a\u0301 e\u0301 E\u0301 \u00c9cole", "ﬁne ﬀ ①", "Ａｂｃ　ｄ",
    "가각 \u1100\u1161", "हिन्दी क्षि", "zero\u200bwidth \u200d joiner",
    "👩‍👩‍👧 family 🏳️‍🌈", "İstanbul ıI", "ß ẞ STRASSE", "tab\tnew\u00a0nbsp\u3000ideo",
    "\u0000null\u0001ctl", "日本語テキスト", "x" * 300, "\u202eright to left\u202c",
    "a\u0300\u0301\u0302b", "Ω Ω ℵ K Å", "\ufeffbom", "مرحبا بِكَ", "שָׁלוֹם", "ก็ไก่", "Ǆ ǅ ǆ",
    "½ ⅓ ²", "…‥ --- ——", "\u1e9b\u0323", "q\u0307\u0323", "▁under ▁▁ x▁y", " lead and trail ",
    "ends ▁", "▁", "a▁▁", "\u0603\u169d", "co\u0308operate nai\u0308ve",
]  # fmt: skip
KINDS = {
    "wordpiece": dict(kind="wordpiece", strip_accents=True),
    "wordpiece cased": dict(kind="wordpiece", lowercase=False, strip_accents=False),
    "unigram": dict(kind="sentencepiece", strip_accents=True),
    "unigram accents": dict(kind="sentencepiece", strip_accents=False),
    "unigram nfc": dict(kind="sentencepiece", normalization="nfc", lowercase=False),
    "bpe": dict(kind="sentencepiece", algorithm="bpe", strip_accents=True),
    "byte-level": dict(kind="bpe"),
    "byte-level nfc": dict(kind="bpe", normalization="nfc"),
}


LANGUAGES = [
    "これはペンです。「そうですか。」と彼は言った。ﾊﾝｶｸｶﾅ ｶﾞｷﾞｸﾞ ﾊﾟﾋﾟ ｳﾞ ﾞ ①② ㍿ ㌔ Ｆｕｌｌ　Ｗｉｄｔｈ",
    "हिन्दी में लिखा गया यह वाक्य है। क़ानून ज़रूर फ़िल्म लड़का क्ष त्र ज्ञ शक्‍ति अन्‌य",
    "ภาษาไทยเป็นภาษาที่มีวรรณยุกต์ ประเทศไทย น้ำดื่มสะอาด กำลัง ทำ Öำ",
    "السَّلامُ عَلَيْكُمْ أهلاً وسهلاً ﻻ ﷺ كتابٌ ؤئإآ می‌خواهم مُحَمَّد",
    "İstanbul'da IŞIK ışık ÇİÇEK ğüşöç I İ i ı", "Straße STRASSE Äpfel Äpfel „Zitat“ …",
    "한국어 형태소 한 ㅋㅋㅋ", "Й Ё за́мок ЗА́МОК О́кна А́ 　́",
    "Ẹ́ ẹ́ Q̃ q̃ Tiếng Việt VIỆT", "👩‍👩‍👧 ❤️ 🇩🇪 👍🏽 é soft­hyphen",
]  # fmt: skip


@pytest.fixture(scope="session")
def real_lines(real_data) -> list[str]:
    lines = []
    for file in sorted((real_data / "pretrain" / "enwiki-2015" / "train").glob("*.gz"))[:5]:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            lines += [line for line in text.read().split("\n") if line.strip()]
    assert len(lines) >= 10_000
    return lines[:10_000]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """made(kind, texts) -> (our tokenizer, ..., folder with Hugging Face's), cached by kind."""
    done = {}

    def make(kind, texts):
        if kind not in done:
            section = TokenizerSection(vocab_size=1000, **KINDS[kind])
            folder = tmp_path_factory.mktemp("vocabulary")
            tokenizer = train_tokenizer(texts, section, folder)
            section = tokenizer.section
            out = folder / "out"
            out.mkdir()
            huggingface_tokenizer.write_tokenizer(out, tokenizer, section, max_length=48)
            (out / "config.json").write_text(json.dumps({"model_type": "convbert"}))
            done[kind] = tokenizer, section, out
        return done[kind]

    return make


def open_theirs(folder):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def differing(ours, theirs, texts):
    """Return the texts that are tokenized differently, with both results."""
    theirs.encode_special_tokens = True
    found = theirs.encode_batch(texts, add_special_tokens=False)
    pairs = zip(texts, ours.encode(texts), found, strict=True)
    return [(text, ours.pieces(a), b.tokens) for text, a, b in pairs if a != b.ids]


@pytest.mark.parametrize("kind", KINDS)
def test_real_text_and_nasty_unicode(made, real_lines, kind):
    ours, _, folder = made(kind, real_lines[:1500])
    theirs = open_theirs(folder)
    # Equal scores: float32 and float64 may break ties differently.
    texts = real_lines[:4000] if kind in ("wordpiece", "unigram") else real_lines[:1000]
    assert len(differing(ours, theirs, texts)) <= 1
    assert differing(ours, theirs, NASTY) == []
    # Combining marks after letters they never follow in real text.
    rng = random.Random(0)
    blocks = [(32, 0x250), (0x300, 0x370), (0x370, 0x2000), (0x2000, 0xD7FF), (0xE000, 0xFFFD)]
    texts = [
        "".join(chr(rng.randint(*rng.choice(blocks))) for _ in range(rng.randint(1, 30)))
        for _ in range(1000)
    ]
    limit = 20 if ours.kind == "sentencepiece" else 0
    assert len(differing(ours, theirs, texts)) <= limit


@pytest.mark.parametrize("fields", [
    dict(kind="wordpiece", lowercase=True), dict(kind="wordpiece", lowercase=False),
    dict(kind="sentencepiece", lowercase=True),
    dict(kind="sentencepiece", algorithm="bpe", lowercase=False),
    dict(kind="sentencepiece", normalization="nfc", lowercase=True),
    dict(kind="sentencepiece", normalization="identity", lowercase=False),
])  # fmt: skip
def test_other_languages(fields, tmp_path):
    """Covers accents on Russian and Yoruba capitals and half-width kana."""
    rng = random.Random(0)
    texts = list(LANGUAGES)
    for _ in range(1_000):
        a, b = rng.choice(LANGUAGES), rng.choice(LANGUAGES)
        i, j = rng.randrange(len(a)), rng.randrange(len(b))
        cut = a[i : i + rng.randint(1, 12)], b[j : j + rng.randint(1, 12)]
        texts.append(rng.choice(["", " ", "\u3000", "\n"]).join(cut))
    section = TokenizerSection(**fields, strip_accents=False, vocab_size=450)
    ours = train_tokenizer(LANGUAGES * 50 + texts, section, tmp_path)
    huggingface_tokenizer.write_tokenizer(tmp_path, ours, ours.section, max_length=48)
    theirs = open_theirs(tmp_path)
    # Conjoining Korean letters next to compatibility letters may differ.
    assert len(differing(ours, theirs, texts)) <= 1
    assert differing(ours, theirs, LANGUAGES) == []
    text = "  ЗА\u0301МОК ｶｷ हिन्दी  で"
    found = theirs.encode(text, add_special_tokens=False)
    spans = [text[begin:end] for begin, end in found.offsets]
    assert "".join("".join(spans).split()) == "".join(text.split())


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte-level"])
def test_auto_tokenizer(made, real_lines, kind):
    transformers = pytest.importorskip("transformers")
    ours, _, folder = made(kind, real_lines[:1500])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.model_max_length == 48
    assert theirs.pad_token_id == ours.special.pad
    assert theirs.mask_token_id == ours.special.mask
    texts = real_lines[:2000]
    split = theirs(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    wrong = [a for a, b in zip(ours.encode(texts), split["input_ids"], strict=True) if a != b]
    assert len(wrong) <= 1

    pair = theirs("the river", "a stone", padding="max_length", max_length=16)
    a, b = ours.encode(["the river", "a stone"])
    cls, sep, pad = ours.special.cls, ours.special.sep, ours.special.pad
    ids = [cls, *a, sep, *b, sep]
    assert pair["input_ids"] == ids + [pad] * (16 - len(ids))
    assert pair["token_type_ids"][: len(ids)] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert pair["attention_mask"] == [1] * len(ids) + [0] * (16 - len(ids))
    # The only intended difference: Hugging Face reads [MASK] in a text as a mask.
    masked = theirs("the [MASK] river")["input_ids"]
    assert theirs.mask_token_id in masked
    assert ours.special.mask not in ours.encode(["the [MASK] river"])[0]
    assert theirs.decode(ids, skip_special_tokens=True).split()[0] == "the"
    if ours.kind == "bpe":
        text = "  Two  sp\u00e1ces\n\tand "
        assert theirs.decode(theirs(text, add_special_tokens=False)["input_ids"]) == text
        assert masked == [cls, *encode_masked(ours, "the [MASK] river"), sep]


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_comes_back(made, real_lines, kind):
    ours, section, folder = made(kind, real_lines[:1500])
    path = huggingface_tokenizer.find_vocabulary(folder)
    fields = huggingface_tokenizer.describe_vocabulary(folder, path)
    for field, value in fields.items():
        if field != "path":
            assert value == getattr(section, field), field
    back = Tokenizer(TokenizerSection(vocab_size=1000, **fields), path)
    assert back.entries == ours.entries
    assert back.special == ours.special


def test_vocabularies_that_cannot_be_read(tmp_path):
    assert huggingface_tokenizer.find_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    assert huggingface_tokenizer.find_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(ConversionError, path=tmp_path / "tokenizer.json"):
        huggingface_tokenizer.find_vocabulary(tmp_path)


def test_a_folder_with_byte_level_bpe_agrees_with_its_tokenizer_json(made, real_lines, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made("byte-level", real_lines[:1500])[2], folder)
    path = folder / "tokenizer.json"
    assert huggingface_tokenizer.find_vocabulary(folder) == path
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for fields in ({"tokenizer_class": "GPTNeoXTokenizerFast"}, {"unk_token": "[CLS]"}):
        file.write_text(json.dumps(settings | fields))
        assert huggingface_tokenizer.describe_vocabulary(folder, path)["kind"] == "bpe"
    for fields in (
        {"cls_token": "[SEP]"},
        {"sep_token": None, "eos_token": {"content": "[CLS]"}},
        {"add_prefix_space": True},
        {"added_tokens_decoder": {"1000": {"content": "<new>", "special": False}}},
    ):
        file.write_text(json.dumps(settings | fields))
        with refused(OtherTokenizerError, path=folder):
            huggingface_tokenizer.describe_vocabulary(folder, path)


def train_sentencepiece(tmp_path, **options):
    import sentencepiece

    texts = [" ".join(random.Random(i).sample(WORDS.split(), 8)) for i in range(200)]
    special = dict(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]", unk_piece="[UNK]")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "sp"), vocab_size=60,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"], minloglevel=2, hard_vocab_limit=False,
        **special, **options,
    )  # fmt: skip
    section = TokenizerSection(path=str(tmp_path / "sp.model"), vocab_size=60)
    return Tokenizer(section, tmp_path / "sp.model")


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "char"},
        {"user_defined_symbols": ["<x>"]},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_models_that_their_library_lacks_are_refused(tmp_path, options):
    tokenizer = train_sentencepiece(tmp_path, **options)
    with refused(ConversionError, path=tokenizer.path):
        huggingface_tokenizer.write_tokenizer(tmp_path, tokenizer, tokenizer.section, max_length=8)


def test_a_foreign_model(tmp_path):
    """Another normalization that keeps line breaks, and no dummy prefix."""
    tokenizer = train_sentencepiece(
        tmp_path, add_dummy_prefix=False, normalization_rule_name="nfkc"
    )
    huggingface_tokenizer.write_tokenizer(tmp_path, tokenizer, tokenizer.section, max_length=8)
    theirs = open_theirs(tmp_path)
    texts = [WORDS, " river", "stone  light", "Übergröße ①", "a \n b", "river▁\nstone ▁", "▁\n "]
    assert differing(tokenizer, theirs, texts) == []


@given(st.text(max_size=60))
@settings(max_examples=100)
def test_any_text(any_wordpiece, text):
    ours, theirs = any_wordpiece
    if not any(unicodedata.category(c) == "Cs" for c in text):
        assert differing(ours, theirs, [text]) == []


@pytest.fixture(scope="session")
def any_wordpiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordpiece")
    section = TokenizerSection(kind="wordpiece", vocab_size=60)
    ours = train_tokenizer([WORDS] * 3, section, folder)
    out = folder / "out"
    out.mkdir()
    huggingface_tokenizer.write_tokenizer(out, ours, ours.section, max_length=8)
    return ours, open_theirs(out)
