"""Cross-entropy over classes, and top-1 accuracy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from convbert_jax.objectives.cross_entropy import (
    BLOCK,
    add_up_blocks,
    cross_entropy,
    top1_accuracy,
)
from convbert_jax.ops import dispatch

# XLA flushes subnormal numbers to 0, so any two of them are equal.
VALUES = st.floats(-50, 50, width=32, allow_subnormal=False)
LABELS = arrays(np.int32, 4, elements=st.integers(0, 6))


@functools.partial(jax.jit, static_argnums=(2, 3))
def value_and_gradient(logits, labels, smoothing, z_loss, weights):
    losses, back = jax.vjp(lambda x: cross_entropy(x, labels, smoothing, z_loss=z_loss), logits)
    return losses, back(weights)[0]


@given(
    arrays(np.float32, (4, 7), elements=VALUES), LABELS,
    arrays(np.float32, 4, elements=VALUES), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1e-3]),
)  # fmt: skip
@settings(max_examples=40)
def test_value_and_gradient_are_those_of_the_definition(logits, labels, weights, smoothing, z_loss):
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide).sum(1, keepdims=True))
    shares = np.exp(wide - total)
    target = (1 - smoothing) * np.eye(7)[labels] + smoothing / 7
    wanted = -(target * (wide - total)).sum(1) + z_loss * total[:, 0] ** 2
    losses, gradient = value_and_gradient(logits, labels, smoothing, z_loss, weights)
    np.testing.assert_allclose(losses, wanted, atol=1e-4)
    slope = shares * (1 + 2 * z_loss * total) - target
    np.testing.assert_allclose(gradient, slope * weights[:, None], atol=2e-4)


@pytest.mark.parametrize("classes", [3, 257])
def test_on_a_tpu_blocks_are_added_up_once_for_a_draw_beside(classes, monkeypatch):
    """Some classes are masked out; one row has a logit that dominates all others."""
    rng = np.random.default_rng(classes)
    logits = 20 * rng.standard_normal((3, 4, classes)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -1e9
    logits[0, 0, classes - 1], logits[:, :, 1] = 1e4, 0.5
    labels = jnp.full((3, 4), 1)

    def loss(logits, by_blocks=True):
        return cross_entropy(logits, labels, by_blocks=by_blocks).sum()

    def has_product(**options):
        return "dot_general" in str(jax.make_jaxpr(lambda x: loss(x, **options))(logits))

    wanted = jax.jit(jax.value_and_grad(loss))(logits)
    assert not has_product()
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    found = jax.jit(jax.value_and_grad(lambda x: loss(x)))(logits)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)
    assert has_product()
    assert not has_product(by_blocks=False)


def test_blocks_are_of_neighbors():
    for classes in (1, BLOCK, BLOCK + 1, 2 * BLOCK + 188):
        weights = np.random.default_rng(classes).random((2, classes), np.float32)
        parts = range(0, classes, BLOCK)
        wanted = [weights[:, start : start + BLOCK].sum(1, dtype=np.float64) for start in parts]
        np.testing.assert_allclose(add_up_blocks(weights), np.transpose(wanted), rtol=1e-5)


def test_the_gradient_has_the_dtype_of_the_logits():
    logits = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    gradient = jax.grad(lambda logits: cross_entropy(logits, jnp.array([0, 2])).sum())
    assert jax.eval_shape(gradient, logits).dtype == jnp.bfloat16


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@given(
    logits=arrays(np.float32, (4, 7), elements=VALUES | st.integers(0, 2).map(float)),
    labels=LABELS,
)
@settings(max_examples=40)
def test_a_tie_of_n_counts_one_nth(platform, logits, labels):
    largest = logits == logits.max(1, keepdims=True)
    wanted = largest[np.arange(4), labels] / largest.sum(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "platform", lambda: platform)
        np.testing.assert_allclose(top1_accuracy(logits, labels), wanted, rtol=1e-6)


def test_nan_is_no_prediction():
    logits = jnp.array([[jnp.nan, 1.0, 0.0], [jnp.nan] * 3])
    np.testing.assert_array_equal(top1_accuracy(logits, jnp.array([0, 1])), [0, 0])
