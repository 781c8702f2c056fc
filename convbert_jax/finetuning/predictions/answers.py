"""Merges the best spans of all windows into one answer per question, and writes SQuAD files."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tasks.squad_windows import Windows
from convbert_jax.files import write_json
from convbert_jax.objectives.span_extraction import NOWHERE

# No-answer thresholds: the official code's for span_beam; the plain head's log odds need none.
THRESHOLDS = {"span": 0.0, "span_beam": -2.75}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible answer, spelled as in the context."""

    text: str
    start: int  # character offset in the context
    start_score: float  # log probability of the start and of the end within its window
    end_score: float
    probability: float  # relative to the other candidates of the question


@dataclasses.dataclass(frozen=True)
class Answered:
    """The prediction for one question.

    `null_odds` is the minimum over its windows: above 0, or the head's threshold, no window seems
    to contain an answer.
    """

    candidates: tuple[Candidate, ...]  # best first, with distinct texts
    null_odds: float

    def text(self, threshold: float | None) -> str:
        """Return the answer, or "" without candidates or if `null_odds` exceeds `threshold`."""
        if not self.candidates or (threshold is not None and self.null_odds > threshold):
            return ""
        return self.candidates[0].text


def collect(
    questions: Sequence[Question],
    windows: Windows,
    spans: Mapping[str, np.ndarray],
    *,
    n_best: int,
) -> list[Answered]:
    """Merge the windows of each question.

    Args:
      spans: Outputs of the head's prediction function (see `span_extraction`), with one row for
        each of `windows.rows`.
      n_best: Maximum number of candidates per question.
    """
    found: list[dict[str, tuple[float, float, float, int]]] = [{} for _ in questions]
    null_odds = np.full(len(questions), np.inf)
    scores = spans["start_scores"] + spans["end_scores"]
    real = scores > NOWHERE / 2
    for row, window in enumerate(windows.rows):
        number = window.question
        null_odds[number] = min(null_odds[number], spans["null_odds"][row])
        shift = window.first - window.context_at
        context, offsets = questions[number].context, windows.offsets[number]
        for slot in np.flatnonzero(real[row]):
            begin = int(offsets[spans["starts"][row, slot] + shift, 0])
            stop = int(offsets[spans["ends"][row, slot] + shift, 1])
            text, score = context[begin:stop], float(scores[row, slot])
            best = found[number].get(text)
            if text and (best is None or score > best[0]):
                parts = (spans["start_scores"][row, slot], spans["end_scores"][row, slot])
                found[number][text] = (score, float(parts[0]), float(parts[1]), begin)
    return [
        Answered(_candidates(texts, n_best), float(odds))
        for texts, odds in zip(found, null_odds, strict=True)
    ]


def _candidates(found: Mapping[str, tuple], n_best: int) -> tuple[Candidate, ...]:
    best = sorted(found.items(), key=lambda item: -item[1][0])[:n_best]
    if not best:
        return ()
    scores = np.array([values[0] for _, values in best])
    weights = np.exp(scores - scores.max())
    return tuple(
        Candidate(text, begin, start_score, end_score, float(probability))
        for (text, (_, start_score, end_score, begin)), probability in zip(
            best, weights / weights.sum(), strict=True
        )
    )


def texts(
    questions: Iterable[Question], answered: Iterable[Answered], threshold: float | None
) -> dict[str, str]:
    """Return the predicted answer by question id."""
    return {q.id: a.text(threshold) for q, a in zip(questions, answered, strict=True)}


def write_files(
    folder: Path,
    questions: Sequence[Question],
    answered: Sequence[Answered],
    scores: Mapping[str, float],
    *,
    threshold: float | None,
) -> None:
    """Write the files of the official evaluation scripts, candidates and scores.

    predictions.json          {id: answer}, input of both scripts
    nbest_predictions.json    {id: [{text, probability, start, start_logit, end_logit}, ...]}
    null_odds.json            {id: odds}, for --na-prob-file of the 2.0 script; only with a
                              `threshold`
    scores.json               all scores as fractions; for 2.0 also the best thresholds
    """
    folder.mkdir(parents=True, exist_ok=True)
    n_best = {
        question.id: [
            {
                "text": candidate.text,
                "probability": candidate.probability,
                "start": candidate.start,
                "start_logit": candidate.start_score,
                "end_logit": candidate.end_score,
            }
            for candidate in answer.candidates
        ]
        for question, answer in zip(questions, answered, strict=True)
    }
    write_json(folder / "predictions.json", texts(questions, answered, threshold))
    write_json(folder / "nbest_predictions.json", n_best)
    write_json(folder / "scores.json", scores)
    if threshold is not None:
        odds = {q.id: a.null_odds for q, a in zip(questions, answered, strict=True)}
        write_json(folder / "null_odds.json", odds)
