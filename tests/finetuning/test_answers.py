"""Answers from windows, answer files, and EM and F1 against an independent implementation."""

import gzip
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fidelity import squad_evaluation
from convbert_jax.data.tasks import squad
from convbert_jax.data.tasks.squad import Answer, Question, Window, Windows
from convbert_jax.finetuning import question_answering
from convbert_jax.objectives.span_extraction import NOWHERE

CONTEXT = "one two three four five six"
OFFSETS = np.array([[0, 3], [4, 7], [8, 13], [14, 18], [19, 23], [24, 27]], np.int32)


def _window(question, first, size):
    return Window(question, np.zeros(3 + size, np.int32), 2, first, 0, 0, np.ones(size, bool))


QUESTIONS = [
    Question("a", "?", CONTEXT, (Answer("two three", 4), Answer("four", 14))),
    Question("b", "?", CONTEXT, impossible=True),
]
WINDOWS = Windows(
    [_window(0, 0, 4), _window(0, 3, 3), _window(1, 0, 6)], [OFFSETS] * 2, [None] * 2, 0, 0, 0
)
# Two windows of the first question, one of the second; the context starts at token 2 of each.
SPANS = {
    "starts": np.array([[3, 5, 2], [2, 3, 0], [4, 4, 4]]),
    "ends": np.array([[4, 5, 2], [2, 4, 0], [4, 5, 4]]),
    "start_scores": np.array([[-1.0, -1.5, -2.0], [-0.5, -2.0, NOWHERE], [-3.0, -3.0, -3.0]]),
    "end_scores": np.array([[-1.0, -1.5, -2.0], [-0.5, -2.0, NOWHERE], [-3.0, -4.0, -3.0]]),
    "null_odds": np.array([2.0, -1.0, 0.5]),
}


def test_windows_are_merged():
    first, second = question_answering.merge_windows(QUESTIONS, WINDOWS, SPANS, n_best=3)
    # Both windows find "four"; the better score counts. "five six" ties with "one".
    texts = [candidate.text for candidate in first.candidates]
    assert texts[:2] == ["four", "two three"]
    assert texts[2] in ("one", "five six")
    assert [c.start for c in first.candidates][:2] == [14, 4]
    assert all(CONTEXT.startswith(c.text, c.start) for c in first.candidates)
    weights = np.exp([-1.0, -2.0, -4.0])
    np.testing.assert_allclose([c.probability for c in first.candidates], weights / weights.sum())
    assert first.null_odds == -1.0
    assert [candidate.text for candidate in second.candidates] == ["three", "three four"]
    assert (first.text(0.0), second.text(0.0), second.text(None)) == ("four", "", "three")
    assert second.text(0.5) == "three"


def test_nothing_found():
    nowhere = {**SPANS, "start_scores": np.full((3, 3), NOWHERE)}
    first, _ = question_answering.merge_windows(QUESTIONS, WINDOWS, nowhere, n_best=3)
    assert first.candidates == ()
    assert first.text(None) == ""


def test_files(tmp_path):
    answered = question_answering.merge_windows(QUESTIONS, WINDOWS, SPANS, n_best=2)
    question_answering.write_answers(
        tmp_path / "v1", QUESTIONS, answered, {"f1": 0.5}, threshold=None
    )
    question_answering.write_answers(
        tmp_path / "v2", QUESTIONS, answered, {"f1": 0.5}, threshold=0.0
    )
    read = lambda *parts: json.loads(tmp_path.joinpath(*parts).read_text())  # noqa: E731
    assert read("v1", "predictions.json") == {"a": "four", "b": "three"}
    assert read("v2", "predictions.json") == {"a": "four", "b": ""}
    assert read("v2", "null_odds.json") == {"a": -1.0, "b": 0.5}
    n_best = read("v1", "nbest_predictions.json")
    assert [entry["text"] for entry in n_best["a"]] == ["four", "two three"]
    assert n_best["a"][0].keys() == {"text", "probability", "start", "start_logit", "end_logit"}
    assert not (tmp_path / "v1" / "null_odds.json").exists()
    assert read("v1", "scores.json") == {"f1": 0.5}
    assert len(list(tmp_path.glob("*/*"))) == 7


def test_scores_of_one_pair():
    for prediction, truth, exact, f1 in (
        ("The Norman conquest", "norman  conquest.", 1, 1),
        ("in 1066", "1066", 0, 2 / 3),
        ("a b b", "b b b c", 0, 2 * 1.0 * 0.5 / 1.5),
        ("1,000", "1000", 1, 1),
        ("Athe a", "athe", 1, 1),
        ("x", "y", 0, 0),
        ("", "y", 0, 0),
        ("caf\u00e9 \u2014 an", "caf\u00e9 \u2014", 1, 1),
    ):
        assert question_answering.exact_match(prediction, truth) == exact
        assert question_answering.f1(prediction, truth) == pytest.approx(f1)


@given(text=st.text(alphabet="aAnthe. \t-_'\u00e9\u2019\u00a01\u0300", max_size=30))
def test_normalization_is_that_of_the_other_script(text):
    assert question_answering.normalize(text).split() == squad_evaluation.words(text)


def test_best_of_several_truths_and_missing_predictions():
    question = QUESTIONS[0]
    scores = question_answering.score_answers([question], {"a": "the four"})
    assert scores == {"exact_match": 1.0, "f1": 1.0}
    assert question_answering.score_answers([question], {}) == {"exact_match": 0.0, "f1": 0.0}
    both = question_answering.score_answers(QUESTIONS, {"a": "two", "b": ""})
    assert both == {
        "exact_match": 0.5,
        "f1": (2 / 3 + 1) / 2,
        "has_answer_exact_match": 0.0,
        "has_answer_f1": 2 / 3,
        "no_answer_exact_match": 1.0,
        "no_answer_f1": 1.0,
    }


def _thresholds_by_trying(questions, texts, odds, metric):
    """Find the best score by evaluating each distinct threshold from scratch."""
    scores = []
    none = math.nextafter(min(odds.values()), -math.inf)
    for threshold in [none, *sorted(set(odds.values()))]:
        predicted = {key: text if odds[key] <= threshold else "" for key, text in texts.items()}
        scores.append((question_answering.score_answers(questions, predicted)[metric], threshold))
    return max(scores, key=lambda pair: (pair[0], -pair[1]))


@pytest.mark.parametrize("seed", range(3))
def test_best_thresholds(seed):
    rng = random.Random(seed)
    words = CONTEXT.split()
    questions, texts, odds = [], {}, {}
    for number in range(60):
        impossible = rng.random() < 0.5
        truths = () if impossible else (Answer(" ".join(rng.choices(words, k=2)), 0),)
        questions.append(Question(str(number), "?", CONTEXT, truths, impossible))
        texts[str(number)] = rng.choice([truths[0].text if truths else "one", "two", "one two"])
        odds[str(number)] = round(rng.gauss(impossible, 1), 1)  # with ties
    found = question_answering.best_thresholds(questions, texts, odds)
    for metric in ("exact_match", "f1"):
        best, threshold = _thresholds_by_trying(questions, texts, odds, metric)
        assert found[f"best_{metric}"] == pytest.approx(best)
        assert found[f"best_{metric}_threshold"] == threshold


def test_an_answer_of_articles_is_one():
    """As in the official script, predicting "the" for an unanswerable question counts as wrong."""
    questions = [
        Question("a", "?", CONTEXT, (Answer("two", 4),)),
        Question("b", "?", CONTEXT, impossible=True),
    ]
    found = question_answering.best_thresholds(
        questions, {"a": "two", "b": "the"}, {"a": 0.0, "b": 1.0}
    )
    assert (found["best_exact_match"], found["best_exact_match_threshold"]) == (1.0, 0.0)
    found = question_answering.best_thresholds(
        questions, {"a": "two", "b": "the"}, {"a": 1.0, "b": 0.0}
    )
    assert found["best_exact_match"] == found["best_f1"] == 0.5


def test_no_answer_at_all_may_be_best():
    """All scores stay finite, so the run does not count as diverged."""
    questions = [Question(str(i), "?", CONTEXT, impossible=True) for i in range(3)]
    odds = {"0": 1.0, "1": -2.0, "2": 0.0}
    found = question_answering.best_thresholds(questions, dict.fromkeys(odds, "one"), odds)
    assert found["best_f1"] == 1.0
    assert -2.1 < found["best_f1_threshold"] < -2.0


def _spoil(questions, seed):
    """Make predictions that are right, nearly right, wrong, empty or missing."""
    rng = random.Random(seed)
    predictions = {}
    for question in questions:
        text = rng.choice(question.answers).text if question.answers else ""
        words = question.context.split()
        kind = rng.random()
        if kind < 0.1:
            text = " ".join(rng.choices(words, k=3))
        elif kind < 0.3:
            text = f"The {text.upper()}!"
        elif kind < 0.5:
            text = f"{rng.choice(words)} {text} {rng.choice(words)}"
        elif kind < 0.6:
            text = text[: len(text) // 2]
        elif kind < 0.65:
            text = rng.choice(["", ".", "the"])
        elif kind < 0.67:
            continue
        predictions[question.id] = text
    return predictions


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_real_dev_files(real_data, version):
    """Both implementations agree on the real questions, for every kind of prediction."""
    path = squad.find_file(version, "validation", real_data / "squad")
    questions = squad.read_file(path)
    predictions = _spoil(questions, seed=1)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    theirs = squad_evaluation.evaluate(articles, predictions)
    ours = question_answering.score_answers(questions, predictions)
    assert 30 < theirs["exact_match"] < 80
    for metric, value in theirs.items():
        assert 100 * ours[metric] == pytest.approx(value, abs=1e-9)
