"""Scores of predictions against labels, on the host, as fractions (the papers print them x 100).

F1 and macro-F1 are the true ones: the release's `F1Scorer` counts gold positives only where it
predicts one, so that its recall is its precision; it reports it nowhere.
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
    kinds: tuple[str, ...]  # of tasks
    compute: Callable[[LabelledTask, list, list], float]  # task, predicted, labels


def score(task: LabelledTask, outputs: Outputs, labels: Sequence) -> dict[str, float]:
    """The task's metrics.

    Args:
      outputs: [N, at least the number of labels] logits for classification; [N] numbers in the
        labels' own unit for regression; N arrays [words, labels] for tagging.
      labels: as in `Example.label`.

    Returns:
      {metric name: value}, in the order of `task.metrics`.

    Raises:
      DataError: there is nothing to score.
    """
    if not len(labels):
        raise DataError(f"{task.name} has no rows to score; check its files.")
    if len(outputs) != len(labels):
        raise ValueError(f"{len(outputs)} predictions for {len(labels)} labels of {task.name}.")
    predicted = predict(task, outputs)
    return {name: METRICS[name].compute(task, predicted, list(labels)) for name in task.metrics}


def predict(task: LabelledTask, outputs: Outputs) -> list:
    """What `outputs` say, in the form of the labels: indices, numbers, or tuples of indices."""
    if task.kind == "regression":
        return [float(value) for value in outputs]
    count = len(task.labels)
    if task.kind == "classification":
        return np.asarray(outputs)[:, :count].argmax(-1).tolist()
    return [tuple(words[:, :count].argmax(-1).tolist()) for words in map(np.asarray, outputs)]


def probabilities(task: LabelledTask, logits: np.ndarray) -> np.ndarray:
    """[..., labels] softmax of one example's logits; columns beyond the labels do not count."""
    logits = np.asarray(logits, np.float64)[..., : len(task.labels)]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def check_metrics(task: LabelledTask) -> None:
    """Raises ConfigError where a metric does not exist or is not for this task."""
    for name in task.metrics:
        if name not in METRICS:
            raise ConfigError(
                f"config.task.metrics has '{name}', which is unknown; choose from: "
                f"{', '.join(n for n, metric in METRICS.items() if task.kind in metric.kinds)}.",
                field="config.task.metrics",
                value=name,
            )
        if task.kind not in METRICS[name].kinds:
            raise ConfigError(
                f"config.task.metrics has '{name}', which is not for {task.kind}; choose from: "
                f"{', '.join(n for n, metric in METRICS.items() if task.kind in metric.kinds)}.",
                field="config.task.metrics",
                value=name,
            )
    if "f1" in task.metrics and len(task.labels) != 2:
        raise ConfigError(
            f"config.task.metrics has 'f1', which needs two labels, but {task.name} has "
            f"{len(task.labels)}; choose macro_f1.",
            field="config.task.metrics",
            value="f1",
        )
    if "span_f1" in task.metrics:
        odd = [tag for tag in task.labels if tag != "O" and not re.fullmatch("[BI]-.+", tag)]
        if odd:
            raise ConfigError(
                f"config.task.metrics has 'span_f1', which needs the tags O, B-… and I-…, but "
                f"{task.name} has '{odd[0]}'; choose accuracy or macro_f1.",
                field="config.task.metrics",
                value="span_f1",
            )


# --- Each metric ---


def _flatten(task: LabelledTask, values: list) -> list:
    """Tagging counts words."""
    return [tag for tags in values for tag in tags] if task.kind == "tagging" else values


def _accuracy(task: LabelledTask, predicted: list, labels: list) -> float:
    predicted, labels = _flatten(task, predicted), _flatten(task, labels)
    return float(np.mean(np.asarray(predicted) == np.asarray(labels)))


def _mcc(task: LabelledTask, predicted: list, labels: list) -> float:
    """Matthews correlation; 0 where all predictions or all labels are one."""
    from sklearn.metrics import matthews_corrcoef

    if len(set(predicted)) < 2 or len(set(labels)) < 2:
        return 0.0
    return float(matthews_corrcoef(labels, predicted))


def _f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Of the second label, the positive one; 0 where it is never predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, pos_label=1, zero_division=0.0))


def _macro_f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Mean F1 of the labels that are there or predicted."""
    from sklearn.metrics import f1_score

    predicted, labels = _flatten(task, predicted), _flatten(task, labels)
    return float(f1_score(labels, predicted, average="macro", zero_division=0.0))


def _pearson(task: LabelledTask, predicted: list, labels: list) -> float:
    from scipy.stats import pearsonr

    return _correlate(pearsonr, predicted, labels)


def _spearman(task: LabelledTask, predicted: list, labels: list) -> float:
    from scipy.stats import spearmanr

    return _correlate(spearmanr, predicted, labels)


def _correlate(function, predicted: list, labels: list) -> float:
    """0 where either side is constant and the correlation is not defined, as MCC has it."""
    if len(set(predicted)) < 2 or len(set(labels)) < 2:
        return 0.0
    return float(function(predicted, labels).statistic)


def _span_f1(task: LabelledTask, predicted: list, labels: list) -> float:
    """Micro F1 of spans, right where type and both ends are; 1 where neither side has one."""
    right = found = gold = 0
    for predicted_tags, label_tags in zip(predicted, labels, strict=True):
        ours = find_spans([task.labels[tag] for tag in predicted_tags])
        theirs = find_spans([task.labels[tag] for tag in label_tags])
        right += len(ours & theirs)
        found += len(ours)
        gold += len(theirs)
    return 2 * right / (found + gold) if found + gold else 1.0


def find_spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, last + 1) of the spans in tags O, B-type and I-type.

    As CoNLL's evaluation reads them: an I- that does not go on with a span of its type begins one.
    """
    spans, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, "O"]):
        goes_on = kind and tag == f"I-{kind}"
        if kind and not goes_on:
            spans.add((kind, start, place))
            kind = ""
        if tag != "O" and not goes_on:
            start, kind = place, tag[2:]
    return spans


METRICS: dict[str, Metric] = {
    "accuracy": Metric(("classification", "tagging"), _accuracy),
    "mcc": Metric(("classification",), _mcc),
    "f1": Metric(("classification",), _f1),
    "macro_f1": Metric(("classification", "tagging"), _macro_f1),
    "pearson": Metric(("regression",), _pearson),
    "spearman": Metric(("regression",), _spearman),
    "span_f1": Metric(("tagging",), _span_f1),
}
