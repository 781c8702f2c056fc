"""Texts to rows to batches: truncation is counted, every row occurs once, few shapes."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data import samplers
from convbert_jax.data.tasks import labelled_text
from convbert_jax.data.tasks.labelled_text import IGNORED, Rows
from convbert_jax.interfaces import SpecialIds


class Letters:
    """A tokenizer of single letters that ignores zero-width spaces."""

    keeps_spaces = False
    special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)

    def encode(self, texts):
        return [[ord(c) for c in text if c != "\u200b"] for text in texts]


def pop_the_longer(first, second, budget):
    """Truncate a pair as in BERT's code."""
    first, second = list(first), list(second)
    while len(first) + len(second) > budget:
        (first if len(first) > len(second) else second).pop()
    return first, second


@given(st.text("ab", max_size=30), st.text("cd", max_size=30), st.integers(8, 24))
@settings(max_examples=100)
def test_pairs_lose_the_end_of_the_longer_text(first, second, length):
    encoded = labelled_text.encode_texts(Letters(), [(first, second)], length=length)
    kept = pop_the_longer(first.encode(), second.encode(), length - 3)
    row = [2, *kept[0], 3, *kept[1], 3]
    rows = encoded.rows
    assert rows.lengths.tolist() == [len(row)]
    assert rows.by_token["tokens"][0].tolist() == row + [0] * (length - len(row))
    types = [0] * (len(kept[0]) + 2) + [1] * (len(kept[1]) + 1)
    assert rows.by_token["type_ids"][0].tolist() == types + [0] * (length - len(row))
    assert encoded.truncated == (len(first) + len(second) > length - 3)


def test_single_texts_and_one_segment_type():
    encoded = labelled_text.encode_texts(Letters(), [("abcdefgh",), ("ab",)], length=8)
    assert encoded.rows.by_token["tokens"].tolist() == [
        [2, *b"abcdef", 3],
        [2, *b"ab", 3, 0, 0, 0, 0],
    ]
    assert encoded.truncated == 1
    assert not encoded.rows.by_token["type_ids"].any()
    pair = labelled_text.encode_texts(Letters(), [("ab", "cd")], length=8, types=1)
    assert not pair.rows.by_token["type_ids"].any()


def test_tags_stand_on_the_first_token_of_a_word():
    words = [["ab", "c", "\u200b"], ["ab"] * 9]
    encoded = labelled_text.encode_words(Letters(), words, [(5, 6, 7), None], length=8)
    rows = encoded.rows.by_token
    assert rows["tokens"][0].tolist() == [2, *b"abc", 1, 3, 0, 0]
    assert rows["tags"][0].tolist() == [-1, 5, -1, 6, 7, -1, -1, -1]
    assert rows["words"][0].tolist() == [-1, 0, -1, 1, 2, -1, -1, -1]
    assert rows["words"][1].tolist() == [-1, 0, -1, 1, -1, 2, -1, -1]
    assert (rows["tags"][1] == IGNORED).all()
    assert encoded.rows.lengths.tolist() == [6, 8]
    assert encoded.truncated == 1


def test_a_batch_is_cut_to_its_length():
    table = np.arange(24).reshape(3, 8)
    rows = Rows(np.asarray([2, 4, 3]), {"tokens": table}, {"label": np.asarray([7, 8, 9])})
    batch = rows.batch(np.asarray([[2, -1], [0, 1]]), 4)
    assert batch["tokens"].shape == (2, 2, 4)
    assert batch["tokens"][0, 0].tolist() == [16, 17, 18, 19]
    assert batch["segment_ids"][0, 0].tolist() == [1, 1, 1, 0]
    assert batch["weight"].tolist() == [[1, 0], [1, 1]]
    assert batch["label"][1].tolist() == [7, 8]


lengths_of_rows = st.lists(st.integers(2, 32), min_size=1, max_size=60).map(np.asarray)


@given(lengths_of_rows, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=100)
def test_an_epoch_has_every_row_once(lengths, batch_size, seed, epoch):
    buckets = (8, 16, 32)
    batches = samplers.epoch_batches(lengths, buckets, batch_size, seed=seed, epoch=epoch)
    seen = np.concatenate([index for _, index in batches])
    assert sorted(seen[seen >= 0]) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // batch_size)
    for length, index in batches:
        assert len(index) == batch_size
        assert (lengths[index[index >= 0]] <= length).all()
    longest = max(length for length, _ in batches)
    partial = [length for length, index in batches if (index < 0).any()]
    assert len(partial) <= 1
    assert all(length == longest for length in partial)


@given(lengths_of_rows, st.integers(1, 9))
@settings(max_examples=50)
def test_lengths_come_in_the_same_order_for_every_seed(lengths, batch_size):
    first, second = (
        samplers.epoch_batches(lengths, (8, 16, 32), batch_size, seed=seed, epoch=2)
        for seed in (1, 2)
    )
    assert [length for length, _ in first] == [length for length, _ in second]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        lengths = np.full(50, 5)
        batches = samplers.epoch_batches(lengths, (8,), 10, seed=seed, epoch=epoch)
        orders.append(np.concatenate([index for _, index in batches]).tolist())
    assert orders[0] == orders[3]
    assert orders[0] not in orders[1:3]


@given(lengths_of_rows, st.sampled_from([1, 4, 9, (5, 3, 1)]))
@settings(max_examples=80)
def test_evaluation_has_every_row_once(lengths, batch_sizes):
    """Each bucket may have a different batch size."""
    batches = samplers.evaluation_batches(lengths, (8, 16, 32), batch_sizes)
    seen = np.concatenate([index for _, index in batches])
    assert sorted(seen[seen >= 0]) == list(range(len(lengths)))
    sizes = dict(zip((8, 16, 32), batch_sizes, strict=True)) if batch_sizes == (5, 3, 1) else {}
    for length, index in batches:
        assert len(index) == sizes.get(length, batch_sizes)
        assert lengths[index[index >= 0]].max() <= length


def test_the_release_mixes_within_a_buffer_of_100():
    """Rows and fillers are mixed within the buffer and repeated, so counts stay balanced."""
    stream = samplers.release_batches(37, 128, 8, seed=3)
    drawn = [next(stream) for _ in range(200)]
    assert {length for length, _ in drawn} == {128}
    counts = collections.Counter(np.concatenate([index for _, index in drawn]).tolist())
    assert set(counts) == {-1, *range(37)}
    # 1600 draws from an epoch of 40; 100 are still in the buffer
    assert counts[-1] == pytest.approx(3 * 40, abs=9)
    assert all(count == pytest.approx(40, abs=3) for row, count in counts.items() if row >= 0)


def test_only_lengths_below_the_longest_are_buckets():
    assert samplers.choose_buckets((64, 32, 128, 512), 128) == (32, 64, 128)
    assert samplers.choose_buckets((), 50) == (50,)
