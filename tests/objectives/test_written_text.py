"""Sequence-to-sequence losses, and next-token labels that stay inside packed documents."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import ObjectiveSection
from convbert_jax.data.layouts import PackedRows
from convbert_jax.interfaces import LanguageBatch, SpecialIds
from convbert_jax.objectives.next_tokens import shift
from convbert_jax.objectives.written_text import count_words, heldout, judge
from tests.batches import check_batch, metrics_of

WORDS, LENGTH = 7, 24
SMOOTHED = ObjectiveSection(label_smoothing=0.1)
SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)


def draw(seed, rows=3, length=5):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(rows, length, WORDS))
    lengths = rng.integers(0, length + 1, rows)
    return logits, {
        "tokens": np.zeros((rows, length), np.int32),
        "labels": rng.integers(0, WORDS, (rows, length)).astype(np.int32),
        "segment_ids": (np.arange(length) < lengths[:, None]).astype(np.int32),
    }


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), smoothing=st.floats(0, 0.9))
def test_loss_by_hand(seed, smoothing):
    logits, batch = draw(seed)
    value, found = judge(
        jnp.asarray(logits, jnp.float32), batch, ObjectiveSection(label_smoothing=smoothing)
    )
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.full(logits.shape, smoothing / WORDS)
    np.put_along_axis(wanted, batch["labels"][..., None], 1 - smoothing + smoothing / WORDS, -1)
    told = batch["segment_ids"] != 0
    count = max(1, told.sum())
    expected = -((wanted * odds).sum(-1) * told).sum() / count
    assert float(value) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    sums = {name: (float(total), float(weight)) for name, (total, weight) in found.items()}
    assert all(weight == told.sum() for _, weight in sums.values())
    right = np.take_along_axis(odds, batch["labels"][..., None], -1)[..., 0]
    assert sums["token_loss"][0] == pytest.approx(-(right * told).sum(), rel=1e-4, abs=1e-5)
    assert sums["token_accuracy"][0] == (told & (odds.argmax(-1) == batch["labels"])).sum()


def test_constant_logits_are_as_accurate_as_guessing():
    _, batch = draw(1)
    total, weight = judge(jnp.zeros((3, 5, WORDS)), batch, SMOOTHED)[1]["token_accuracy"]
    assert float(total / weight) == pytest.approx(1 / WORDS)


def test_rows_of_padding_change_nothing():
    logits, batch = draw(1)
    more = {name: np.concatenate([a, np.zeros_like(a)]) for name, a in batch.items()}
    alone, _ = judge(jnp.asarray(logits), batch, SMOOTHED)
    beside, _ = judge(jnp.concatenate([logits, logits + 1]), more, SMOOTHED)
    assert float(alone) == pytest.approx(float(beside), rel=1e-6)


def test_words_are_beginnings_and_ends():
    begins, end = np.array([0, 0, 0, 0, 1, 1, 0], np.int32), 3
    batch = {
        "tokens": np.zeros((2, 5), np.int32),
        "labels": np.array([[4, 6, 5, 3, 4], [6, 5, 3, 0, 0]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 1, 2], [1, 1, 1, 0, 0]], np.int32),
    }
    nats, words = count_words((jnp.float32(8.0), jnp.float32(8)), batch, jnp.asarray(begins), end)
    assert (float(nats), float(words)) == (8.0, 6.0)


def test_perplexities_of_a_set_are_of_its_sums():
    names = ("loss", "perplexity", "token_accuracy", "token_loss", "word_perplexity")
    evaluator = heldout(names)
    assert evaluator.names == names
    parts = ("loss", "token_loss", "token_accuracy", "word_loss")
    batches = [
        dict(zip(parts, ((5.0, 2.0), (4.0, 2.0), (1.0, 2.0), (4.0, 1.0)), strict=True)),
        dict(zip(parts, ((3.0, 1.0), (2.0, 1.0), (1.0, 1.0), (2.0, 1.0)), strict=True)),
    ]
    found = metrics_of(evaluator, batches)
    assert found["perplexity"] == pytest.approx(math.exp(2))
    assert found["word_perplexity"] == pytest.approx(math.exp(3))
    assert found["loss"] == pytest.approx(8 / 3)
    nothing = dict.fromkeys(parts, (0.0, 0.0))
    assert math.isnan(metrics_of(evaluator, [nothing])["perplexity"])


# --- Next tokens of packed rows ---


def pack(documents):
    layout = PackedRows(LENGTH, SPECIAL)
    return [row for document in documents for row in layout.add([document])] + [*layout.flush()]


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=40), min_size=1, max_size=8))
def test_documents_come_back(documents):
    rows = pack(documents)
    tokens, segments = (
        np.array([values + [0] * (LENGTH - len(values)) for values in part], np.int32)
        for part in ([r.tokens for r in rows], [r.segment_ids for r in rows])
    )
    batch = {name: np.asarray(a) for name, a in shift(tokens, segments, pad=0).items()}
    check_batch(batch, LanguageBatch)
    assert batch["tokens"].shape == (len(rows), LENGTH)
    real = batch["segment_ids"] != 0
    cut = tokens[:, -1] == SPECIAL.sep
    assert real.sum() == (segments != 0).sum() - (tokens == SPECIAL.cls).sum() - cut.sum()
    assert (batch["labels"][~real] == 0).all()
    assert (batch["tokens"][~real] == 0).all()
    text = [token for document in documents for token in document]
    written = batch["labels"][real]
    assert written[written != SPECIAL.sep].tolist() == text
    read = batch["tokens"][real]
    before_cuts = tokens[:, : LENGTH - 2]  # the last token of a full row has no label
    assert read[read != SPECIAL.cls].tolist() == before_cuts[before_cuts > SPECIAL.mask].tolist()
    assert not (read == SPECIAL.sep).any()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_only_ends_of_documents_are_told(lengths):
    """A document that a row cuts gets no [SEP] label at the cut.

    With such labels a model would learn to end every text at the row length.
    """
    rows = pack([[5 + number] * length for number, length in enumerate(lengths)])
    left = dict(enumerate(lengths))
    for row in rows:
        given = [np.array([v + [0] * (LENGTH - len(v))]) for v in (row.tokens, row.segment_ids)]
        told = shift(*given, pad=0)
        read, labels = np.asarray(told["tokens"][0]), np.asarray(told["labels"][0])
        for segment in range(1, max(row.segment_ids) + 1):
            place = row.segment_ids.index(segment)
            size = row.segment_ids.count(segment) - 2
            number = row.tokens[place + 1] - 5
            left[number] -= size
            ends = labels[(read == number + 5)][-1] == SPECIAL.sep
            last = place + size + 2 == LENGTH
            assert ends == (left[number] == 0 and not last)
    assert set(left.values()) == {0}
