"""Makes a `FinetuneTask` from SQuAD, with several windows per question and one answer.

Exact match and F1 are computed as in SQuAD's evaluation scripts, as fractions. Answers are
compared in lower case, without punctuation, articles and extra white space. F1 compares bags of
words. The best of several correct answers counts (Rajpurkar et al., 2016, §6.1). In SQuAD 2.0, the
only correct prediction for a question without an answer is empty (2018, §4).
"""

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from convbert_jax.config import Config, OutputsSection
from convbert_jax.config.finetuning import choose_head
from convbert_jax.data.tasks import squad
from convbert_jax.data.tasks.labelled_text import Rows
from convbert_jax.data.tasks.squad import Question, Windows, make_windows, to_rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning.task import (
    Collected,
    FinetuneTask,
    FinetuningError,
    Predicted,
    Scores,
    rows_evaluator,
    warn_of_unknown,
)
from convbert_jax.objectives import span_extraction
from convbert_jax.objectives.span_extraction import NOWHERE
from convbert_jax.storage import write_json

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


def score_answers(
    questions: Sequence[Question], predictions: Mapping[str, str]
) -> dict[str, float]:
    """Score predictions by question id; missing predictions are wrong.

    If some questions have no answer (2.0), has_answer_… and no_answer_… score each kind.

    Args:
      predictions: For 2.0, "" predicts that there is no answer.
    """
    impossible = np.array([question.impossible for question in questions])
    pairs = _score_each(questions, predictions)
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
    scores = np.where((impossible & given)[:, None], 0.0, _score_each(questions, answers))
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


def _score_each(questions: Sequence[Question], predictions: Mapping[str, str]) -> np.ndarray:
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


def merge_windows(
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
        Answered(_candidates(answer_texts, n_best), float(odds))
        for answer_texts, odds in zip(found, null_odds, strict=True)
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


def answer_texts(
    questions: Iterable[Question], answered: Iterable[Answered], threshold: float | None
) -> dict[str, str]:
    """Return the predicted answer by question id."""
    return {q.id: a.text(threshold) for q, a in zip(questions, answered, strict=True)}


def write_answers(
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
    write_json(folder / "predictions.json", answer_texts(questions, answered, threshold))
    write_json(folder / "nbest_predictions.json", n_best)
    write_json(folder / "scores.json", scores)
    if threshold is not None:
        odds = {q.id: a.null_odds for q, a in zip(questions, answered, strict=True)}
        write_json(folder / "null_odds.json", odds)


VERSIONS = {
    "squad_v1": "v1",
    "squad_v2": "v2",
}  # config.finetune.tasks -> version in data/tasks/squad.py
METRICS = {
    "v1": ("exact_match", "f1"),
    "v2": ("exact_match", "f1", "has_answer_f1", "no_answer_f1", "best_exact_match", "best_f1"),
}
_LOSSES = {"span": span_extraction.plain_losses, "span_beam": span_extraction.beam_losses}
LABELS = ("start", "end")  # the plain head's two logits


@dataclasses.dataclass(frozen=True)
class Reading:
    """Questions and their encoded windows."""

    questions: Sequence[Question]
    windows: Windows
    rows: Rows


def make_task(name: str, config: Config, tokenizer: Tokenizer) -> FinetuneTask:
    """Read and encode SQuAD.

    Raises:
      DataError: Files are missing or cannot be used, or rows are too short for the questions.
      FinetuningError: The model has one segment type.
      ConfigError: The head is not for question answering.
    """
    version = VERSIONS[name]
    f = config.finetune
    outputs = outputs_of(name, config)
    train = squad.usable_for_training(squad.read(version, "train", f.data))
    if f.train_rows and f.train_rows < len(train):
        chosen = np.random.default_rng(config.seed).permutation(len(train))[: f.train_rows]
        logging.info("%s: training on %d of %d questions.", name, f.train_rows, len(train))
        train = [train[i] for i in np.sort(chosen)]
    dev = read_questions(
        squad.read(version, "validation", f.data), config, tokenizer, f"{name}, validation"
    )
    threshold = THRESHOLDS[outputs.head] if version == "v2" else None
    both_kinds = len({question.impossible for question in dev.questions}) == 2
    metrics = METRICS["v2" if both_kinds else "v1"]

    def score(found: Predicted) -> Scores:
        scores = _score_all(dev.questions, collect(dev, found, config), threshold)
        return {metric: scores[metric] for metric in metrics}

    def write(folder: Path, split: str, collected: Collected, *, pictures: bool = False) -> None:
        answered = collect(dev, collected.predicted(), config)
        scores = _score_all(dev.questions, answered, threshold)
        write_answers(folder / split, dev.questions, answered, scores, threshold=threshold)

    return FinetuneTask(
        name=name,
        outputs=outputs,
        width=len(LABELS),
        losses=_LOSSES[outputs.head],
        predict=predict_with(outputs.head, config),
        constants={},
        epochs=2.0,
        train=read_questions(train, config, tokenizer, f"{name}, train", targets=True).rows,
        evaluation={"validation": dev.rows},
        evaluators={"validation": rows_evaluator(len(dev.rows), metrics, score)},
        write=write,
    )


def outputs_of(name: str, config: Config) -> OutputsSection:
    """Return the description of the model's outputs for this task.

    Raises:
      FinetuningError: The model has one segment type.
      ConfigError: The head is not for question answering.
    """
    if config.model.types == 1:
        raise FinetuningError(
            f"{name} has a question and a context, but the model has only one segment type "
            f"(config.model.types={config.model.types}). Use weights with two segment types.",
            field="config.model.types",
            value=config.model.types,
        )
    head = choose_head(config.finetune.head, "span", name, config.encoder.reads_whole_row)
    columns = ("question", "context")
    return OutputsSection(
        task=name, kind="span", head=head, labels=LABELS, texts=2, columns=columns
    )


def read_questions(
    questions: Sequence[Question],
    config: Config,
    tokenizer: Tokenizer,
    title: str | None,
    *,
    targets: bool = False,
) -> Reading:
    """Encode windows, with training targets if `targets`, else with the inputs of prediction.

    Args:
      title: Prefix of log messages; None disables them.

    Raises:
      DataError: Rows are too short for the questions, or a text is empty.
    """
    f = config.finetune
    windows = make_windows(
        questions, tokenizer, length=f.length, query=f.query_length, stride=f.stride
    )
    if title:
        _log(title, len(questions), windows, f, targets)
    rows = to_rows(questions, windows, tokenizer, length=f.length, targets=targets)
    if title:
        texts = [text for q in questions for text in (q.text, q.context)]
        warn_of_unknown(texts, tokenizer, config, title)
    return Reading(questions, windows, rows)


def collect(reading: Reading, found: Predicted, config: Config) -> list[Answered]:
    """Compute answers from the outputs of `predict_with` for all rows."""
    arrays: Mapping[str, np.ndarray] = {name: np.asarray(values) for name, values in found.items()}
    return merge_windows(reading.questions, reading.windows, arrays, n_best=config.finetune.n_best)


def predict_with(head: str, config: Config) -> Callable:
    """Return a head's prediction function (model, batch, dtype=) -> spans.

    Equal settings return the same object, so that it is compiled once.
    """
    f = config.finetune
    return _predict_with(head, f.answer_length, f.n_best, f.beam)


@functools.cache
def _predict_with(head: str, answer_length: int, n_best: int, beam: int) -> Callable:
    settings = {"answer_length": answer_length, "n_best": n_best}
    if head == "span":
        return functools.partial(span_extraction.plain_spans, **settings)
    return functools.partial(span_extraction.beam_spans, beam=beam, **settings)


def _score_all(
    questions: Sequence[Question], answered: Sequence[Answered], threshold: float | None
) -> Scores:
    """Score with `threshold`; for SQuAD 2.0 also with the best threshold."""
    scores = score_answers(questions, answer_texts(questions, answered, threshold))
    if threshold is not None:
        best = answer_texts(questions, answered, None)
        odds = {q.id: a.null_odds for q, a in zip(questions, answered, strict=True)}
        scores |= best_thresholds(questions, best, odds)
    return scores


def _log(title, count: int, windows: Windows, settings, targets: bool) -> None:
    logging.info(
        "%s: split %d questions into %d windows of at most %d tokens.",
        title,
        count,
        len(windows.rows),
        settings.length,
    )
    if windows.cut_questions:
        logging.info(
            "%s: truncated %d questions to %d tokens.",
            title,
            windows.cut_questions,
            settings.query_length,
        )
    if targets and windows.without_answer:
        logging.info(
            "%s: %d windows (%.1f%%) do not contain the answer; they are trained to predict none.",
            title,
            windows.without_answer,
            100 * windows.without_answer / len(windows.rows),
        )
    if targets and windows.lost_answers:
        logging.warning(
            "%s: %d answers (%.1f%%) are not fully contained in any window; lower "
            "config.finetune.stride=%d to overlap windows more.",
            title,
            windows.lost_answers,
            100 * windows.lost_answers / count,
            settings.stride,
        )
