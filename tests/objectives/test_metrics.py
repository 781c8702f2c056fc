"""Weighted sums and the histogram form of the area under the ROC curve."""

import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.objectives import metrics


def exact_auc(scores, labels):
    """Mann-Whitney statistic by comparing every pair."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    difference = positive[:, None] - negative[None, :]
    return ((difference > 0) + 0.5 * (difference == 0)).mean()


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0, -1.0])
def test_auc_matches_all_pairs(shift):
    generator = np.random.default_rng(0)
    labels = (generator.random(4000) < 0.1).astype(np.float32)
    scores = (generator.normal(size=4000) + shift * labels - 2).astype(np.float32)
    weights = (generator.random(4000) < 0.8).astype(np.float32)
    histograms = metrics.score_histograms(
        jnp.asarray(scores), jnp.asarray(labels), jnp.asarray(weights)
    )
    kept = weights > 0
    expected = exact_auc(scores[kept], labels[kept])
    assert metrics.area_under_roc(*map(np.asarray, histograms)) == pytest.approx(expected, abs=2e-3)
    assert float(histograms[0].sum()) == labels[kept].sum()
    assert float(histograms[1].sum()) == (1 - labels[kept]).sum()


def test_auc_adds_over_batches():
    generator = np.random.default_rng(1)
    scores, labels = generator.normal(size=600), generator.random(600) < 0.3
    ones = jnp.ones(600)
    whole = metrics.score_histograms(jnp.asarray(scores), jnp.asarray(labels, jnp.float32), ones)
    parts = [
        metrics.score_histograms(
            jnp.asarray(scores[half]), jnp.asarray(labels[half], jnp.float32), ones[:300]
        )
        for half in (slice(0, 300), slice(300, 600))
    ]
    np.testing.assert_array_equal(whole[0], parts[0][0] + parts[1][0])
    np.testing.assert_array_equal(whole[1], parts[0][1] + parts[1][1])


def test_auc_of_extremes():
    far = jnp.array([jnp.inf, 1e9, -jnp.inf, -1e9])
    histograms = metrics.score_histograms(far, jnp.array([1.0, 1, 0, 0]), jnp.ones(4))
    assert metrics.area_under_roc(*map(np.asarray, histograms)) == 1.0
    assert np.isnan(metrics.area_under_roc(np.zeros(4), np.ones(4)))


def test_mean_and_divide():
    total, weight = metrics.mean(jnp.array([1.0, 5.0, 9.0]), jnp.array([1.0, 0.0, 1.0]))
    assert metrics.divide(total, weight) == 5.0
    assert np.isnan(metrics.divide(np.zeros(()), np.zeros(())))
