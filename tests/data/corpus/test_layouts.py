"""Rows of documents: packed rows, ELECTRA's examples, and labeled text pairs."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import ConfigError, from_config_dict, to_dict
from convbert_jax.data.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus import prepare
from convbert_jax.data.errors import DataError
from convbert_jax.data.layouts import (
    FOLLOWS,
    OTHER,
    UNLABELLED,
    ElectraRows,
    PackedRows,
    PairRows,
    split_sentences,
)
from convbert_jax.data.shards import from_records, row_dtype, to_records
from convbert_jax.interfaces import PairBatch, SpecialIds
from tests.batches import check_batch
from tests.refusals import refused

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
sizes_of_documents = st.lists(st.lists(st.integers(0, 70), max_size=12), max_size=12)
lengths = st.sampled_from([8, 16, 20, 64, 128])


def pack(layout, documents):
    rows = [row for document in documents for row in layout.add(document)]
    return [*rows, *layout.flush()]


def electra(documents, length=128, bug=False, seed="x"):
    return pack(ElectraRows(length, SPECIAL, release_bug=bug, seed=seed), documents)


def pair(documents, length=128, pairs="next", seed="0"):
    return pack(PairRows(length, SPECIAL, pairs=pairs, seed=seed), documents)


def number(sizes):
    """Make documents from the token counts of their lines; every token is a different number."""
    counter = itertools.count(10)
    return [[[next(counter) for _ in range(size)] for size in lines] for lines in sizes]


def natural(count, seed=0, lines=(1, 40)):
    """Return documents of lines of 3 to 50 tokens."""
    rng = random.Random(seed)
    return number([[rng.randint(3, 50) for _ in range(rng.randint(*lines))] for _ in range(count)])


def all_of(documents):
    return list(itertools.chain(*itertools.chain(*documents)))


def texts(row):
    """Return (first, second text) of a row, without special tokens."""
    assert (row.tokens[0], row.tokens[-1]) == (SPECIAL.cls, SPECIAL.sep)
    boundary = row.type_ids.index(1) if 1 in row.type_ids else len(row.tokens)
    assert row.type_ids == [0] * boundary + [1] * (len(row.tokens) - boundary)
    assert row.segment_ids == [1] * len(row.tokens)
    assert row.tokens[boundary - 1] == SPECIAL.sep
    return row.tokens[1 : boundary - 1], row.tokens[boundary:-1]


@pytest.mark.parametrize("layout", ["packed", "electra", "pairs"])
def test_records_round_trip(layout):
    for vocab_size, length in ((300, 16), (65_536, 16), (70_000, 800)):
        rng = random.Random(0)
        documents = [
            [[rng.randrange(5, vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(4)]
            for _ in range(30)
        ]
        make = {"packed": lambda d, n: pack(PackedRows(n, SPECIAL), d)}
        rows = (make | {"electra": electra, "pairs": pair})[layout](documents, length)
        dtype = row_dtype(length, vocab_size, layout)
        stored = to_records(rows, dtype, pad=0)
        assert {len(record) for record in stored} == {dtype.itemsize}
        for row, found in zip(rows, from_records(stored, dtype), strict=True):
            for name in {"tokens", "segment_ids", "type_ids"} & set(dtype.names):
                values = getattr(row, name)
                assert found[name].tolist() == values + [0] * (length - len(values))
            assert layout != "pairs" or found["pair_label"] == row.pair_label


# --- Packed ---


def pieces(row):
    """Yield (segment id, ids between [CLS] and [SEP]) of each document part in a row."""
    found = zip(row.segment_ids, row.tokens, strict=True)
    for segment, group in itertools.groupby(found, key=lambda pair: pair[0]):
        tokens = [token for _, token in group]
        assert (tokens[0], tokens[-1]) == (SPECIAL.cls, SPECIAL.sep)
        yield segment, tokens[1:-1]


@settings(max_examples=60)
@given(sizes=sizes_of_documents, length=lengths)
def test_packing_keeps_every_token_in_order(sizes, length):
    documents = number(sizes)
    rows = pack(PackedRows(length, SPECIAL), documents)
    assert [i for row in rows for _, piece in pieces(row) for i in piece] == all_of(documents)
    starts = {tokens[0] for lines in documents if (tokens := all_of([lines]))}
    for row in rows:
        assert len(row.tokens) == len(row.segment_ids) <= length
        found = list(pieces(row))
        assert [segment for segment, _ in found] == list(range(1, len(found) + 1))
        for _, piece in found:  # one document per segment
            assert piece
            assert not starts & set(piece[1:])
    shortest = min(16, length // 8)
    for row, following in itertools.pairwise(rows):
        first = next(pieces(following))[1]
        assert length - len(row.tokens) < 2 + min(shortest, len(first))


def test_packed_rows_are_full():
    rows = pack(PackedRows(128, SPECIAL), number([[5000], [3000], [126], [7]]))
    assert all(len(row.tokens) >= 128 - 17 for row in rows[:-1])
    assert sum(len(row.tokens) for row in rows[:-1]) / (128 * (len(rows) - 1)) > 0.97
    rows = pack(PackedRows(8, SPECIAL), [[[10]], [[]], [[11]], [[12]]])  # one token each
    assert [row.tokens for row in rows] == [[2, 10, 3, 2, 11, 3], [2, 12, 3]]
    assert [row.segment_ids for row in rows] == [[1, 1, 1, 2, 2, 2], [1, 1, 1]]


# --- ELECTRA's example builder ---


def test_electra_statistics():
    documents = natural(60, lines=(200, 200))
    rows = electra(documents)
    assert all(len(row.tokens) <= 128 for row in rows)
    found = [texts(row) for row in rows]
    assert all(first for first, _ in found)
    assert all(first == sorted(first) and second == sorted(second) for first, second in found)
    long = [(first, second) for first, second in found if len(first) + len(second) > 110]
    assert len(long) > 1000
    assert 0.07 < sum(not second for _, second in long) / len(long) < 0.14  # 10% have one segment
    middle = np.mean([len(first) for first, second in long if second])
    assert 55 < middle < 75  # close to half of the row
    short = sum(len(row.tokens) < 90 for row in rows) / len(rows)
    assert 0.02 < short < 0.08  # 5% short targets, plus document ends
    rows = electra(documents[:40], bug=True)  # mostly one segment
    counts = Counter((bool(first), bool(second)) for first, second in map(texts, rows))
    assert counts[True, False] / len(rows) > 0.95
    assert counts[False, True] > 0  # short targets: the first line exceeds half of the target


def test_electra_release_bug_with_long_lines():
    """A first line of at least half the target goes to the second segment; the first stays empty.

    A shorter line after it goes to the first segment, which reverses the order of the text.
    """
    long, short = list(range(10, 110)), list(range(200, 240))
    (sound,) = electra([[long, short]], seed="a")
    assert texts(sound) == (long, short[: 128 - 100 - 3])
    turned = Counter()
    for seed in map(str, range(50)):
        first, second = texts(electra([[long, short]], bug=True, seed=seed)[0])
        turned[first == short and second == long[: 128 - 40 - 3]] += 1
        turned["empty"] += texts(electra([[long]], bug=True, seed=seed)[0]) == ([], long)
    assert 40 <= turned[True] <= 50  # all but the 10% with a single segment
    assert 40 <= turned["empty"] <= 50


def test_electra_examples_do_not_cross_documents_and_repeat_with_the_seed():
    rows = electra([[[10, 11], [12]], [list(range(1000, 1030))], [[]]], seed="s")
    assert len(rows) == 2
    assert min(texts(rows[1])[0]) >= 1000
    a, b, c = (electra(natural(5, lines=(100, 100)), 64, seed=seed) for seed in "aab")
    assert a == b != c


# --- Pairs ---


@settings(max_examples=60)
@given(sizes=sizes_of_documents, length=lengths, seed=st.text(max_size=2))
def test_labels_of_pairs_are_true(sizes, length, seed):
    """Text displaced by a random second text starts the next row, so each token occurs once."""
    documents = number([[size for size in lines if size] for lines in sizes])
    place = {token: i for i, lines in enumerate(documents) for line in lines for token in line}
    starts = {line[0] for lines in documents for line in lines}
    kept = []
    for row in pair(documents, length, "next", seed):
        first, second = texts(row)
        assert first
        assert len(row.tokens) <= length
        assert len({place[token] for token in first}) == 1
        assert len({place[token] for token in second}) <= 1
        if row.pair_label == OTHER:
            assert place[first[0]] != place[second[0]]
            assert second[0] in starts
        elif second or row.pair_label == FOLLOWS:
            assert second[0] == first[-1] + 1
        kept += first + (second if row.pair_label != OTHER else [])
    assert kept == all_of(documents)
    kept = []
    for row in pair(documents, length, "order", seed):
        first, second = texts(row)
        assert first
        assert len(row.tokens) <= length
        assert (row.pair_label == UNLABELLED) == (not second)
        if row.pair_label == OTHER:
            first, second = second, first
        assert not second or second[0] == first[-1] + 1
        kept += first + second
    assert sorted(kept) == all_of(documents)


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_half_of_the_pairs_are_false_and_lengths_do_not_tell(pairs):
    """The mean lengths of both labels differ by less than four standard errors."""
    rows = pair(natural(1_200), pairs=pairs)
    labels = np.array([row.pair_label for row in rows])
    judged = labels[labels != UNLABELLED]
    assert len(judged) > 0.85 * len(labels) > 3_000
    assert abs((judged == OTHER).mean() - 0.5) < 3 * 0.5 / len(judged) ** 0.5
    sizes = np.array([list(map(len, texts(row))) for row in rows])
    for measure in (sizes[:, 0], sizes[:, 1], sizes.sum(axis=1)):
        true, false = (measure[labels == label] for label in (FOLLOWS, OTHER))
        error = (true.var() / len(true) + false.var() / len(false)) ** 0.5
        assert abs(true.mean() - false.mean()) < 4 * error
        assert error < 0.7  # tokens, of 128


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_the_first_sentence_of_the_second_text_tells_little(pairs):
    """The first sentence of a second text is equally long for both labels.

    Sentences after a cut by token count are a third longer than average here. Random second texts
    must be selected in the same way.
    """
    rng = random.Random(2)
    documents = number(
        [[min(99, 1 + int(rng.expovariate(1 / 15))) for _ in range(30)] for _ in range(1_000)]
    )
    size = {line[0]: len(line) for lines in documents for line in lines}
    found = {FOLLOWS: [], OTHER: [], UNLABELLED: []}
    for row in pair(documents, pairs=pairs):
        if second := texts(row)[1]:
            found[row.pair_label].append(size[second[0]])
    assert abs(np.mean(found[FOLLOWS]) / np.mean(found[OTHER]) - 1) < 0.15


def test_rows_without_a_label():
    assert {row.pair_label for row in pair(natural(1, seed=3))} == {UNLABELLED}  # one document
    lone = number([[5], [4]])  # one sentence each
    assert [row.pair_label for row in pair(lone)] == [UNLABELLED] * 2
    rows = pair(number([[300]]))  # a long sentence is cut and gets no second text
    assert [len(texts(row)[0]) for row in rows] == [125, 125, 50]
    rows = pair(number([[100, 90, 80], [7, 7]]), pairs="order")
    assert [row.pair_label == UNLABELLED for row in rows] == [True] * 3 + [False]


@pytest.mark.parametrize("text", [
    'One.| Two "three?"| Four (five!)| six 3.5 e.g',
    "\u4e00\u3002|\u4e8c\uff01|\u4e09",
    "no end",
    "\u201cGo!\u201d| he said.| She went.",
    "\u300c\u4e00\u3002\u300d|\u4e8c\uff01\uff1f|\u4e09",  # Japanese: closing brackets stay
    "\u092f\u0939 \u0939\u0948\u0964| \u0935\u0939?| \u0939\u093e\u0901",  # Hindi
    "\u06cc\u06c1 \u06c1\u06d2\u06d4| \u0648\u06c1\u061f| \u06c1\u0627\u06ba",  # Urdu
], ids=range(7))  # fmt: skip
def test_sentences(text):
    """Covers closing brackets in Japanese and the sentence ends of Hindi and Urdu."""
    line = text.replace("|", "")
    assert split_sentences(line) == [part.strip() for part in text.split("|")]
    assert split_sentences(line, keeps_spaces=True) == text.split("|")


def test_spaces_between_sentences():
    """A no-break space is white space for the split, but not for every vocabulary."""
    line = " One.\u00a0 Two! \t"
    assert split_sentences(line) == [" One.", "Two!"]
    assert split_sentences(line, keeps_spaces=True) == [" One.", "\u00a0 Two! \t"]


@pytest.fixture(scope="module")
def pairs_config(make_config, tmp_path_factory):
    """pairs_config(**fields): the documents of `make_config` as pairs; "a__b" is the field a.b."""

    def make(**fields):
        values = to_dict(make_config(tmp_path_factory.mktemp("pairs")))
        defaults = {"recipe": "masked_lm", "objective__sentence_pairs": "next"}
        defaults |= {"data__layout": "pairs", "optimizer__warmup_steps": 1}
        for path, value in (defaults | fields).items():
            section, _, field = path.rpartition("__")
            (values[section] if section else values)[field] = value
        return from_config_dict(values)

    return make


def test_a_corpus_of_pairs(pairs_config, tmp_path):
    corpus = prepare(pairs_config(), tmp_path / "prepared")
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
    metadata = json.loads((corpus.directory / "metadata.json").read_text())
    for shards in metadata["splits"].values():
        rows, labeled = (sum(shard[name] for shard in shards) for name in ("rows", "pairs"))
        assert 0.5 * rows < labeled < rows
    with refused(DataError, "(next)", "(order)", path=corpus.directory):
        prepare(pairs_config(objective__sentence_pairs="order"), corpus.directory)
    lines = "\n\n".join(f"one sentence of words {i}" for i in range(300))
    (tmp_path / "text.txt").write_text(lines)
    source = f"text:{tmp_path / 'text.txt'}"
    config = pairs_config(data__source=source, tokenizer__vocab_size=50)
    with refused(DataError, field="config.data.layout", value="pairs"):
        prepare(config, tmp_path / "without")


def test_fields_of_pairs_that_do_not_go_together(pairs_config):
    for fields, mentions in (
        ({"recipe": "replaced_token"}, ("sentence_pairs", "masked_lm")),
        ({"data__layout": "packed"}, ("data.layout", "pairs")),
        ({"objective__sentence_pairs": "none"}, ("sentence_pairs", "next")),
        ({"objective__sentence_pairs": "nsp"}, ("sentence_pairs", "nsp")),
        ({"model__types": 1}, ("layout", "pairs")),
    ):
        with refused(ConfigError, *mentions):
            pairs_config(**fields)
