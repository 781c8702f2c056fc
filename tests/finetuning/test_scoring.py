"""Every metric against an independent implementation."""

import collections
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import ConfigError
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import LabelledTask
from convbert_jax.finetuning import scoring
from tests.refusals import refused


def make_task(kind="classification", labels=("no", "yes"), metrics=("accuracy",)):
    return LabelledTask("toy", kind, 1, labels, metrics, ("train",), lambda split: [])


def score(metric, predicted, labels, count=2):
    logits = np.eye(count)[list(predicted)]
    task = make_task(labels=tuple(map(str, range(count))), metrics=(metric,))
    return scoring.score(task, logits, labels)[metric]


def test_nothing_to_score_is_said():
    for metric in ("accuracy", "mcc", "f1", "macro_f1"):
        with refused(DataError, "toy"):
            score(metric, [], [])


binary = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def count_cells(pairs):
    cells = collections.Counter(pairs)
    return [cells[pair] for pair in ((1, 1), (1, 0), (0, 1), (0, 0))]  # predicted, label


@settings(deadline=None)  # the first example imports scikit-learn
@given(binary)
def test_binary_metrics_by_their_definitions(pairs):
    predicted, labels = zip(*pairs, strict=True)
    tp, fp, fn, tn = count_cells(pairs)
    assert score("accuracy", predicted, labels) == pytest.approx((tp + tn) / len(pairs))
    f1 = 2 * tp / (2 * tp + fp + fn) if tp else 0.0
    assert score("f1", predicted, labels) == pytest.approx(f1)
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    mcc = (tp * tn - fp * fn) / root if root else 0.0
    assert score("mcc", predicted, labels) == pytest.approx(mcc, abs=1e-12)


def test_f1_is_not_the_releases():
    """The official code computes recall as precision, which gives 1.0 here."""
    assert score("f1", [1, 0, 0, 0], [1, 1, 1, 1]) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_macro_f1_is_the_mean_over_labels_that_occur(pairs):
    values = []
    for label in {label for pair in pairs for label in pair}:
        tp, fp, fn, _ = count_cells([(p == label, t == label) for p, t in pairs])
        values.append(2 * tp / (2 * tp + fp + fn))
    predicted, labels = zip(*pairs, strict=True)
    assert score("macro_f1", predicted, labels, 4) == pytest.approx(np.mean(values))


numbers = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=2, max_size=30)


def correlate(x, y):
    x, y = np.asarray(x, float) - np.mean(x), np.asarray(y, float) - np.mean(y)
    length = np.linalg.norm(x) * np.linalg.norm(y)
    return x @ y / length if length > 1e-9 else 0.0


def rank(values):
    """Compute average ranks by counting."""
    return [
        sum(other < value for other in values) + sum(other == value for other in values) / 2
        for value in values
    ]


@settings(deadline=None)
@given(numbers)
def test_correlations_by_their_definitions(pairs):
    predicted, labels = map(list, zip(*pairs, strict=True))
    task = make_task("regression", (), ("pearson", "spearman"))
    found = scoring.score(task, np.asarray(predicted, np.float32), [float(x) for x in labels])
    assert found["pearson"] == pytest.approx(correlate(predicted, labels), abs=1e-6)
    assert found["spearman"] == pytest.approx(correlate(rank(predicted), rank(labels)), abs=1e-6)


TAGS = ("O", "B-A", "I-A", "B-C", "I-C")


def spans_by_regex(tags):
    """Find spans with one letter per word: B and I in lower or upper case for the two types."""
    code = {"O": ".", "B-A": "b", "I-A": "i", "B-C": "B", "I-C": "I"}
    text = "".join(code[tag] for tag in tags)
    return {
        (kind, match.start(), match.end())
        for kind, pattern in (("A", "bi*|i+"), ("C", "BI*|I+"))
        for match in re.finditer(pattern, text)
    }


@given(st.lists(st.sampled_from(TAGS), max_size=12))
def test_spans_are_those_of_a_regular_expression(tags):
    assert {*scoring.find_spans(tags)} == spans_by_regex(tags)


def test_spans_of_all_short_sequences():
    for length in range(5):
        for tags in itertools.product(TAGS, repeat=length):
            assert {*scoring.find_spans(tags)} == spans_by_regex(tags)


def test_spans_of_other_schemes():
    """As conlleval finds them."""
    iob1 = ["I-A", "I-A", "B-A", "I-C", "O", "I-C"]
    assert scoring.find_spans(iob1) == [("A", 0, 2), ("A", 2, 3), ("C", 3, 4), ("C", 5, 6)]
    assert scoring.find_spans(["A", "A", None, "C-D"]) == [("A", 0, 2), ("C-D", 3, 4)]
    iobes = ["B-A", "I-A", "E-A", "S-A", "S-A", "B-C", "E-C", "E-C", "I-C", "S-C"]
    assert scoring.find_spans(iobes) == [
        ("A", 0, 3), ("A", 3, 4), ("A", 4, 5), ("C", 5, 7), ("C", 7, 8), ("C", 8, 9), ("C", 9, 10),
    ]  # fmt: skip


def test_span_f1_counts_whole_spans_over_all_sentences():
    task = make_task("tagging", TAGS, ("span_f1", "accuracy", "macro_f1"))
    labels = [(1, 2, 0), (3, 0), (0,)]  # A at 0-2; C at 0-1; no span
    predicted = [(1, 0, 0), (3, 1), (0,)]  # A too short; C correct, one extra A
    outputs = [np.eye(7)[list(tags)] for tags in predicted]  # more columns than labels
    found = scoring.score(task, outputs, labels)
    assert found["span_f1"] == pytest.approx(2 * 1 / (3 + 2))
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert scoring.score(task, [np.eye(5)[[0]]], [(0,)])["span_f1"] == 1.0


def test_columns_beyond_the_labels_are_not_answers():
    task = make_task()
    assert scoring.predict(task, np.array([[0.1, 0.2, 9.0]])) == [1]


def test_wrong_metrics_are_named():
    for task, metric, mention in (
        (make_task(metrics=("acc",)), "acc", "accuracy"),
        (make_task(metrics=("pearson",)), "pearson", "classification"),
        (make_task(labels=("a", "b", "c"), metrics=("f1",)), "f1", 3),
        (make_task("tagging", ("DET", "O"), ("span_f1",)), "span_f1", "'DET'"),
        (make_task("tagging", ("B-", "I-", "O"), ("span_f1",)), "span_f1", "'B-'"),
    ):
        with refused(ConfigError, metric, mention, field="config.task.metrics"):
            scoring.check_metrics(task)
    scoring.check_metrics(make_task("tagging", TAGS, ("span_f1", "accuracy")))
    with refused(ValueError, 1, 2, "toy"):
        scoring.score(make_task(), np.zeros((1, 2)), [0, 1])
