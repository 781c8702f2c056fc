"""Encodes questions and contexts as rows: [CLS] question [SEP] part of the context [SEP].

A context that is longer than a row is split into overlapping windows (BERT §4.2 and its code). For
a token in several windows, predictions come from the window with the most context on both sides.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.encoding import Rows, pad_rows
from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tokenizer.offsets import cover
from convbert_jax.data.tokenizer.tokenizer import Tokenizer

BATCH = 1024  # texts encoded at once


@dataclasses.dataclass(frozen=True)
class Window:
    """One row. Positions count from 0, which is [CLS].

    Attributes:
      question: index into the questions.
      tokens: int32, including special tokens.
      context_at: position of the first context token; the last position is [SEP].
      first: index of this token in the whole context.
      start, end: positions of the first and last token of the answer; 0 and 0 if the window does
        not contain the whole answer.
      best: bool for each context token: whether it has the most context in this window.
    """

    question: int
    tokens: np.ndarray
    context_at: int
    first: int
    start: int
    end: int
    best: np.ndarray


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of a list of questions, in their order.

    Attributes:
      rows: the windows.
      offsets: for each question, [tokens of its context, 2], see `Tokenizer.encode_with_offsets`.
      answers: for each question, (first, last) context token of its answer, or None.
      cut_questions: number of truncated questions.
      without_answer: number of windows that do not contain the whole answer of their question.
      lost_answers: number of questions whose answer is not in any window as a whole.
    """

    rows: list[Window]
    offsets: list[np.ndarray]
    answers: list[tuple[int, int] | None]
    cut_questions: int
    without_answer: int
    lost_answers: int

    def text(self, questions: Sequence[Question], window: Window, start: int, end: int) -> str:
        """Returns the original text of the tokens `start` to `end` (inclusive) of a window."""
        offsets = self.offsets[window.question]
        shift = window.first - window.context_at
        begin, stop = offsets[start + shift, 0], offsets[end + shift, 1]
        return questions[window.question].context[begin:stop]


def make_windows(
    questions: Sequence[Question], tokenizer: Tokenizer, *, length: int, query: int, stride: int
) -> Windows:
    """Makes windows of at most `length` tokens over the context of each question.

    Args:
      query: maximum tokens of a question; longer questions are truncated.
      stride: context tokens from one window to the next (less if a window is shorter).

    Raises:
      DataError: `length` is too small for a question and context, or a text has no tokens.
    """
    if length < query + 4:
        raise DataError(
            f"Rows of {length} tokens are too short for a question of {query} and its context. "
            f"Set config.finetune.length to {query + 4} or more, or reduce "
            "config.finetune.query_length.",
            field="config.finetune.length",
            value=length,
        )
    special = tokenizer.special
    texts = list(dict.fromkeys(question.context for question in questions))
    contexts = dict(zip(texts, _encode(tokenizer, texts), strict=True))
    queries = [
        ids
        for start in range(0, len(questions), BATCH)
        for ids in tokenizer.encode([q.text for q in questions[start : start + BATCH]])
    ]
    rows, answers = [], []
    for number, (question, ids) in enumerate(zip(questions, queries, strict=True)):
        context, offsets = contexts[question.context]
        if not ids or not len(context):
            what = "question" if not ids else "context"
            raise DataError(
                f"Question {question.id} has an empty {what}. Remove it.", value=question.id
            )
        answer = _place(question, offsets)
        answers.append(answer)
        head = [special.cls, *ids[:query], special.sep]
        parts = cut(len(context), length - len(head) - 1, stride)
        best = most_context(len(context), parts)
        for index, (first, size) in enumerate(parts):
            start, end = _inside(answer, first, size, len(head))
            rows.append(
                Window(
                    question=number,
                    tokens=np.concatenate(
                        [head, context[first : first + size], [special.sep]]
                    ).astype(np.int32),
                    context_at=len(head),
                    first=first,
                    start=start,
                    end=end,
                    best=best[first : first + size] == index,
                )
            )
    answerable = {number for number, question in enumerate(questions) if question.answers}
    return Windows(
        rows=rows,
        offsets=[contexts[question.context][1] for question in questions],
        answers=answers,
        cut_questions=sum(len(ids) > query for ids in queries),
        without_answer=sum(not row.end and row.question in answerable for row in rows),
        lost_answers=len(answerable - {row.question for row in rows if row.end}),
    )


def to_rows(
    questions: Sequence[Question],
    windows: Windows,
    tokenizer: Tokenizer,
    *,
    length: int,
    targets: bool,
) -> Rows:
    """Converts windows to rows of at most `length` tokens.

    Args:
      targets: whether to add the training targets; otherwise the columns for prediction are added,
        see `interfaces.batch.AnswerBatch`.
    """
    found = windows.rows
    pieces, context_at = [w.tokens for w in found], [w.context_at for w in found]
    rows = pad_rows(pieces, length, pad=tokenizer.special.pad, second=context_at)
    if targets:
        columns = {
            "start": [w.start for w in found],
            "end": [w.end for w in found],
            "impossible": [questions[w.question].impossible for w in found],
        }
        named = {name: np.asarray(values, np.int32) for name, values in columns.items()}
        return rows.with_columns(**named)
    best = np.zeros((len(found), length), bool)
    in_context = rows.by_token["type_ids"] == 1
    in_context &= np.arange(length) < rows.lengths[:, None] - 1  # without the final [SEP]
    best[in_context] = np.concatenate([w.best for w in found])
    return dataclasses.replace(rows, by_token={**rows.by_token, "best": best})


def cut(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns (first token, number of tokens) of each window over a context.

    Args:
      tokens: number of context tokens.
      room: maximum context tokens of a window.
      stride: tokens from one window to the next.
    """
    parts = []
    first = 0
    while True:
        size = min(room, tokens - first)
        parts.append((first, size))
        if first + size == tokens:
            return parts
        first += min(size, stride)


def most_context(tokens: int, parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns for each token the index of the window with the most context around it.

    The score is min(tokens to the left, tokens to the right) + 0.01 * (length of the window); the
    first of equal windows wins.
    """
    best, score = np.zeros(tokens, np.int32), np.full(tokens, -1.0)
    for index, (first, size) in enumerate(parts):
        within = np.arange(size)
        around = np.minimum(within, within[::-1]) + 0.01 * size
        here = slice(first, first + size)
        better = around > score[here]
        best[here][better], score[here][better] = index, around[better]
    return best


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.asarray(ids, np.int32), offsets)
        for start in range(0, len(texts), BATCH)
        for ids, offsets in tokenizer.encode_with_offsets(texts[start : start + BATCH])
    ]


def _place(question: Question, offsets: np.ndarray) -> tuple[int, int] | None:
    if not question.answers:
        return None
    answer = question.answers[0]
    return cover(offsets, answer.start, answer.start + len(answer.text))


def _inside(
    answer: tuple[int, int] | None, first: int, size: int, context_at: int
) -> tuple[int, int]:
    if answer is None or answer[0] < first or answer[1] >= first + size:
        return 0, 0
    shift = context_at - first
    return answer[0] + shift, answer[1] + shift
