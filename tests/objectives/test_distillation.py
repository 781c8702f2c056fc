"""Distillation terms against their formulas in float64, and the layer mappings."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import DistillationSection
from convbert_jax.config.training import AttentionLoss, HiddenLoss, LayerRule
from convbert_jax.objectives import distillation
from convbert_jax.objectives.distillation import Observed

RNG = np.random.default_rng(0)
IDS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
REAL = IDS != 0
SAME = (IDS[:, :, None] == IDS[:, None, :]) & REAL[:, :, None]


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x):
    powers = np.exp(np.asarray(x, np.float64) - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def maps(heads):
    weights = softmax(np.where(SAME[:, None], draw(2, heads, 6, 6), -1e30))
    return np.where(SAME[:, None], weights, 0).astype(np.float32)


def test_names_of_a_config_are_those_of_the_objective():
    assert set(typing.get_args(LayerRule)) == set(distillation.LAYERS)
    assert set(typing.get_args(HiddenLoss)) == set(distillation.HIDDEN)
    assert set(typing.get_args(AttentionLoss)) == set(distillation.ATTENTION)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_word_divergence(temperature):
    """The gradient equals that of soft cross-entropy, T (softmax(s / T) - softmax(t / T))."""
    ours, theirs = draw(4, 7), draw(4, 7)
    p, q = softmax(theirs / temperature), softmax(ours / temperature)
    wanted = temperature**2 * (p * np.log(p / q)).sum(-1)
    found, back = jax.vjp(lambda s: distillation.word_divergence(s, theirs, temperature), ours)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    slope = back(jnp.ones(4))[0]
    np.testing.assert_allclose(slope, temperature * (q - p), atol=1e-5)


@settings(max_examples=40)
@given(st.floats(-30, 30), st.floats(-30, 30), st.sampled_from([0.5, 2.0]))
def test_token_divergence(ours, theirs, temperature):
    found = distillation.token_divergence(jnp.float32(ours), jnp.float32(theirs), temperature)
    a, b = (np.exp(-np.logaddexp(0, -np.array([1, -1]) * x / temperature)) for x in (ours, theirs))
    wanted = temperature**2 * (b * (np.log(b) - np.log(a))).sum()
    assert found == pytest.approx(wanted, rel=2e-3, abs=2e-3)
    assert found >= -1e-4
    pairs = np.stack([np.zeros(2), [ours, theirs]], -1)  # equals two classes
    words = distillation.word_divergence(*map(jnp.asarray, pairs), temperature)
    assert found == pytest.approx(float(words), rel=2e-3, abs=2e-3)


def test_distances_of_states():
    a, b = draw(2, 6, 5), draw(2, 6, 5)
    dots = np.einsum("blc,blc->bl", a, b)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(distillation.cosine(a, b), 1 - dots / norms, atol=1e-5)
    np.testing.assert_allclose(distillation.squared(a, b), ((a - b) ** 2).mean(-1), rtol=1e-5)
    np.testing.assert_allclose(distillation.cosine(a, 3 * a), 0, atol=1e-5)


def test_distances_of_attention():
    ours, theirs = maps(2), maps(4)
    found = distillation.map_divergence(ours, theirs, jnp.asarray(IDS))
    for b, q in np.argwhere(REAL):
        p, s = (x[b, :, q].mean(0)[SAME[b, q]].astype(np.float64) for x in (theirs, ours))
        assert found[b, q] == pytest.approx((p * np.log(p / s)).sum(), abs=1e-5)
    first, second = draw(2, 3, 6, 6), draw(2, 3, 6, 6)
    found = distillation.score_distance(first, second, jnp.asarray(IDS))
    for b, q in np.argwhere(REAL):
        seen = SAME[b, q]
        wanted = ((first - second) ** 2)[b, :, q][:, seen].mean()
        assert found[b, q] == pytest.approx(wanted, rel=1e-5)


def test_terms_are_means_over_real_tokens_and_compared_layers():
    section = DistillationSection(
        layers="uniform",
        hidden="mse",
        hidden_weight=2.0,
        attention_weight=3.0,
        embeddings_weight=5.0,
    )
    ours = Observed(draw(2, 6, 3), (draw(2, 6, 4), draw(2, 6, 4)), (None, maps(2)))
    theirs = Observed(
        draw(2, 6, 3), tuple(draw(2, 6, 4) for _ in range(4)), tuple(maps(4) for _ in range(4))
    )
    value, found = distillation.terms(
        section, ours, theirs, jnp.asarray(IDS), lambda name, x: x + (name == "hidden")
    )

    def mean(distance):
        return np.asarray(distance)[REAL].mean()

    hidden = np.mean([mean(((ours.hidden[i] + 1 - theirs.hidden[j]) ** 2).mean(-1))
                      for i, j in ((0, 1), (1, 3))])  # fmt: skip
    attention = mean(distillation.map_divergence(ours.attention[1], theirs.attention[3], IDS))
    embeddings = mean(((ours.embeddings - theirs.embeddings) ** 2).mean(-1))
    assert found.keys() == {"distill_hidden", "distill_attention", "distill_embeddings"}
    for name, wanted in (("hidden", hidden), ("attention", attention), ("embeddings", embeddings)):
        total, weight = found[f"distill_{name}"]
        assert total / weight == pytest.approx(wanted, rel=1e-5)
    assert value == pytest.approx(2 * hidden + 3 * attention + 5 * embeddings, rel=1e-5)
    none = dataclasses.replace(section, hidden_weight=0.0, attention_weight=0.0)
    none = dataclasses.replace(none, embeddings_weight=0.0)
    assert distillation.terms(none, ours, theirs, jnp.asarray(IDS), None) == (0.0, {})


@given(st.sampled_from(typing.get_args(LayerRule)), st.integers(1, 12), st.integers(0, 12))
def test_layer_rules(rule, student, more):
    teacher = student + more
    pairs = distillation.pairs(rule, student, teacher)
    ours, theirs = zip(*pairs, strict=True)
    assert ours == ((student - 1,) if rule == "last" else tuple(range(student)))
    assert all(0 <= layer < teacher for layer in theirs)
    assert list(theirs) == sorted(set(theirs))
    if rule != "bottom":
        assert theirs[-1] == teacher - 1
    # TinyBERT with 4 layers learns from every third of 12 layers.
    assert [j + 1 for _, j in distillation.pairs("uniform", 4, 12)] == [3, 6, 9, 12]
