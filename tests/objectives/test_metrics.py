"""Weighted sums, and ROC AUC against scikit-learn for logits of any scale and shift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from convbert_jax.objectives import metrics
from convbert_jax.objectives.metrics import Scores
from tests.batches import metrics_of
from tests.refusals import refused

ranked_pairs = jax.jit(metrics.ranked_pairs)


def draw(seed, *, scale=1.0, shift=0.0, digits=None, shape=(32, 16)):
    """Draw scores with AUC of about 0.74; a seventh are positive, a fifth are not counted."""
    rng = np.random.default_rng(seed)
    positive = rng.random(shape) < 0.15
    positive.flat[:2] = (True, False)
    counted = rng.random(shape) < 0.8
    counted.flat[:2] = True
    values = rng.normal(size=shape) + 0.9 * positive
    if digits is not None:
        values = np.round(values, digits)
    values = (values * scale + shift).astype(np.float32)
    return Scores(np.where(counted, values, np.float32(1e9)), positive, counted)


def expected(*batches):
    kept = [(b.positive[b.counted], b.values[b.counted]) for b in batches]
    return roc_auc_score(*(np.concatenate(arrays) for arrays in zip(*kept, strict=True)))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 30.0, 1e6]),
    shift=st.sampled_from([0.0, -2.0, 40.0, -1e3]),
    digits=st.sampled_from([None, 0, 1]),
)
def test_equals_scikit_learn(seed, scale, shift, digits):
    first, second = (draw(seed + i, scale=scale, shift=shift, digits=digits) for i in range(2))
    assert metrics.area_under_roc([first, second]) == pytest.approx(
        expected(first, second), abs=1e-12
    )
    in_order, pairs = map(float, ranked_pairs(Scores(*map(jnp.asarray, first))))
    assert in_order / pairs == pytest.approx(expected(first), abs=1e-6)


@pytest.mark.parametrize(("scale", "shift"), [(0.004, -2.0), (1.0, 20.0), (300.0, 0.0)])
def test_narrow_shifted_and_wide_logits_rank_alike(scale, shift):
    plain, moved = (draw(3, scale=s, shift=h) for s, h in ((1.0, 0.0), (scale, shift)))
    for of in (lambda s: metrics.area_under_roc([s]), lambda s: np.divide(*ranked_pairs(s))):
        assert of(moved) == pytest.approx(of(plain), abs=1e-4)


def test_a_held_out_loss_is_of_all_rows_however_they_are_cut_into_batches():
    evaluator = metrics.heldout(("loss", "mlm_loss", "pair_loss"), {"mlm_loss": 1, "pair_loss": 2})
    state = evaluator.init()
    for total, weight in ((16.0, 8.0), (9.0, 1.0), (0.0, 0.0)):  # the last batch is padding
        parts = {"mlm_loss": (total, weight), "pair_loss": (total, 2 * weight)}
        state = evaluator.update(state, parts | {"loss": (5.0, 1.0)})
    found = evaluator.finish(state)
    assert found == {"loss": 25 / 9 + 2 * 25 / 18, "mlm_loss": 25 / 9, "pair_loss": 25 / 18}
    assert np.isnan(evaluator.finish(evaluator.init())["loss"])


def test_infinite_scores_rank_at_the_ends():
    values = np.array([[np.inf, 1e9, -np.inf, -1e9, -np.inf]], np.float32)
    scores = Scores(values, values > 0, np.ones_like(values, bool))
    assert metrics.area_under_roc([scores]) == 1.0
    assert [float(x) for x in ranked_pairs(scores)] == [6.0, 6.0]


def test_unknown_without_both_kinds_or_with_a_nan():
    scores = draw(0)
    none = Scores(scores.values, np.zeros_like(scores.positive), scores.counted)
    assert np.isnan(metrics.area_under_roc([none]))
    assert [float(x) for x in ranked_pairs(none)] == [0.0, 0.0]
    scores.values.flat[0] = np.nan
    assert np.isnan(metrics.area_under_roc([scores, draw(1)]))
    assert np.isnan(ranked_pairs(scores)[0])
    scores.counted.flat[0] = False  # scores of padding do not matter
    assert metrics.area_under_roc([scores]) == pytest.approx(expected(scores), abs=1e-12)
    assert np.isfinite(ranked_pairs(scores)[0])


def test_pairs_of_batches_add_up():
    batches = [draw(seed) for seed in range(4)]
    sums = [tuple(map(np.asarray, ranked_pairs(batch))) for batch in batches]
    total = {"auc": tuple(np.sum(sums, axis=0))}
    areas, pairs = [expected(batch) for batch in batches], [pair[1] for pair in sums]
    mean = np.average(areas, weights=pairs)
    assert metrics.summarize(total)["auc"] == pytest.approx(mean, abs=1e-6)


def test_of_a_large_batch_the_first_rows_are_ranked(monkeypatch):
    scores = draw(0)
    monkeypatch.setattr(metrics, "_RANKED", 8 * 16 + 3)
    part = Scores(*(array[:8] for array in scores))
    assert np.divide(*metrics.ranked_pairs(scores)) == pytest.approx(expected(part), abs=1e-6)


def test_held_out_numbers_divide_sums_and_join_scores():
    first, second = draw(0), draw(1)
    parts = [
        {"loss": (np.float32(3), np.float32(2)), "auc": first},
        {"loss": (np.float32(5), np.float32(6)), "auc": second},
    ]
    evaluator = metrics.heldout({"loss", "auc"})
    state = evaluator.update(evaluator.init(), parts[0])
    assert evaluator.finish(state)["auc"] == pytest.approx(expected(first), abs=1e-12)
    values = evaluator.finish(evaluator.update(state, parts[1]))
    assert values == {"loss": 1.0, "auc": pytest.approx(expected(first, second), abs=1e-12)}
    assert evaluator.names == tuple(values) == ("auc", "loss")
    assert np.isnan(list(metrics_of(evaluator, []).values())).tolist() == [True, True]


def test_held_out_sums_are_added_in_float64():
    """In float32 small batches after a large one would be lost."""
    parts = [{"loss": (np.float32(v), np.float32(1))} for v in (2**25, 1, 1)]
    assert metrics_of(metrics.heldout(["loss"]), parts)["loss"] == (2**25 + 2) / 3


def test_metrics_that_are_not_those_that_were_named_are_an_error():
    with refused(ValueError, "['extra', 'loss']", "['loss']"):
        metrics_of(metrics.heldout(["loss"]), [{"loss": (1.0, 1.0), "extra": (1.0, 1.0)}])


def test_mean_and_divide():
    total, weight = metrics.mean(jnp.array([1.0, 5.0, 9.0]), jnp.array([1.0, 0.0, 1.0]))
    assert metrics.divide(total, weight) == 5.0
    assert np.isnan(metrics.divide(np.zeros(()), np.zeros(())))
