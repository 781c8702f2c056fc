"""Rows of two texts: no token is lost, labels are true, and lengths tell little of them."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import ConfigError, from_config_dict, to_dict
from convbert_jax.data.corpus.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.pairs import FOLLOWS, OTHER, UNLABELLED, PairRows, split_sentences
from convbert_jax.data.corpus.rows import from_records, row_dtype, to_records
from convbert_jax.data.errors import DataError
from convbert_jax.interfaces.batch import PairBatch
from convbert_jax.interfaces.special_ids import SpecialIds
from tests.batches import check_batch

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)


def pack(documents, length=128, pairs="next", seed="0"):
    layout = PairRows(length, SPECIAL, pairs=pairs, seed=seed)
    rows = [row for document in documents for row in layout.add(document)]
    return [*rows, *layout.flush()]


def texts(row):
    """(first, second text) of a row, without special tokens."""
    assert row.tokens[0] == SPECIAL.cls
    assert row.tokens[-1] == SPECIAL.sep
    boundary = row.type_ids.index(1) if 1 in row.type_ids else len(row.tokens)
    assert row.type_ids == [0] * boundary + [1] * (len(row.tokens) - boundary)
    assert row.segment_ids == [1] * len(row.tokens)
    assert row.tokens[boundary - 1] == SPECIAL.sep
    return row.tokens[1 : boundary - 1], row.tokens[boundary:-1]


def number(sizes):
    """Documents of sentences of so many tokens, each token another number."""
    counter = itertools.count(10)
    return [[[next(counter) for _ in range(size)] for size in lines] for lines in sizes]


def natural(count, seed=0):
    """Documents of 1 to 40 sentences of 3 to 50 tokens."""
    rng = random.Random(seed)
    return number([[rng.randint(3, 50) for _ in range(rng.randint(1, 40))] for _ in range(count)])


sizes_of_documents = st.lists(st.lists(st.integers(1, 70), max_size=12), max_size=12)


@settings(deadline=None, max_examples=60)
@given(sizes=sizes_of_documents, length=st.sampled_from([8, 16, 64, 128]), seed=st.text(max_size=2))
def test_next_is_true(sizes, length, seed):
    documents = number(sizes)
    place = {token: i for i, lines in enumerate(documents) for line in lines for token in line}
    starts = {line[0] for lines in documents for line in lines if line}
    kept = []
    for row in pack(documents, length, "next", seed):
        first, second = texts(row)
        assert first
        assert len(row.tokens) <= length
        assert len({place[token] for token in first}) == 1
        assert len({place[token] for token in second}) <= 1
        if row.pair_label == FOLLOWS:
            assert second[0] == first[-1] + 1
        if row.pair_label == OTHER:
            assert place[first[0]] != place[second[0]]
            assert second[0] in starts
        if row.pair_label == UNLABELLED and second:
            assert second[0] == first[-1] + 1
        kept += first + (second if row.pair_label != OTHER else [])
    # What a false second text displaces comes in the next row: each token once, in its order.
    assert kept == list(itertools.chain(*itertools.chain(*documents)))


@settings(deadline=None, max_examples=60)
@given(sizes=sizes_of_documents, length=st.sampled_from([8, 16, 64, 128]), seed=st.text(max_size=2))
def test_order_is_true(sizes, length, seed):
    documents = number(sizes)
    kept = []
    for row in pack(documents, length, "order", seed):
        first, second = texts(row)
        assert first
        assert len(row.tokens) <= length
        assert (row.pair_label == UNLABELLED) == (not second)
        if row.pair_label == OTHER:
            first, second = second, first
        assert not second or second[0] == first[-1] + 1
        kept += first + second
    assert sorted(kept) == list(itertools.chain(*itertools.chain(*documents)))


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_half_of_the_pairs_are_false(pairs):
    rows = pack(natural(400), pairs=pairs)
    labels = np.array([row.pair_label for row in rows])
    judged = labels[labels != UNLABELLED]
    assert len(judged) > 0.85 * len(labels) > 1_000
    assert abs((judged == OTHER).mean() - 0.5) < 3 * 0.5 / len(judged) ** 0.5


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_lengths_do_not_tell(pairs):
    """Means of both kinds within four standard errors of each other."""
    rows = pack(natural(1_500), pairs=pairs)
    for measure in (lambda a, b: len(a), lambda a, b: len(b), lambda a, b: len(a) + len(b)):
        true, false = (
            np.array([measure(*texts(row)) for row in rows if row.pair_label == label])
            for label in (FOLLOWS, OTHER)
        )
        error = (true.var() / len(true) + false.var() / len(false)) ** 0.5
        assert abs(true.mean() - false.mean()) < 4 * error
        assert error < 0.6  # tokens of 128


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_the_first_sentence_of_the_second_text_tells_little(pairs):
    """A text cut by tokens is followed by a sentence that is a third longer than the mean here; so
    is one of another document.
    """
    rng = random.Random(2)
    documents = number(
        [[min(99, 1 + int(rng.expovariate(1 / 15))) for _ in range(30)] for _ in range(1_500)]
    )
    size = {line[0]: len(line) for lines in documents for line in lines}
    means = [
        np.mean([size[texts(row)[1][0]] for row in rows if len(texts(row)[1]) > 0])
        for rows in (
            [row for row in pack(documents, pairs=pairs) if row.pair_label == label]
            for label in (FOLLOWS, OTHER)
        )
    ]
    assert abs(means[0] / means[1] - 1) < 0.15


def test_a_document_alone_has_no_label_for_next():
    assert {row.pair_label for row in pack(natural(1, seed=3))} == {UNLABELLED}
    lone = number([[5], [4]])  # of one sentence each
    assert [row.pair_label for row in pack(lone)] == [UNLABELLED] * 2


def test_long_sentences_are_cut_and_stand_alone():
    rows = pack(number([[300]]), length=128)
    assert [len(texts(row)[0]) for row in rows] == [125, 125, 50]
    rows = pack(number([[100, 90, 80], [7, 7]]), length=128, pairs="order")
    assert [row.pair_label == UNLABELLED for row in rows] == [True] * 3 + [False]


def test_sentences():
    assert split_sentences('One. Two "three?" Four (five!) six 3.5 e.g') == [
        "One.", 'Two "three?"', "Four (five!)", "six 3.5 e.g",
    ]  # fmt: skip
    assert split_sentences("\u4e00\u3002\u4e8c\uff01\u4e09") == [
        "\u4e00\u3002", "\u4e8c\uff01", "\u4e09",
    ]  # fmt: skip
    assert split_sentences("no end") == ["no end"]
    assert split_sentences("\u201cGo!\u201d he said. She went.") == [
        "\u201cGo!\u201d", "he said.", "She went.",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [
    "\u300c\u4e00\u3002\u300d|\u4e8c\uff01\uff1f|\u4e09",  # Japanese: what closes goes along
    "\u092f\u0939 \u0939\u0948\u0964| \u0935\u0939?| \u0939\u093e\u0901",  # Hindi
    "\u06cc\u06c1 \u06c1\u06d2\u06d4| \u0648\u06c1\u061f| \u06c1\u0627\u06ba",  # Urdu
])  # fmt: skip
def test_sentences_of_other_scripts(text):
    """Japanese ones began with the bracket that closed the last, Hindi and Urdu ones had no end."""
    expected = [part.strip() for part in text.split("|")]
    assert split_sentences(text.replace("|", "")) == expected


def test_records_round_trip():
    rows = pack(natural(30), length=64)
    dtype = row_dtype(64, 30_000, "pairs")
    back = from_records(to_records(rows, dtype, pad=0), dtype)
    for row, stored in zip(rows, back, strict=True):
        assert stored["tokens"][: len(row.tokens)].tolist() == row.tokens
        assert stored["type_ids"][: len(row.tokens)].tolist() == row.type_ids
        assert stored["pair_label"] == row.pair_label


# --- A prepared corpus ---


@pytest.fixture(scope="module")
def pairs_config(make_config, tmp_path_factory):
    """The documents of `make_config`, as pairs."""
    values = to_dict(make_config(tmp_path_factory.mktemp("pairs")))
    values["recipe"] = "masked_lm"
    values["objective"]["sentence_pairs"] = "next"
    values["data"]["layout"] = "pairs"
    values["optimizer"]["warmup_steps"] = 1
    return from_config_dict(values)


@pytest.fixture(scope="module")
def corpus(pairs_config, tmp_path_factory):
    return prepare(pairs_config, tmp_path_factory.mktemp("corpus"))


def test_batches(corpus):
    batches = training_batches(corpus, batch_size=6, seed=0)
    stream = [next(batches) for _ in range(8)]
    check_batch(stream[0], PairBatch)
    assert {int(label) for batch in stream for label in batch["pair_label"]} >= {FOLLOWS, OTHER}
    batches.set_state(json.loads(json.dumps({**batches.get_state(), "next_batch": 5})))
    for name, array in next(batches).items():
        np.testing.assert_array_equal(array, stream[5][name])
    batches.close()
    last = list(evaluation_batches(corpus, batch_size=64))[-1]
    filled = last["segment_ids"].any(axis=1)
    assert not filled.all()
    assert set(last["pair_label"][~filled]) == {UNLABELLED}


def test_another_kind_is_another_corpus(corpus, pairs_config):
    metadata = json.loads((corpus.directory / "metadata.json").read_text())
    for split in metadata["splits"].values():
        assert 0.5 * split["rows"] < split["pairs"] < split["rows"]
    values = to_dict(pairs_config)
    values["objective"]["sentence_pairs"] = "order"
    with pytest.raises(DataError, match=r"layout \('pairs \(next\)' there, 'pairs \(order\)' want"):
        prepare(from_config_dict(values), corpus.directory)


def test_text_without_pairs_is_refused(pairs_config, tmp_path):
    lines = "\n\n".join(f"one sentence of words {i}" for i in range(300))
    (tmp_path / "text.txt").write_text(lines)
    values = to_dict(pairs_config)
    values["data"]["source"] = f"text:{tmp_path / 'text.txt'}"
    values["tokenizer"]["vocab_size"] = 50
    with pytest.raises(DataError, match="finds no pair of sentences in the train text"):
        prepare(from_config_dict(values), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recipe": "replaced_token"}, "sentence_pairs='next' goes with config.recipe='masked_lm'"),
        ({"data.layout": "packed"}, "set config.data.layout=pairs"),
        ({"objective.sentence_pairs": "none"}, "set config.objective.sentence_pairs=next or order"),
        ({"objective.sentence_pairs": "nsp"}, "sentence_pairs='nsp'"),
        ({"model.types": 1}, "layout='pairs' marks two segments"),
    ],
)
def test_what_does_not_go_together(pairs_config, fields, says):
    values = to_dict(pairs_config)
    for path, value in fields.items():
        section, _, field = path.rpartition(".")
        (values[section] if section else values)[field] = value
    with pytest.raises(ConfigError, match=says):
        from_config_dict(values)
