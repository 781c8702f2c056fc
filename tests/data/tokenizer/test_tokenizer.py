import dataclasses
import hashlib
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import DataError, TokenizerError
from convbert_jax.data.tokenizer import sentencepiece_model
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from convbert_jax.interfaces.special_ids import SpecialIds

_FIELDS = {"vocab_size": 300, "lowercase": True, "strip_accents": True}
SECTIONS = {
    "unigram": TokenizerSection(kind="sentencepiece", **_FIELDS),
    "bpe": TokenizerSection(kind="sentencepiece", algorithm="bpe", **_FIELDS),
    "wordpiece": TokenizerSection(kind="wordpiece", **_FIELDS),
}
SPECIAL_TEXT = "[PAD] [CLS] x [SEP] [MASK][MASK] [UNK] <pad> <s>"


@pytest.fixture(scope="module", params=list(SECTIONS))
def section(request):
    return SECTIONS[request.param]


@pytest.fixture(scope="module")
def tokenizer(section, documents, tmp_path_factory):
    return train_tokenizer(documents, section, tmp_path_factory.mktemp("tokenizer"))


def test_special_tokens_are_the_first_five(tokenizer):
    assert tokenizer.special == SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.pieces(range(5)) == names
    assert tokenizer.vocab_size == len(tokenizer.entries) == 300


def test_text_round_trips_in_lower_case(tokenizer, documents):
    text = documents[3].replace("\n", " ")
    decoded = tokenizer.decode(tokenizer.encode([text])[0])
    assert decoded.replace(" ", "") == text.lower().replace(" ", "")


def test_no_special_id_comes_out_of_text(tokenizer):
    ids = tokenizer.encode([SPECIAL_TEXT, "[MASK]", "a [CLS]b"])
    special = {0, 2, 3, 4}
    assert not special & {i for row in ids for i in row}
    assert all(ids)


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=60))
def test_any_text_can_be_encoded(tokenizer, text):
    ids = tokenizer.encode([text, text + "\n[MASK]"])
    assert not {0, 2, 3, 4} & {i for row in ids for i in row}
    assert all(0 <= i < tokenizer.vocab_size for row in ids for i in row)


def test_control_characters_are_no_tokens(tokenizer):
    plain, dirty = tokenizer.encode(["bade lamu", "\0bade\t\x07\u200b \r\nlamu\0"])
    assert plain == dirty


def test_accents_are_stripped_composed_or_not(tokenizer):
    plain, composed, combining = tokenizer.encode(["bade", "bádé", "ba\u0301de\u0301"])
    assert plain == composed == combining


def test_pickles_without_the_loaded_vocabulary(tokenizer):
    tokenizer.encode(["load it"])
    data = pickle.dumps(tokenizer)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert copy.encode([SPECIAL_TEXT]) == tokenizer.encode([SPECIAL_TEXT])
    assert copy.fingerprint == tokenizer.fingerprint


def test_another_vocabulary_in_another_process_is_refused(tokenizer, section, documents, tmp_path):
    """What a process is sent is a path; on another machine another file may be there."""
    first = train_tokenizer(documents, section, tmp_path)
    data = pickle.dumps(first)
    train_tokenizer(documents[:200], section, tmp_path)
    with pytest.raises(TokenizerError, match=r"is another one on .* than where this began"):
        pickle.loads(data).encode(["Document 1."])
    first.path.unlink()
    with pytest.raises(TokenizerError, match="cannot be read: No such file"):
        pickle.loads(data).encode(["Document 1."])


def test_a_model_without_a_path_is_what_its_own_module_makes_of_it(documents, monkeypatch):
    protobuf = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    section = TokenizerSection(vocab_size=300, train_megabytes=1)
    whole = []
    real = sentencepiece_model._without_path
    monkeypatch.setattr(
        sentencepiece_model, "_without_path", lambda model: whole.append(model) or real(model)
    )
    trained = sentencepiece_model.train(iter(documents), section)
    model = protobuf.ModelProto.FromString(whole[0])
    assert model.normalizer_spec.normalization_rule_tsv
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    assert trained == model.SerializeToString(deterministic=True)


def test_training_twice_gives_the_same_file(tokenizer, section, documents, tmp_path):
    again = train_tokenizer(iter(documents), section, tmp_path)
    assert _sha(again.path) == _sha(tokenizer.path)
    assert again.fingerprint == tokenizer.fingerprint


def test_trained_vocabulary_loads_from_its_directory(tokenizer, section):
    loaded = load_tokenizer(section, tokenizer.path.parent)
    assert loaded.fingerprint == tokenizer.fingerprint
    for changed in (
        {"vocab_size": 299},
        {"lowercase": False},
        {"strip_accents": False},
        {"train_megabytes": 7},
    ):
        other = dataclasses.replace(section, **changed)
        with pytest.raises(TokenizerError, match=f"trained with {next(iter(changed))}="):
            load_tokenizer(other, tokenizer.path.parent)


def test_trained_file_loads_by_its_path(tokenizer, section, tmp_path):
    by_path = dataclasses.replace(section, path=str(tokenizer.path))
    assert load_tokenizer(by_path, tmp_path).fingerprint == tokenizer.fingerprint
    wrong_size = dataclasses.replace(by_path, vocab_size=301)
    with pytest.raises(
        TokenizerError, match=r"has 300 entries .* --config.tokenizer.vocab_size=300"
    ):
        load_tokenizer(wrong_size, tmp_path)
    other = {"sentencepiece": "wordpiece", "wordpiece": "sentencepiece"}[section.kind]
    with pytest.raises(TokenizerError, match=f"kind={section.kind}"):
        load_tokenizer(dataclasses.replace(by_path, kind=other), tmp_path)


def test_too_large_a_vocabulary_names_the_largest_that_works(section, documents, tmp_path):
    too_large = dataclasses.replace(section, vocab_size=30_000)
    with pytest.raises(TokenizerError, match="vocab_size=") as error:
        train_tokenizer(documents[:40], too_large, tmp_path / "first")
    largest = int(str(error.value).split("--config.tokenizer.vocab_size=")[1].split()[0])
    assert not list((tmp_path / "first").iterdir())
    works = dataclasses.replace(section, vocab_size=largest)
    assert train_tokenizer(documents[:40], works, tmp_path / "second").vocab_size == largest


def test_too_small_a_vocabulary_names_what_is_needed(section, documents, tmp_path):
    too_small = dataclasses.replace(section, vocab_size=20)
    with pytest.raises(TokenizerError, match=r"vocab_size=\d+ or more") as error:
        train_tokenizer(documents, too_small, tmp_path)
    assert str(error.value).count(".") >= 1


def test_no_text_to_train_on(section, tmp_path):
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer([], section, tmp_path)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_case_and_accents_follow_the_settings(kind, lowercase, strip_accents, documents, tmp_path):
    section = TokenizerSection(
        kind=kind, vocab_size=300, lowercase=lowercase, strip_accents=strip_accents
    )
    words = ["Émile Émile là là voilà", "ABER aber über ÜBER", "été Été emile Emile uber ete la"]
    tokenizer = train_tokenizer(words * 30 + documents, section, tmp_path)
    decoded = tokenizer.decode(tokenizer.encode(["Émile ÜBER été"])[0])
    expected = "Émile ÜBER été"
    expected = expected.lower() if lowercase else expected
    if strip_accents:
        expected = expected.translate(str.maketrans("ÉÜéüà", "EUeua"))
    assert decoded == expected


def test_hangul_stays_whole_and_ligatures_open(documents, tmp_path):
    tokenizer = train_tokenizer(documents, SECTIONS["unigram"], tmp_path)
    assert tokenizer.normalize("한국어 ﬁne STRASSE") == "한국어 fine strasse"


def test_a_text_of_many_characters_has_entries_for_them(tmp_path):
    """A thousand were all, so that a vocabulary trained on Chinese was refused for that text."""
    characters = [chr(0x4E00 + i) for i in range(1_400)]
    texts = ["".join(characters[i : i + 100]) for i in range(0, 1_400, 100)] * 5
    section = TokenizerSection(kind="wordpiece", vocab_size=5_600)
    with pytest.raises(TokenizerError, match=r"vocab_size=1405 "):
        train_tokenizer(texts, section, tmp_path)
    section = dataclasses.replace(section, vocab_size=1_405)
    assert set(characters) < set(train_tokenizer(texts, section, tmp_path).entries)


def test_long_words_become_unknown(documents, tmp_path):
    section = dataclasses.replace(SECTIONS["wordpiece"], max_word_chars=10)
    tokenizer = train_tokenizer(documents, section, tmp_path)
    kept, dropped = tokenizer.encode(["b" * 10, "b" * 11])
    assert tokenizer.special.unknown not in kept
    assert dropped == [tokenizer.special.unknown]


def test_a_broken_file_is_named(tmp_path):
    for name, kind in (("a.model", "sentencepiece"), ("a.json", "wordpiece")):
        path = tmp_path / name
        path.write_bytes(b'{"version": 1}')
        with pytest.raises(TokenizerError, match=name):
            Tokenizer(TokenizerSection(kind=kind), path)
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(TokenizerError, match="not UTF-8"):
        Tokenizer(TokenizerSection(kind="wordpiece"), tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("\ufeff[PAD]\n")
    with pytest.raises(TokenizerError, match="begins with a byte order mark"):
        Tokenizer(TokenizerSection(kind="wordpiece"), tmp_path / "vocab.txt")
    with pytest.raises(TokenizerError, match=r"cannot be read.*config\.tokenizer\.path"):
        Tokenizer(TokenizerSection(), tmp_path / "absent.model")
    with pytest.raises(TokenizerError, match="holds no trained vocabulary"):
        load_tokenizer(TokenizerSection(), tmp_path)


def test_tokenizer_json_must_agree_with_the_settings(documents, tmp_path):
    section = SECTIONS["wordpiece"]
    path = train_tokenizer(documents, section, tmp_path).path
    for name in ("lowercase", "strip_accents"):
        other = dataclasses.replace(section, path=str(path), **{name: False})
        with pytest.raises(TokenizerError, match=f"--config.tokenizer.{name}=True"):
            load_tokenizer(other, tmp_path)


def test_bert_vocabulary_encodes_as_published(real_data, tmp_path):
    path = real_data / "vocab" / "bert-base-uncased-vocab.txt"
    section = TokenizerSection(kind="wordpiece", path=str(path))
    tokenizer = load_tokenizer(section, tmp_path)
    assert tokenizer.special == SpecialIds(pad=0, unknown=100, cls=101, sep=102, mask=103)
    assert tokenizer.encode(["Hello, WORLD!"]) == [[7592, 1010, 2088, 999]]
    assert tokenizer.pieces(tokenizer.encode(["unaffable"])[0]) == ["una", "##ffa", "##ble"]
    assert tokenizer.encode(["天x"]) == tokenizer.encode(["天 x"])  # ideographs stand alone


def _sha(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt(), DataError("a file is damaged")])
def test_what_the_texts_raise_is_not_taken_for_a_poor_vocabulary(kind, fault, tmp_path):
    def texts():
        yield from ["some words"] * 100
        raise fault

    with pytest.raises(type(fault)):
        train_tokenizer(texts(), TokenizerSection(kind=kind, vocab_size=300), tmp_path)
    assert not any(tmp_path.iterdir())


def test_sentinels_are_ids_that_no_text_has(section, documents, tmp_path):
    section = dataclasses.replace(section, sentinels=3)
    tokenizer = train_tokenizer(documents, section, tmp_path)
    names = ["[SPAN_0]", "[SPAN_1]", "[SPAN_2]"]
    assert tokenizer.vocab_size == 300
    assert tokenizer.pieces(tokenizer.special.sentinels) == names
    assert set(tokenizer.special.sentinels) <= set(tokenizer.special.never_hidden)
    (ids,) = tokenizer.encode([" ".join(names)])
    assert not set(tokenizer.special.sentinels) & set(ids)
    assert load_tokenizer(section, tmp_path).special == tokenizer.special
    with pytest.raises(TokenizerError, match=r"sentinels=3 but config\.tokenizer\.sentinels=0"):
        load_tokenizer(dataclasses.replace(section, sentinels=0), tmp_path)


def test_sentinels_of_others_are_in_order():
    five = {"pad": 0, "unknown": 1, "cls": 2, "sep": 3, "mask": 4}
    extra = {"<extra_id_1>": 8, "<extra_id_10>": 5, "<extra_id_0>": 9, "[other]": 7}
    assert SpecialIds(**five, extra=extra).sentinels == (9, 8, 5)
    assert SpecialIds(**five).sentinels == ()


def test_a_text_is_cut_anew_by_a_seed(tokenizer, section, documents):
    text = documents[5].replace("\n", " ")
    if section.kind == "wordpiece" or section.algorithm == "bpe":
        with pytest.raises(TokenizerError, match="one way"):
            tokenizer.sample(text, 0.2, 1)
        return
    drawn = [tokenizer.sample(text, 0.2, seed) for seed in (1, 2**31, 2**32 - 1, 1)]
    assert drawn[0] == drawn[3] != drawn[1]
    (best,) = tokenizer.encode([text])
    assert {tokenizer.decode(ids) for ids in drawn} == {tokenizer.decode(best)}
