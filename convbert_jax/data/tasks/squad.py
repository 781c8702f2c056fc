"""SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016, 2018): extractive question answering.

Each answer is a span of the paragraph; questions of 2.0 may have no answer. The data is read from
the official JSON files, optionally gzipped, or from a prepared TFDS directory.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.readers.indexed_rows import all_rows, check_prepared, open_prepared
from convbert_jax.data.readers.rows import open_bytes
from convbert_jax.data.tasks.labelled_text import Rows, pad_rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, cover
from convbert_jax.storage import expand, parse_json


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    start: int  # character offset in the context


@dataclasses.dataclass(frozen=True)
class Question:
    """A question; `answers` are all correct answers, () if they are unknown or impossible."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...] = ()
    impossible: bool = False  # the context has no answer (2.0)


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of the data set."""

    number: str  # in the names of its files
    counts: Mapping[str, int]  # questions by split, as published
    impossible: bool  # whether it contains questions without an answer


VERSIONS = {
    "v1": Version("v1.1", {"train": 87_599, "validation": 10_570}, impossible=False),
    "v2": Version("v2.0", {"train": 130_319, "validation": 11_873}, impossible=True),
}
DOWNLOAD = "https://rajpurkar.github.io/SQuAD-explorer/"
STEMS = {"train": "train", "validation": "dev"}  # split -> first part of its file name


def read(version: str, split: str, folder: str | Path) -> list[Question]:
    """Returns all questions of a split in the order of the file.

    Args:
      version: a key of VERSIONS.
      split: "train" or "validation"; the test sets were never published.
      folder: the folder of the official files, a single file, or tfds:DIR with a directory that
        TFDS prepared as array_record.

    Raises:
      DataError: the split is missing, or its file is not SQuAD of this version.
    """
    if split not in STEMS:
        raise DataError(
            f"SQuAD has no public split '{split}'. Choose one of: {', '.join(STEMS)}.", value=split
        )
    if str(folder).startswith("tfds:"):
        name, questions = str(folder), _from_tfds(str(folder).removeprefix("tfds:"), split)
    else:
        name = find_file(version, split, expand(folder))
        questions = read_file(name)
    _check(questions, version, split, name)
    return questions


def check_present(version: str, folder: str) -> None:
    """Raises DataError unless `folder` has the files of both splits; tfds:DIR is not checked."""
    if not folder:
        raise DataError(f"is empty. {_how_to_name(version)}", field="config.finetune.data")
    if not folder.startswith("tfds:"):
        if expand(folder).is_file():  # it would be used for both training and scoring
            problem = f"is one file, but training and scoring need two. {_how_to_name(version)}"
            raise DataError(problem, field="config.finetune.data", value=folder)
        for split in STEMS:
            find_file(version, split, expand(folder))


def _how_to_name(version: str) -> str:
    names = ", ".join(f"{stem}-{VERSIONS[version].number}.json" for stem in STEMS.values())
    return (
        f"Download SQuAD from {DOWNLOAD} and set --config.finetune.data=FOLDER with {names} (or "
        ".gz), or set --config.finetune.data=tfds:DIR if TensorFlow Datasets prepared it."
    )


def find_file(version: str, split: str, folder: Path) -> Path:
    """Finds the file of a split in `folder` or in its subfolder v1.1/ or v2.0/.

    Without a file of the official name, it returns the largest file whose name begins like it.

    Raises:
      DataError: no file was found.
    """
    if folder.is_file():
        return folder
    stem = f"{STEMS[split]}-{VERSIONS[version].number}"
    if not folder.is_dir():
        raise DataError(f"Folder '{folder}' does not exist. {_how_to_name(version)}", path=folder)
    places = [folder, folder / VERSIONS[version].number]
    for place in places:
        for name in (f"{stem}.json", f"{stem}.json.gz"):
            if (place / name).is_file():
                return place / name
    others = [path for place in places for path in place.glob(f"{stem}*.json*") if path.is_file()]
    if not others:
        raise DataError(
            f"no {stem}.json or {stem}.json.gz in this folder and its subfolder "
            f"{VERSIONS[version].number}. Add the official SQuAD file, or use tfds:DIR with a "
            "prepared TFDS directory.",
            path=folder,
        )
    chosen = max(others, key=lambda path: path.stat().st_size)
    logging.warning("%s.json does not exist; reading %s instead.", stem, chosen)
    return chosen


def read_file(path: Path) -> list[Question]:
    """Reads the questions of a file in SQuAD's JSON format, optionally gzipped.

    Raises:
      DataError: the file cannot be read, or has another format.
    """
    try:
        with open_bytes(path) as file:
            content = parse_json(file.read())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        problem = f"cannot be read as JSON ({error}). Check the file."
        raise DataError(problem, path=path) from None
    try:
        return list(_questions(content["data"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"not in SQuAD's format ({type(error).__name__}: {error}). Required fields: data, "
            "paragraphs, context, qas, id, question, answers, text, answer_start.",
            path=path,
        ) from None


def misplaced(questions: Iterable[Question]) -> list[Question]:
    """Returns the questions whose first answer is not in the context at its offset."""
    return [
        question
        for question in questions
        if question.answers and not _stands(question.answers[0], question.context)
    ]


def usable_for_training(questions: Sequence[Question]) -> list[Question]:
    """Removes questions whose answer is not in the context at its offset, with a warning.

    Raises:
      DataError: no question remains, or a question without answers is not marked as impossible.
    """
    wrong = misplaced(questions)
    if wrong:
        first, answer = wrong[0], wrong[0].answers[0]
        logging.warning(
            "Skipped %d of %d questions in training: the answer is not in the context at "
            "answer_start; the first is question %s: '%s' at %d.",
            len(wrong),
            len(questions),
            first.id,
            answer.text[:80],
            answer.start,
        )
    without = next((q for q in questions if not q.answers and not q.impossible), None)
    if without:
        raise DataError(
            f"Question {without.id} has no answers and is not marked as impossible. Add answers, "
            "or train on another split.",
            value=without.id,
        )
    left_out = {question.id for question in wrong}
    kept = [question for question in questions if question.id not in left_out]
    if not kept:
        raise DataError("No question has its answer in its context. Check answer_start.")
    return kept


def _stands(answer: Answer, context: str) -> bool:
    return bool(answer.text) and context.startswith(answer.text, max(answer.start, 0))


def _questions(articles: Iterable[Mapping[str, Any]]) -> Iterator[Question]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            context = _require(paragraph, "context", str)
            for entry in paragraph["qas"]:
                impossible = "is_impossible" in entry and _require(entry, "is_impossible", bool)
                answers = () if impossible else _require(entry, "answers", list)
                yield Question(
                    id=str(_require(entry, "id", (str, int))),
                    text=_require(entry, "question", str),
                    context=context,
                    answers=tuple(
                        Answer(_require(a, "text", str), _require(a, "answer_start", int))
                        for a in answers
                    ),
                    impossible=impossible,
                )


def _require(record: Mapping[str, Any], name: str, kinds: type | tuple[type, ...]) -> Any:
    """Returns a field; raises KeyError if it is missing, TypeError if its type is wrong."""
    value = record[name]
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {shorten(repr(value), 60)}")
    return value


def _from_tfds(directory: str, split: str) -> list[Question]:
    check_prepared(directory)
    rows, _ = open_prepared(directory, split)
    try:
        return [_from_row(row) for row in all_rows(rows, directory)]
    except KeyError as error:
        problem = f"no field {error}. Use a prepared squad or squad_v2."
        raise DataError(problem, path=directory) from None


def _from_row(row: Mapping[str, Any]) -> Question:
    impossible = bool(row.get("is_impossible", False))
    answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
    return Question(
        id=_text(row["id"]),
        text=_text(row["question"]),
        context=_text(row["context"]),
        answers=() if impossible else tuple(Answer(_text(t), int(s)) for t, s in answers),
        impossible=impossible,
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _check(questions: Sequence[Question], version: str, split: str, name) -> None:
    if not questions:
        raise DataError(f"{name} has no questions.")
    impossible = sum(question.impossible for question in questions)
    if impossible and not VERSIONS[version].impossible:
        problem = f"{name} has {impossible} impossible questions, so it is SQuAD 2.0."
        raise DataError(f"{problem} Use configs/squad.py:v2.", value=impossible)
    if VERSIONS[version].impossible and not impossible:
        logging.warning("%s has no impossible questions; it may be SQuAD 1.1.", name)
    if len({question.id for question in questions}) < len(questions):
        seen: set[str] = set()
        twice = next(q.id for q in questions if q.id in seen or seen.add(q.id))
        raise DataError(f"{name} has question id {twice} twice. Ids must be unique.", value=twice)
    official = VERSIONS[version].counts[split]
    if len(questions) != official:
        logging.warning(
            "%s has %d questions; the official %s of SQuAD %s has %d.",
            name,
            len(questions),
            STEMS[split],
            VERSIONS[version].number,
            official,
        )


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
            f"is too short for a question of {query} tokens and its context. Set it to {query + 4} "
            "or more, or reduce config.finetune.query_length.",
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
