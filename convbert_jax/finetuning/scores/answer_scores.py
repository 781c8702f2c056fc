"""Exact match and F1 of SQuAD as in its evaluation scripts, as fractions.

Answers are compared in lower case, without punctuation, articles and extra white space. F1 compares
bags of words. The best of several correct answers counts (Rajpurkar et al., 2016, §6.1). In SQuAD
2.0, the only correct prediction for a question without an answer is empty (2018, §4).
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence

import numpy as np

from convbert_jax.data.tasks.squad import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(answer: str) -> str:
    """Convert to lower case; remove ASCII punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> float:
    """Return 1 if both are equal after normalization, else 0."""
    return float(normalize(prediction) == normalize(truth))


def f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of word precision and recall; 0 if no words are shared."""
    predicted, wanted = normalize(prediction).split(), normalize(truth).split()
    shared = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """Score predictions by question id; missing predictions are wrong.

    If some questions have no answer (2.0), has_answer_… and no_answer_… score each kind.

    Args:
      predictions: For 2.0, "" predicts that there is no answer.
    """
    impossible = np.array([question.impossible for question in questions])
    pairs = _score_all(questions, predictions)
    result = _means(pairs)
    if impossible.any():
        for name, chosen in (("has_answer", ~impossible), ("no_answer", impossible)):
            if chosen.any():
                means = _means(pairs[chosen])
                result |= {f"{name}_{metric}": value for metric, value in means.items()}
    return result


def best_thresholds(
    questions: Sequence[Question], answers: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, float]:
    """Return best_exact_match and best_f1 over all thresholds on the odds, and these thresholds.

    As in the official script, the thresholds are chosen on the questions that they are reported
    for. Any answer to a question without one is wrong, even "the", which normalizes to "".

    Args:
      answers: Best answer of every question, never "".
      null_odds: No answer is predicted where they exceed the threshold.
    """
    odds = np.array([null_odds[question.id] for question in questions])
    order = np.argsort(odds, kind="stable")
    impossible = np.array([question.impossible for question in questions])
    given = np.array([bool(answers[question.id]) for question in questions])
    scores = np.where((impossible & given)[:, None], 0.0, _score_all(questions, answers))
    answered, empty = scores[order], impossible.astype(float)[order, None]
    # Totals for k from 0, if only the k questions with the lowest odds are answered.
    totals = empty.sum(0) + np.concatenate([[[0.0, 0.0]], np.cumsum(answered - empty, axis=0)])
    # A threshold cannot separate equal odds.
    sorted_odds = odds[order]
    possible = np.append(True, np.append(sorted_odds[1:] > sorted_odds[:-1], True))
    totals[~possible] = -np.inf
    result = {}
    for column, metric in enumerate(("exact_match", "f1")):
        best = int(totals[:, column].argmax())
        result[f"best_{metric}"] = float(totals[best, column]) / len(questions)
        below_all = np.nextafter(sorted_odds[0], -np.inf)
        result[f"best_{metric}_threshold"] = float(sorted_odds[best - 1] if best else below_all)
    return result


def _score_all(questions: Sequence[Question], predictions: Mapping[str, str]) -> np.ndarray:
    """Return [questions, 2], exact match and F1 of each question."""
    second = any(question.impossible for question in questions)
    return np.array([_score_one(q, predictions.get(q.id), second) for q in questions], float)


def _score_one(question: Question, prediction: str | None, second: bool) -> tuple[float, float]:
    if prediction is None:
        return 0.0, 0.0
    truths = [answer.text for answer in question.answers]
    if second:  # answers that normalize to "", such as ".", count as no answer only in 2.0
        truths = [truth for truth in truths if normalize(truth)]
        if not truths or not normalize(prediction):
            return (float(not truths and not normalize(prediction)),) * 2
    return (
        max((exact_match(prediction, truth) for truth in truths), default=0.0),
        max((f1(prediction, truth) for truth in truths), default=0.0),
    )


def _means(pairs: np.ndarray) -> dict[str, float]:
    exact, overlap = pairs.mean(axis=0)
    return {"exact_match": float(exact), "f1": float(overlap)}
