"""Classification, regression and tagging losses against sums by hand, in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.objectives import classification

LABELS, WIDTH = 3, 4  # the last logit has no label
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(5, WIDTH)).astype(np.float32)
LOGITS[:, LABELS:] = 50.0  # would dominate the loss if counted
TEACHER = RANDOM.normal(size=(5, WIDTH)).astype(np.float32)
LABEL = np.array([0, 2, 1, 1, 0], np.int32)


class Fixed:
    """Model with fixed logits."""

    def __init__(self, logits):
        self.logits = logits

    def classify(self, tokens, segment_ids, type_ids, *, dtype, key):
        return jnp.asarray(self.logits)


def make_batch(*, regression=False, **fields):
    rows = dict.fromkeys(("tokens", "segment_ids", "type_ids"), np.zeros((5, 2), np.int32))
    return rows | {
        "outputs": np.arange(WIDTH) < (1 if regression else LABELS),
        "is_regression": np.asarray(regression),
        "label": LABEL,
        "value": VALUES,
        **fields,
    }


def run(loss, batch, logits=LOGITS):
    losses, weights = loss(Fixed(logits), batch, None, dtype=jnp.float32)
    return np.asarray(losses), np.asarray(weights)


def shares(logits, temperature=1.0):
    powers = [math.exp(float(x) / temperature) for x in logits]
    return [power / sum(powers) for power in powers]


HARD = [-math.log(shares(row[:LABELS])[label]) for row, label in zip(LOGITS, LABEL, strict=True)]
VALUES = np.linspace(-1, 1, 5, dtype=np.float32)
SQUARED = [(float(row[0]) - value) ** 2 for row, value in zip(LOGITS, VALUES.tolist(), strict=True)]


@pytest.mark.parametrize(("regression", "wanted"), [(False, HARD), (True, SQUARED)])
def test_texts(regression, wanted):
    losses, weights = run(classification.text_losses, make_batch(regression=regression))
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert weights.tolist() == [1.0] * 5


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_teacher_of_classes(share):
    fields = {"temperature": np.float32(2.5), "teacher_weight": np.float32(share)}
    losses, _ = run(classification.distilled_losses, make_batch(teacher=TEACHER, **fields))
    for ours, theirs, hard, loss in zip(LOGITS, TEACHER, HARD, losses, strict=True):
        p, q = shares(theirs[:LABELS], 2.5), shares(ours[:LABELS], 2.5)
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert loss == pytest.approx(share * 2.5**2 * divergence + (1 - share) * hard, rel=5e-6)


def test_a_teacher_of_numbers():
    fields = {"temperature": np.float32(2.5), "teacher_weight": np.float32(0.25)}
    batch = make_batch(regression=True, teacher=TEACHER, **fields)
    losses, _ = run(classification.distilled_losses, batch)
    far = [(float(a[0]) - float(b[0])) ** 2 for a, b in zip(LOGITS, TEACHER, strict=True)]
    wanted = [0.25 * soft + 0.75 * hard for soft, hard in zip(far, SQUARED, strict=True)]
    np.testing.assert_allclose(losses, wanted, rtol=5e-6)


def test_tags():
    """A row's loss sums over its tagged tokens; its weight is their number, which may be 0."""
    logits = RANDOM.normal(size=(3, 4, WIDTH)).astype(np.float32)
    logits[..., LABELS:] = 50.0
    tags = np.array([[-1, 0, 2, -1], [1, 1, 0, 2], [-1, -1, -1, -1]], np.int32)
    losses, weights = run(classification.tag_losses, make_batch(tags=tags), logits)
    wanted = [0.0] * 3
    for (row, at), tag in np.ndenumerate(tags):
        if tag >= 0:
            wanted[row] -= math.log(shares(logits[row, at, :LABELS])[tag])
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert weights.tolist() == [2.0, 4.0, 0.0]
