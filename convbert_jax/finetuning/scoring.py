"""Scores of predictions against labels, on the host, as fractions (papers print them x 100).

F1 and macro-F1 follow their definitions. The official `F1Scorer` counts gold positives only where
it predicts a positive, so its recall equals its precision; the official code does not report it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from convbert_jax.config import ConfigError
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import LabelledTask

Outputs = np.ndarray | Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Metric:
    kinds: tuple[str, ...]  # kinds of tasks it applies to
    compute: Callable[[LabelledTask, list, list], float]  # task, predicted, labels


def score(task: LabelledTask, outputs: Outputs, labels: Sequence) -> dict[str, float]:
    """Compute the task's metrics.

    Args:
      outputs: Logits [N, at least the number of labels] for classification and multilabel; numbers
        [N] in the unit of the labels for regression; N arrays [words, labels] for tagging.
      labels: As in `Example.label`.

    Returns:
      {metric name: value}, in the order of `task.metrics`.

    Raises:
      DataError: There are no rows.
    """
    if not len(labels):
        raise DataError(f"{task.name} has no rows to score; check its files.")
    if len(outputs) != len(labels):
        raise ValueError(f"{len(outputs)} predictions for {len(labels)} labels of {task.name}.")
    predicted = predict(task, outputs)
    return {name: METRICS[name].compute(task, predicted, list(labels)) for name in task.metrics}


def predict(task: LabelledTask, outputs: Outputs) -> list:
    """Return predictions in the form of the labels: indices, numbers, or tuples of indices."""
    if task.kind == "regression":
        return [float(value) for value in outputs]
    count = len(task.labels)
    if task.kind == "classification":
        return np.asarray(outputs)[:, :count].argmax(-1).tolist()
    if task.kind == "multilabel":
        return [tuple(np.flatnonzero(row[:count] > 0).tolist()) for row in map(np.asarray, outputs)]
    return [tuple(words[:, :count].argmax(-1).tolist()) for words in map(np.asarray, outputs)]


def probabilities(task: LabelledTask, logits: np.ndarray) -> np.ndarray:
    """Return the softmax [..., labels] of one example's logits, without padded columns.

    For multilabel, the logistic function of each logit.
    """
    logits = np.asarray(logits, np.float64)[..., : len(task.labels)]
    if task.kind == "multilabel":
        return 1 / (1 + np.exp(-logits))
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def check_metrics(task: LabelledTask) -> None:
    """Raise ConfigError if a metric does not exist or does not apply to the task."""
    for name in task.metrics:
        if name not in METRICS:
            raise ConfigError(
                f"contains the unknown metric '{name}'. Choose from: "
                f"{', '.join(n for n, metric in METRICS.items() if task.kind in metric.kinds)}.",
                field="config.task.metrics",
                value=task.metrics,
            )
        if task.kind not in METRICS[name].kinds:
            raise ConfigError(
                f"contains '{name}', which does not apply to {task.kind}. Choose from: "
                f"{', '.join(n for n, metric in METRICS.items() if task.kind in metric.kinds)}.",
                field="config.task.metrics",
                value=task.metrics,
            )
    if "f1" in task.metrics and len(task.labels) != 2:
        raise ConfigError(
            f"contains 'f1', which requires two labels, but {task.name} has {len(task.labels)}. "
            "Use macro_f1.",
            field="config.task.metrics",
            value=task.metrics,
        )
    if "span_f1" in task.metrics:
        odd = [tag for tag in task.labels if tag != "O" and not re.fullmatch("[BIES]-.+", tag)]
        if odd:
            raise ConfigError(
                f"contains 'span_f1', which requires the tags O, B-…, I-…, E-… and S-…, but "
                f"{task.name} has '{odd[0]}'. Use accuracy or macro_f1.",
                field="config.task.metrics",
                value=task.metrics,
            )


# --- Metrics ---


def _flatten(task: LabelledTask, values: list) -> list:
    """Flatten tags to words for tagging."""
    return [tag for tags in values for tag in tags] if task.kind == "tagging" else values


def _accuracy(task: LabelledTask, predicted: list, labels: list) -> float:
    predicted, labels = _flatten(task, predicted), _flatten(task, labels)
    return float(np.mean(np.asarray(predicted) == np.asarray(labels)))


def _mcc(task: LabelledTask, predicted: list, labels: list) -> float:
    """Compute Matthews correlation; 0 if predictions or labels are constant."""
    from sklearn.metrics import matthews_corrcoef

    if len(set(predicted)) < 2 or len(set(labels)) < 2:
        return 0.0
    return float(matthews_corrcoef(labels, predicted))


def _f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Compute F1 of the second label, the positive one; 0 if it is never predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, pos_label=1, zero_division=0.0))


def _several(task: LabelledTask, values: list) -> np.ndarray:
    """Return the labels of multilabel rows as 0 and 1 [N, labels]."""
    found = np.zeros((len(values), len(task.labels)), np.int64)
    for row, indices in zip(found, values, strict=True):
        row[list(indices)] = 1
    return found


def _micro_f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Compute F1 over all pairs of text and label; 1 if there are none."""
    from sklearn.metrics import f1_score

    predicted, labels = _several(task, predicted), _several(task, labels)
    return float(f1_score(labels, predicted, average="micro", zero_division=1.0))


def _macro_f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Compute the mean F1 over labels that occur or are predicted; for multilabel over all."""
    from sklearn.metrics import f1_score

    if task.kind == "multilabel":
        predicted, labels = _several(task, predicted), _several(task, labels)
    else:
        predicted, labels = _flatten(task, predicted), _flatten(task, labels)
    return float(f1_score(labels, predicted, average="macro", zero_division=0.0))


def _pearson(task: LabelledTask, predicted: list, labels: list) -> float:
    from scipy.stats import pearsonr

    return _correlate(pearsonr, predicted, labels)


def _spearman(task: LabelledTask, predicted: list, labels: list) -> float:
    from scipy.stats import spearmanr

    return _correlate(spearmanr, predicted, labels)


def _correlate(function, predicted: list, labels: list) -> float:
    """Compute a correlation; 0 where it is undefined because a side is constant, as for MCC."""
    if len(set(predicted)) < 2 or len(set(labels)) < 2:
        return 0.0
    return float(function(predicted, labels).statistic)


def _span_f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Compute micro F1 of spans with correct type and boundaries; 1 if there are no spans."""
    right = found = gold = 0
    for predicted_tags, label_tags in zip(predicted, labels, strict=True):
        ours = {*find_spans([task.labels[tag] for tag in predicted_tags])}
        theirs = {*find_spans([task.labels[tag] for tag in label_tags])}
        right += len(ours & theirs)
        found += len(ours)
        gold += len(theirs)
    return 2 * right / (found + gold) if found + gold else 1.0


_TAG = re.compile(r"(?:([BIES])-)?(.*)", re.DOTALL)


def find_spans(tags: Sequence[str | None]) -> list[tuple[str, int, int]]:
    """Return the spans in tags IOB1, IOB2 or IOBES as (type, first, last + 1), in order.

    By the rules of conlleval: I- and E- tags continue a span of their type that did not end with E-
    or S-, and otherwise begin one. O and None are outside of spans. A type without prefix is read
    as an I- tag.
    """
    spans, start, last, kind = [], 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, own = ("O", "") if tag in (None, "O") else _TAG.fullmatch(tag).groups("I")
        goes_on = prefix in ("I", "E") and last in ("B", "I") and own == kind
        if kind and not goes_on:
            spans.append((kind, start, place))
        if prefix != "O" and not goes_on:
            start = place
        last, kind = prefix, own
    return spans


METRICS: dict[str, Metric] = {
    "accuracy": Metric(("classification", "tagging"), _accuracy),
    "mcc": Metric(("classification",), _mcc),
    "f1": Metric(("classification",), _f1),
    "macro_f1": Metric(("classification", "multilabel", "tagging"), _macro_f1),
    "micro_f1": Metric(("multilabel",), _micro_f1),
    "pearson": Metric(("regression",), _pearson),
    "spearman": Metric(("regression",), _spearman),
    "span_f1": Metric(("tagging",), _span_f1),
}
