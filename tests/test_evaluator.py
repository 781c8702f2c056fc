"""An evaluator of metrics that are not means over batches, and fetching of device outputs."""

import collections
import itertools

import jax.numpy as jnp
import numpy as np

from convbert_jax.interfaces import Evaluator
from convbert_jax.training.loop import fetch_outputs
from tests.batches import metrics_of

TEXTS = [
    ("the cat sat on the mat", "the cat is on the mat"),
    ("there is a cat", "there is a cat on the mat"),
    ("mat mat mat", "the mat"),
]


def count_pairs(outputs):
    """Count bigrams of predictions that occur in the references, and all bigrams."""
    matched = total = 0
    for predicted, reference in zip(outputs["predicted"], outputs["reference"], strict=True):
        ours, theirs = (
            collections.Counter(itertools.pairwise(text.split())) for text in (predicted, reference)
        )
        matched, total = matched + (ours & theirs).total(), total + ours.total()
    return np.array([matched, total])


PRECISION = Evaluator(
    names=("bigram_precision",),
    init=lambda: np.zeros(2, int),
    update=lambda state, outputs: state + count_pairs(outputs),
    finish=lambda state: {"bigram_precision": state[0] / state[1] if state[1] else np.nan},
)


def test_counts_of_a_set_do_not_depend_on_its_batches():
    """As in BLEU, 3 of 5, 3 of 3 and 0 of 2 pairs give 6 of 10, not the mean of 0.6, 1 and 0."""
    for size in (1, 2, 3):
        batches = [TEXTS[start : start + size] for start in range(0, len(TEXTS), size)]
        outputs = [
            dict(zip(("predicted", "reference"), zip(*batch, strict=True), strict=True))
            for batch in batches
        ]
        assert metrics_of(PRECISION, outputs) == {"bigram_precision": 0.6}
    assert np.isnan(metrics_of(PRECISION, [])["bigram_precision"])


def test_outputs_are_fetched_in_order_while_more_are_on_their_way():
    for count, ahead in itertools.product((0, 1, 7), (0, 1, 2)):
        begun, fetched, most = [], [], 0

        def run(count=count, begun=begun):
            for number in range(count):
                begun.append(number)
                yield number, {"values": jnp.full(2, number)}

        for number, outputs in fetch_outputs(run(), ahead=ahead):
            most = max(most, len(begun) - len(fetched))
            assert isinstance(outputs["values"], np.ndarray)
            assert outputs["values"].tolist() == [number] * 2
            fetched.append(number)
        assert fetched == list(range(count))
        assert most == min(count, ahead + 1)
