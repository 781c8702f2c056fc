"""Makes a `FinetuneTask` from SQuAD, with several windows per question and one answer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from convbert_jax.config import Config, OutputsSection
from convbert_jax.config.checks.finetuning import choose_head
from convbert_jax.data.tasks import squad
from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tasks.squad_windows import Windows, make_windows, to_rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning.predictions import answers
from convbert_jax.finetuning.predictions.answers import THRESHOLDS, Answered
from convbert_jax.finetuning.predictions.collected import Collected, Predicted, rows_evaluator
from convbert_jax.finetuning.scores import answer_scores
from convbert_jax.finetuning.tasks.task import (
    FinetuneTask,
    FinetuningError,
    Scores,
    warn_of_unknown,
)
from convbert_jax.objectives import span_extraction

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
        answers.write_files(folder / split, dev.questions, answered, scores, threshold=threshold)

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
    if config.model.types < 2:
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
    return answers.collect(
        reading.questions, reading.windows, arrays, n_best=config.finetune.n_best
    )


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
    scores = answer_scores.score(questions, answers.texts(questions, answered, threshold))
    if threshold is not None:
        best = answers.texts(questions, answered, None)
        odds = {q.id: a.null_odds for q, a in zip(questions, answered, strict=True)}
        scores |= answer_scores.best_thresholds(questions, best, odds)
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
