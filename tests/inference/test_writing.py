"""The writer: each output depends only on its text, and few programs are compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import TokenizerSection, UserError
from convbert_jax.config.sequences import DecodingSection
from convbert_jax.data import input_rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference import generation, stream
from convbert_jax.inference.generation import Writer
from convbert_jax.inference.texts import Texts, make_texts
from convbert_jax.interop.networks import abstract_params
from tests.refusals import refused
from tests.runs import make_config

WORDS = [*"abcdefghij", "##x", "##y", "."]
SENTINELS = ["[SPAN_0]", "[SPAN_1]"]
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *SENTINELS]
TEXTS = ["a b c", "j", "a b c d e f g h i j a b c d e f g h", "b b", "c ax by ."]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("".join(entry + "\n" for entry in ENTRIES))
    section = TokenizerSection(kind="wordpiece", vocab_size=len(ENTRIES), path=str(path))
    return Tokenizer(section, path)


def config_of(recipe, **fields):
    fields = {"model__position_embedding": "sinusoidal", "data__length": 48, **fields}
    fields = {"tokenizer__vocab_size": len(ENTRIES), **fields}
    return make_config(recipe=recipe, tokenizer__sentinels=2, parallel__max_length=40, **fields)


@functools.cache
def make_writer(tokenizer, recipe="translation", special=0.0, **fields):
    """Return a writer with large random weights.

    The embeddings of special tokens are multiplied by `special`, unless 0.
    """
    config = config_of(recipe, **fields)
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(center + 0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, abstract_params(config))
    if special:
        table = params["target"]["word"]["embedding"]
        params["target"]["word"]["embedding"] = table.at[jnp.asarray([0, 1, 2, 4])].mul(special)
    return Writer(config, params, (tokenizer, tokenizer), jnp.dtype("float32"))


def decoding_of(**fields):
    return dataclasses.replace(
        DecodingSection(beam=3, n_best=2, length_ratio=1.0, length_extra=4), **fields
    )


METHODS = {
    "beam": decoding_of(),
    "greedy": decoding_of(method="greedy", n_best=1),
    "sample": decoding_of(method="sample", temperature=1.5),
}


def assert_same(ours, wanted):
    assert ours.problem == wanted.problem
    assert [w.text for w in ours.texts] == [w.text for w in wanted.texts]
    np.testing.assert_allclose(
        [w.score for w in ours.texts], [w.score for w in wanted.texts], atol=1e-4
    )


@pytest.mark.parametrize(
    ("recipe", "method", "fields"),
    [
        ("translation", "beam", {}),
        ("translation", "sample", {}),
        ("causal_lm", "beam", {}),
        ("causal_lm", "sample", {"model__position_embedding": "learned", "model__positions": 48}),
        ("causal_lm", "greedy", {"model__mixer": "mixed"}),
    ],
)
def test_a_text_in_a_batch_is_as_alone(recipe, method, fields, tokenizer):
    """In a batch, a short text must not generate more because of a longer one."""
    writer, decoding = make_writer(tokenizer, recipe, **fields), METHODS[method]
    together = writer.write(TEXTS, decoding)
    assert len({answer.texts[0].text for answer in together}) >= 3
    for number, text in enumerate(TEXTS):
        (alone,) = writer.write([text], decoding, numbers=[number])
        assert_same(together[number], alone)
    backwards = writer.write(TEXTS[::-1], decoding, numbers=range(len(TEXTS) - 1, -1, -1))
    for ours, wanted in zip(backwards[::-1], together, strict=True):
        assert_same(ours, wanted)


def test_an_encoder_that_reads_padding_gets_none(tokenizer):
    fields = {"model__mixer": "dynamic", "model__mask_convolution": False}
    writer = make_writer(tokenizer, **fields)
    assert writer.config.encoder_decoder.encoder.reads_padding
    texts = TEXTS[:2]
    together = writer.write([*texts, *texts], METHODS["greedy"])
    (alone,) = writer.write(texts[:1], METHODS["greedy"])
    assert_same(together[0], alone)
    assert_same(together[2], alone)
    assert_same(together[1], together[3])


def test_a_beam_of_one_is_greedy(tokenizer):
    writer = make_writer(tokenizer)
    one = writer.write(TEXTS, decoding_of(beam=1, n_best=1))
    for ours, wanted in zip(one, writer.write(TEXTS, METHODS["greedy"]), strict=True):
        assert_same(ours, wanted)


def test_the_best_come_first_and_sampling_has_a_seed(tokenizer):
    writer = make_writer(tokenizer)
    draws = decoding_of(method="sample", n_best=5, temperature=1.5)
    for decoding in (METHODS["beam"], draws):
        for answer in writer.write(TEXTS, decoding):
            scores = [written.score for written in answer.texts]
            assert len(scores) == decoding.n_best
            assert scores == sorted(scores, reverse=True)
            assert scores[0] < 0
            assert len({written.text for written in answer.texts}) > 1
    sampled = writer.write(["a b c"] * 4, METHODS["sample"])
    assert len({answer.texts[0].text for answer in sampled}) > 1
    for ours, wanted in zip(writer.write(["a b c"] * 4, METHODS["sample"]), sampled, strict=True):
        assert_same(ours, wanted)


def test_every_shape_is_compiled_once(tokenizer):
    """Single lines, as on a pipe, are padded to two lengths, which compile two programs."""
    writer = make_writer(tokenizer, seed=1)
    for text in TEXTS:
        writer.write([text], METHODS["greedy"])
    assert writer.programs == 2
    for text in ("d e", "a", "c " * 36, "i j " * 5):
        writer.write([text], METHODS["greedy"])
    assert writer.programs == 3  # 40 tokens is the third and longest length


def test_what_stands_for_no_text_is_not_written(tokenizer):
    writer = make_writer(tokenizer, special=30.0)
    found = writer.write(TEXTS, METHODS["greedy"])
    assert not any("[" in answer.texts[0].text for answer in found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Texts, "barred", property(lambda self: ()))
        loose = Writer(writer.config, writer._params, (tokenizer, tokenizer), jnp.dtype("float32"))
    found = loose.write(TEXTS, METHODS["greedy"])
    assert any("[" in answer.texts[0].text for answer in found)  # the first check is not vacuous


@pytest.mark.parametrize("recipe", ["translation", "causal_lm"])
def test_no_text_is_longer_than_its_limit(recipe, tokenizer, monkeypatch):
    writer, lengths = make_writer(tokenizer, recipe), {}
    decode = Texts.decode

    def note(self, read, written):
        lengths.setdefault(len(read), []).append(len(written))
        return decode(self, read, written)

    monkeypatch.setattr(Texts, "decode", note)
    for ratio, extra in ((0.0, 0), (0.5, 1)):
        lengths.clear()
        fields = {"method": "greedy", "length_ratio": ratio, "length_extra": extra}
        answers = writer.write(TEXTS, decoding_of(**fields))
        assert all(answer.texts for answer in answers)
        assert all(max(of) <= int(ratio * read + extra) for read, of in lengths.items())
        assert any(max(of) == int(ratio * read + extra) for read, of in lengths.items())


def test_learned_positions_are_enough_for_what_is_written(tokenizer):
    fields = {"model__position_embedding": "learned", "model__positions": 48}
    for recipe, most in (("translation", 40), ("causal_lm", 47)):
        writer = make_writer(tokenizer, recipe, **fields)
        longest = "a " * (most - 1)
        found = writer.write([longest, longest + "a"], decoding_of(length_extra=100, beam=2))
        assert found[0].texts
        assert f"has {most + 1} tokens, more than the {most} of config." in found[1].problem


def test_a_source_that_is_cut_is_written_to_as_its_beginning(tokenizer, caplog):
    writer = make_writer(tokenizer, "summarization", parallel__cut_sources=True)
    longest = "a b c " * 13  # 39 words and [SEP]
    decoding = decoding_of(length_extra=20, beam=2)
    with caplog.at_level("INFO", logger="absl"):
        whole, cut = writer.write([longest, longest + "a b"], decoding)
    assert whole.texts == cut.texts != ()
    assert (whole.cut, cut.cut, cut.problem) == (False, True, "")
    assert (1, 2, 40, "config.parallel.max_length") in [r.args for r in caplog.records]


@pytest.mark.parametrize(
    ("recipe", "text", "mentions"),
    [
        ("translation", "", ["empty"]),
        ("translation", "\u0007", ["characters", "vocabulary"]),
        ("translation", "a " * 40, ["41 tokens", "40", "config.parallel.max_length"]),
        ("causal_lm", "a " * 48, ["49 tokens", "48", "config.data.length"]),
        ("span_corruption", "a b", ["[MASK]"]),
        ("span_corruption", "[MASK] [MASK] [MASK]", ["[MASK]", "3", "2"]),
    ],
)
def test_texts_that_cannot_be_read(recipe, text, mentions, tokenizer):
    texts = make_texts(config_of(recipe), tokenizer, tokenizer)
    ((ids, said, _),) = texts.encode([text])
    assert not ids
    assert all(part in said for part in mentions)


def test_what_a_language_model_writes_begins_with_the_prompt(tokenizer):
    writer = make_writer(tokenizer, "causal_lm")
    texts = ["", *TEXTS]
    for text, answer in zip(texts, writer.write(texts, METHODS["beam"]), strict=True):
        prompt = tokenizer.decode(tokenizer.encode([text])[0])
        assert all(written.text.startswith(prompt) for written in answer.texts)


def test_spans_are_filled_in_where_they_were_hidden(tokenizer):
    texts = make_texts(config_of("span_corruption"), tokenizer, tokenizer)
    ((read, problem, _),) = texts.encode(["a [MASK] c [MASK]"])
    assert not problem
    entries = tokenizer.pieces(read)
    assert entries == ["[CLS]", "a", "[SPAN_0]", "c", "[SPAN_1]", "[SEP]", "[SEP]"]

    def ids(text):
        return [ENTRIES.index(entry) for entry in text.split()]

    assert texts.decode(read, ids("[SPAN_0] b ##x [SPAN_1] d")) == "a bx c d"
    assert texts.decode(read, ids("i [SPAN_1] d")) == "a c d"
    writer = make_writer(tokenizer, "span_corruption")
    for answer in writer.write(["a [MASK] c", "[MASK] b"], METHODS["beam"]):
        assert answer.texts
        assert not any("[" in w.text for w in answer.texts)


def test_a_model_of_nothing_but_nan_says_so(tokenizer):
    writer = make_writer(tokenizer)
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), writer._params)
    broken = Writer(writer.config, params, (tokenizer, tokenizer), jnp.dtype("float32"))
    for method in ("beam", "greedy"):
        (answer,) = broken.write(["a"], METHODS[method])
        assert "NaN" in answer.problem


@given(
    lengths=st.lists(st.integers(1, 100), max_size=80),
    tokens=st.integers(2, 3_000),
    exact=st.booleans(),
)
def test_every_text_is_dealt_once_and_batches_hold_no_more_than_asked(lengths, tokens, exact):
    batches = list(generation.make_batches(lengths, 100, tokens, exact=exact))
    places = np.concatenate([b.places for b in batches]) if batches else np.zeros(0, int)
    assert sorted(places[places >= 0]) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[place] for place in batch.places if place >= 0]
        assert max(inside) <= batch.length
        assert min(inside) == batch.length or not exact
        assert len(batch.places) == 1 or len(batch.places) * batch.length <= tokens
    if not exact:
        assert len({b.length for b in batches}) <= 4  # 16, 32, 64, 100


@pytest.mark.parametrize(
    ("recipe", "columns", "empty"),
    [("causal_lm", ("prompt", "text"), True), ("translation", ("aa", "source", "text"), False)],
)
def test_lines_and_tables_that_a_writer_reads(recipe, columns, empty, tmp_path):
    """An empty prompt is valid; an empty source is an error for that row."""
    config = config_of(recipe, parallel__columns=("aa", "bb"))
    reads = input_rows.describe_model_input(config)
    assert [name for (name,) in reads.columns] == list(columns)
    (tmp_path / "a.txt").write_text(f'a b\n\n{{"{columns[0]}": "c"}}\n')
    rows = list(input_rows.open_input(tmp_path / "a.txt", "lines", reads))
    assert [row.texts for row in rows] == [("a b",), ("",) if empty else (), ("c",)]
    assert [bool(row.problem) for row in rows] == [False, not empty, False]
    said = stream.describe_row(rows[0], {"prediction": "x"}, reads)
    assert said == {"id": 0, columns[0]: "a b", "prediction": "x"}
    (tmp_path / "a.csv").write_text(f"n,{columns[0]}\n1,a\n2,\n")
    rows = list(input_rows.open_input(tmp_path / "a.csv", "csv", reads))
    assert [bool(row.problem) for row in rows] == [False, not empty]
    assert rows[0].others == {"n": "1"}


def test_a_tsv_without_a_header_is_read_as_in_training(tmp_path):
    """Columns are identified by position, unless the first line names them."""
    config = config_of("translation", parallel__source="tsv:train.tsv")
    reads = input_rows.describe_model_input(config)
    (tmp_path / "a.tsv").write_text("a b\tx\nc\ty\n")
    rows = list(input_rows.open_input(tmp_path / "a.tsv", "tsv", reads))
    assert [(row.texts, row.others) for row in rows] == [
        (("a b",), {"1": "x"}),
        (("c",), {"1": "y"}),
    ]
    (tmp_path / "named.tsv").write_text("id\tsource\n7\ta b\n")
    (row,) = input_rows.open_input(tmp_path / "named.tsv", "tsv", reads)
    assert (row.id, row.texts) == ("7", ("a b",))
    second = input_rows.describe_model_input(config, texts=("1",))
    rows = list(input_rows.open_input(tmp_path / "a.tsv", "tsv", second))
    assert [row.texts for row in rows] == [("x",), ("y",)]
    with refused(UserError, "0, 1"):
        input_rows.open_input(
            tmp_path / "a.tsv", "tsv", input_rows.describe_model_input(config, ("2",))
        )
