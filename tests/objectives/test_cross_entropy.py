"""Cross-entropy over classes, and which label is the likeliest."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from convbert_jax.objectives.cross_entropy import cross_entropy, is_likeliest

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


def test_its_gradient_has_the_dtype_of_the_logits():
    logits = jnp.ones((2, 3), jnp.bfloat16)
    found = jax.grad(lambda logits: cross_entropy(logits, jnp.array([0, 2])).sum())(logits)
    assert found.dtype == jnp.bfloat16


@given(LOGITS, LABELS)
def test_a_label_is_the_likeliest_where_none_is_likelier(logits, labels):
    wanted = [
        all(row[label] >= other for other in row) for row, label in zip(logits, labels, strict=True)
    ]
    np.testing.assert_array_equal(is_likeliest(logits, labels), wanted)


def test_of_two_that_are_the_same_both_are_and_of_what_is_no_number_none():
    logits = jnp.array([[1.0, 1.0, 0.0], [jnp.nan, 1.0, 0.0]])
    np.testing.assert_array_equal(is_likeliest(logits, jnp.array([1, 0])), [True, False])
