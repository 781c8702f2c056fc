"""The contrastive loss by its definition, in numpy."""

import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import Config, ObjectiveSection
from convbert_jax.config.training import POOLINGS
from convbert_jax.interfaces import SpecialIds
from convbert_jax.objectives import contrastive, metrics

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
# Pair 1 has the first text of pair 0, pair 2 the first text of pair 1 as its second text, pair 3
# the second text of pair 0. The last row is padding.
FIRST = [[2, 5, 3, 0], [2, 5, 3, 0], [2, 7, 6, 3], [2, 8, 9, 3], [2, 9, 3, 0], [0, 0, 0, 0]]
SECOND = [[2, 6, 3], [2, 7, 3], [2, 5, 3], [2, 6, 3], [2, 8, 3], [0, 0, 0]]
RELATED = {(0, 1), (1, 0), (0, 2), (1, 2), (0, 3), (3, 0)}


def batch() -> dict[str, np.ndarray]:
    first, second = (np.asarray(texts, np.int32) for texts in (FIRST, SECOND))
    return {
        "source": first,
        "source_ids": (first > 0).astype(np.int32),
        "tokens": second,
        "segment_ids": (second > 0).astype(np.int32),
    }


def encode(tokens, segment_ids, type_ids=None, *, dtype, key):
    table = np.random.default_rng(0).normal(size=(10, 6))
    return jnp.asarray(table, dtype)[tokens]


def vectors(texts, pooling):
    table = np.random.default_rng(0).normal(size=(10, 6))
    found = []
    for text in texts:
        ids = [token for token in text if token] or [0]
        parts = {"cls": table[ids[0]], "mean": table[ids].mean(axis=0)}
        vector = np.concatenate([parts[name] for name in POOLINGS[pooling]])
        found.append(vector / np.linalg.norm(vector))
    return np.asarray(found)


def test_the_loss_is_its_definition():
    config = Config(recipe="embedding", objective=ObjectiveSection(contrastive_temperature=0.5))
    model = types.SimpleNamespace(encode=encode)
    value, found = contrastive.loss(
        model, batch(), None, train=False, dtype=jnp.float32, config=config, special=SPECIAL
    )
    logits = vectors(FIRST, "mean") @ vectors(SECOND, "mean").T / 0.5
    losses, right, rows = [], [], range(5)
    for i in rows:
        ahead = [logits[i, j] for j in rows if (i, j) not in RELATED]
        behind = [logits[j, i] for j in rows if (j, i) not in RELATED]
        both = [np.log(np.exp(candidates).sum()) for candidates in (ahead, behind)]
        losses.append(np.mean(both) - logits[i, i])
        right.append(logits[i, i] == max(ahead))
    assert value == pytest.approx(np.mean(losses), rel=1e-5)
    assert [float(x) for x in found["contrastive_accuracy"]] == [sum(right), 5]
    assert 0 < sum(right) < 5


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_leaves_padding_out(pooling):
    rows = batch()
    hidden = encode(rows["source"], None, dtype=jnp.bfloat16, key=None)
    found = contrastive.pool(hidden, rows["source_ids"], pooling)
    assert found.dtype == jnp.float32
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:5], vectors(FIRST, pooling)[:5], atol=0.02)


@st.composite
def compared(draw):
    """Cosines, scores and real rows of a batch."""
    rows = draw(st.integers(1, 8))
    small = st.integers(-3, 3)
    lists = [draw(st.lists(small, min_size=rows, max_size=rows)) for _ in range(3)]
    return [np.asarray(values, np.float32) for values in lists]


@given(compared())
@settings(deadline=None, max_examples=50)
def test_cosent_is_its_definition(values):
    logits, score, real = values
    real = real > -2
    found = contrastive.cosent(jnp.asarray(logits), jnp.asarray(score), jnp.asarray(real))
    (total, weight), (right, count) = (tuple(map(float, pair)) for pair in found)
    pairs = [
        (i, j) for i in range(len(score)) for j in range(len(score))
        if score[i] > score[j] and real[i] and real[j]
    ]  # fmt: skip
    wrong = sum(np.exp(logits[j] - logits[i]) for i, j in pairs)
    assert weight == real.sum()
    assert total == pytest.approx(np.log1p(wrong) * weight, rel=1e-5, abs=1e-6)
    assert (right, count) == (sum(logits[i] > logits[j] for i, j in pairs), len(pairs))


def test_hard_negatives_are_further_candidates_of_first_texts():
    config = Config(recipe="embedding", objective=ObjectiveSection(contrastive_temperature=0.5))
    third = [[2, 7, 3], [2, 4, 3], [2, 8, 3], [2, 5, 3], [2, 6, 3], [0, 0, 0]]
    # Text 0 is a second text of the first text of pairs 0 and 1; text 3 is the first text of them.
    excluded = {(0, 0), (1, 0), (0, 3), (1, 3)}
    rows = batch() | {"negatives": np.asarray(third), "negative_ids": np.asarray(third) > 0}
    model = types.SimpleNamespace(encode=encode)
    value, _ = contrastive.loss(
        model, rows, None, train=False, dtype=jnp.float32, config=config, special=SPECIAL
    )
    first, second, hard = (vectors(texts, "mean") for texts in (FIRST, SECOND, third))
    logits, others, losses = first @ second.T / 0.5, first @ hard.T / 0.5, []
    excluded |= {
        (i, j) for i in range(5) for j in range(5)
        if any(FIRST[k] == FIRST[i] and SECOND[k] == third[j] for k in range(5))
    }  # fmt: skip
    for i in range(5):
        ahead = [logits[i, j] for j in range(5) if (i, j) not in RELATED]
        ahead += [others[i, j] for j in range(5) if (i, j) not in excluded]
        behind = [logits[j, i] for j in range(5) if (j, i) not in RELATED]
        both = [np.log(np.exp(candidates).sum()) for candidates in (ahead, behind)]
        losses.append(np.mean(both) - logits[i, i])
    assert value == pytest.approx(np.mean(losses), rel=1e-5)


def test_matryoshka_is_the_mean_over_numbers_of_channels():
    model = types.SimpleNamespace(encode=encode)

    def measure(**fields) -> float:
        objective = ObjectiveSection(**fields)
        config = Config(recipe="embedding", objective=objective)
        settings = {"train": False, "dtype": jnp.float32, "config": config, "special": SPECIAL}
        return float(contrastive.loss(model, batch(), None, **settings)[0])

    cut = types.SimpleNamespace(encode=lambda *a, **k: encode(*a, **k)[..., :2])
    whole, model, kept = measure(), cut, model
    part, model = measure(), kept
    assert measure(matryoshka=(2,)) == pytest.approx((whole + part) / 2, rel=1e-5)


@given(compared())
def test_rank_correlations_are_those_of_scipy(values):
    predicted, truth, real = values
    real = real > -2
    half = len(real) // 2
    parts = [
        metrics.Ranks(predicted[s], truth[s], real[s]) for s in (slice(half), slice(half, None))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant values
        expected = scipy.stats.spearmanr(predicted[real], truth[real]).statistic
    found = metrics.spearman(parts)
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
