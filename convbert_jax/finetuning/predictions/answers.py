"""The best spans of all windows become one answer a question, and the files SQuAD asks for."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tasks.squad_windows import Windows
from convbert_jax.files import write_json
from convbert_jax.objectives.span_extraction import NOWHERE

# The release writes "" where its answerability logit is above; the plain head's odds need none.
THRESHOLDS = {"span": 0.0, "span_beam": -2.75}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible answer, exactly as it stands in the context."""

    text: str
    start: int  # character of the context
    start_score: float  # log probability of the start and of the end within its window
    end_score: float
    probability: float  # among the candidates of its question


@dataclasses.dataclass(frozen=True)
class Answered:
    """What is predicted for one question.

    `null_odds` is the least of its windows: above 0 (or the head's threshold) no window seems to
    have an answer.
    """

    candidates: tuple[Candidate, ...]  # best first; their texts differ
    null_odds: float

    def text(self, threshold: float | None) -> str:
        """The answer; "" if there is none or `null_odds` are above `threshold` (None: never)."""
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
    """Merges the windows of each question.

    Args:
      spans: outputs of `span_extraction.predict` with one row for each of `windows.rows`.
      n_best: most candidates of a question.
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
    """Question id -> predicted answer."""
    return {q.id: a.text(threshold) for q, a in zip(questions, answered, strict=True)}


def write_files(
    folder: Path,
    questions: Sequence[Question],
    answered: Sequence[Answered],
    scores: Mapping[str, float],
    *,
    threshold: float | None,
) -> None:
    """Writes what the official evaluation scripts read, and what shows how sure the model is.

    predictions.json          {id: answer}, argument of both scripts
    nbest_predictions.json    {id: [{text, probability, start, start_logit, end_logit}, ...]}
    null_odds.json            {id: odds}, for --na-prob-file of the script of 2.0; only with a
                              `threshold`
    scores.json               all there are, fractions; of 2.0 the best thresholds too
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
