"""Span corruption: lengths, and reconstruction of every row."""

import struct

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.interfaces import SequenceBatch, SpecialIds
from convbert_jax.objectives.span_corruption import SpanCounts, corrupt
from tests.batches import check_batch
from tests.refusals import refused


def special_ids(sentinels):
    names = {f"[SPAN_{i}]": 5 + i for i in range(sentinels)}
    return SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4, extra=names)


def restore(batch, row, special):
    """Reconstruct the tokens of a row from source and target; check their structure."""
    sizes = [int((batch[name][row] != 0).sum()) for name in ("source_ids", "segment_ids")]
    source, target = (
        np.asarray(batch[name][row][:size]).tolist()
        for name, size in zip(("source", "labels"), sizes, strict=True)
    )
    if not source:
        return []
    assert source.pop() == target.pop() == special.sep
    spans, order = {}, []
    for token in target:
        if token in special.sentinels:
            order.append(token)
            spans[token] = []
        else:
            spans[order[-1]].append(token)
    assert order == list(special.sentinels[: len(order)])
    assert [token for token in source if token in special.sentinels] == order
    assert all(spans.values())
    read = np.asarray(batch["tokens"][row]).tolist()
    assert read == [special.cls, *target] + [special.pad] * (len(read) - len(target) - 1)
    return [t for token in source for t in spans.get(token, [token])]


@given(
    length=st.integers(2, 300),
    fraction=st.floats(0.05, 0.5),
    span=st.floats(1.0, 10.0),
)
@settings(max_examples=60)
def test_lengths_follow_from_the_length_of_a_row(length, fraction, span):
    counts = SpanCounts(length, fraction, span)
    noise, spans = counts.of(length)
    assert 1 <= spans <= min(noise, length - noise)
    assert spans <= counts.spans
    assert length - noise + spans + 1 <= counts.source
    assert noise + spans + 1 <= counts.target
    if length > 50 and span >= 2:  # full rows are not padded
        assert length - noise + spans + 1 == counts.source
        assert noise + spans + 1 == counts.target


def test_lengths_of_t5():
    """Raffel et al. 2020: 568 tokens give a source of 512 and a target of 114 tokens."""
    counts = SpanCounts(568)
    assert (counts.source, counts.target, counts.of(568)) == (512, 114, (85, 28))


def float32(value):
    """Round float64 to float32; exact for products and quotients of two float32 numbers."""
    return struct.unpack("f", struct.pack("f", value))[0]


def test_counts_are_rounded_in_float32():
    """As TensorFlow rounds in T5's preprocessing; a tie in float64 is often not one in float32."""
    for fraction, span in ((0.15, 3.0), (0.5, 3.0), (0.15, 1.5), (0.3, 2.2)):
        counts = SpanCounts(1_024, fraction, span)
        for length in range(2, 1_025):
            noise = round(float32(length * float32(fraction)))
            noise = min(max(noise, 1), length - 1)
            spans = max(round(float32(noise / float32(span))), 1)
            assert counts.of(length) == (noise, min(spans, noise, length - noise)), length
    expected = {190: (29, 10), 350: (53, 18), 390: (59, 20), 670: (101, 34), 710: (107, 36)}
    assert {length: SpanCounts(1_024).of(length) for length in expected} == expected
    assert [SpanCounts(1_024).of(length) for length in (0, 1)] == [(0, 0)] * 2


@pytest.mark.parametrize(("length", "span"), [(2, 3.0), (3, 1.0), (17, 1.0), (64, 3.0)])
def test_source_and_target_give_the_row_back(length, span):
    counts = SpanCounts(length, 0.15 if span == 3.0 else 0.5, span)
    special = special_ids(counts.spans)
    real = np.array([length, length, length // 2, 1, 0])
    rng = np.random.default_rng(length)
    tokens = rng.integers(200, 900, (5, length)).astype(np.int32)
    segments = (np.arange(length) < real[:, None]).astype(np.int32)
    tokens = np.where(segments, tokens, special.pad)
    run = jax.jit(corrupt, static_argnums=(3, 4))
    for seed in range(3):
        batch = run(jax.random.key(seed), tokens, segments, counts, special)
        check_batch(batch, SequenceBatch)
        assert batch["source"].shape == (5, counts.source)
        assert batch["labels"].shape == (5, counts.target)
        for row, size in enumerate(real):
            noise, spans = counts.of(int(size))
            assert restore(batch, row, special) == tokens[row, :size].tolist()
            used = size > 0
            assert (batch["source_ids"][row] != 0).sum() == size - noise + spans + used
            assert (batch["segment_ids"][row] != 0).sum() == noise + spans + used


def test_every_token_is_taken_out_about_as_often():
    """Bounds are five standard deviations at 16 positions: one in 100,000 runs fails by chance."""
    length, rows = 40, 1_500
    counts = SpanCounts(length)
    special = special_ids(counts.spans)
    tokens = np.tile(np.arange(100, 100 + length, dtype=np.int32), (rows, 1))
    run = jax.jit(corrupt, static_argnums=(3, 4))
    batch = run(jax.random.key(0), tokens, np.ones_like(tokens), counts, special)
    taken = np.bincount(np.asarray(batch["labels"]).ravel(), minlength=200)[100:140] / rows
    noise, spans = counts.of(length)
    assert taken.sum() == pytest.approx(noise)
    assert taken[0] == 0  # a row begins with a kept token
    assert taken[-1] == 1  # and ends with a noise span, as in T5's code
    share = taken[8:24].mean()
    bound = 5 * (share * (1 - share) / rows) ** 0.5
    assert taken[8:24] == pytest.approx(np.full(16, share), abs=bound)
    firsts = (np.asarray(batch["source"]) == special.sentinels[0]).argmax(axis=1)
    assert len(set(firsts.tolist())) > 20
    assert spans == 2


def test_too_few_sentinels_and_rows_of_another_length_are_refused():
    counts, tokens = SpanCounts(64), np.full((1, 64), 90, np.int32)
    with refused(ValueError, 64, "config.tokenizer.sentinels=3"):
        corrupt(jax.random.key(0), tokens, tokens, counts, special_ids(1))
    with refused(ValueError, 64, 32):
        corrupt(jax.random.key(0), tokens, tokens, SpanCounts(32), special_ids(9))
