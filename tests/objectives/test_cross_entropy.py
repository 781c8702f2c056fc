"""Cross-entropy over classes, and top-1 accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from convbert_jax.objectives.cross_entropy import (
    BLOCK,
    add_up_blocks,
    cross_entropy,
    top1_accuracy,
)
from convbert_jax.ops import dispatch

# XLA takes subnormal numbers for 0, so two of them are the same to it.
VALUES = st.floats(-50, 50, width=32, allow_subnormal=False)
LOGITS = arrays(np.float32, (4, 7), elements=VALUES)
LABELS = arrays(np.int32, 4, elements=st.integers(0, 6))


@given(LOGITS, LABELS)
def test_cross_entropy_is_minus_the_log_of_the_share(logits, labels):
    wide = logits.astype(np.float64)
    shares = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    wanted = -np.log(shares[np.arange(4), labels])
    np.testing.assert_allclose(cross_entropy(logits, labels), wanted, atol=1e-4)


@given(LOGITS, LABELS, arrays(np.float32, 4, elements=VALUES), st.sampled_from([0.0, 0.1]))
def test_value_and_gradient_are_those_of_the_definition(logits, labels, weights, smoothing):
    def by_definition(logits):
        target = (1 - smoothing) * jax.nn.one_hot(labels, 7) + smoothing / 7
        return -(target * jax.nn.log_softmax(logits)).sum(axis=1) @ weights

    wanted = jax.value_and_grad(by_definition)(logits)
    found = jax.value_and_grad(lambda x: cross_entropy(x, labels, smoothing) @ weights)(logits)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-4)


@pytest.mark.parametrize("classes", [3, 256, 257, 5_000])
def test_on_a_tpu_blocks_are_added_up_once_for_a_draw_beside(classes, monkeypatch):
    """Some classes shut out, and one row so sure that all others are less than a rounding."""
    keys = jax.random.split(jax.random.key(classes), 2)
    logits = 20 * jax.random.normal(keys[0], (3, 4, classes))
    logits = jnp.where(jax.random.bernoulli(keys[1], 0.3, logits.shape), -1e9, logits)
    logits = logits.at[0, 0, classes - 1].set(1e4).at[:, :, 1].set(0.5)
    labels = jnp.full((3, 4), 1)

    def loss(logits, by_blocks=True):
        return cross_entropy(logits, labels, by_blocks=by_blocks).sum()

    def has_product(**options):
        return "dot_general" in str(jax.make_jaxpr(lambda x: loss(x, **options))(logits))

    wanted = jax.value_and_grad(loss)(logits)
    assert not has_product()
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    found = jax.value_and_grad(loss)(logits)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)
    assert has_product()
    assert not has_product(by_blocks=False)


@given(st.integers(1, 700))
def test_blocks_are_of_neighbors(classes):
    weights = np.random.default_rng(classes).random((2, classes), np.float32)
    parts = range(0, classes, BLOCK)
    wanted = [weights[:, start : start + BLOCK].sum(1, dtype=np.float64) for start in parts]
    np.testing.assert_allclose(add_up_blocks(weights), np.transpose(wanted), rtol=1e-5)


def test_its_gradient_has_the_dtype_of_the_logits():
    logits = jnp.ones((2, 3), jnp.bfloat16)
    found = jax.grad(lambda logits: cross_entropy(logits, jnp.array([0, 2])).sum())(logits)
    assert found.dtype == jnp.bfloat16


@given(arrays(np.float32, (4, 7), elements=VALUES | st.integers(0, 2).map(float)), LABELS)
def test_a_tie_of_n_counts_one_nth(logits, labels):
    largest = logits == logits.max(1, keepdims=True)
    wanted = largest[np.arange(4), labels] / largest.sum(1)
    np.testing.assert_allclose(top1_accuracy(logits, labels), wanted, rtol=1e-6)


def test_nan_is_no_prediction():
    logits = jnp.array([[jnp.nan, 1.0, 0.0], [jnp.nan] * 3])
    np.testing.assert_array_equal(top1_accuracy(logits, jnp.array([0, 1])), [0, 0])
