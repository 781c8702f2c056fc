"""SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016, 2018): extractive question answering.

Each answer is a span of the paragraph; questions of 2.0 may have no answer. The data is read from
the official JSON files, optionally gzipped, or from a prepared TFDS directory.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.sources.indexed_rows import all_rows, open_prepared
from convbert_jax.data.tables.text_lines import open_bytes
from convbert_jax.files import expand, parse_json


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
        raise DataError(
            f"config.finetune.data is empty. {_how_to_name(version)}", field="config.finetune.data"
        )
    if not folder.startswith("tfds:"):
        if expand(folder).is_file():  # it would be used for both training and scoring
            raise DataError(
                f"config.finetune.data={folder} is one file, but training and scoring need two. "
                f"{_how_to_name(version)}",
                field="config.finetune.data",
                value=folder,
            )
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
            f"{folder} and its subfolder {VERSIONS[version].number} have no {stem}.json or "
            f"{stem}.json.gz. Add the official SQuAD file, or use tfds:DIR with a prepared TFDS "
            "directory.",
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
        raise DataError(
            f"{path} cannot be read as JSON ({error}). Check the file.", path=path
        ) from None
    try:
        return list(_questions(content["data"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not in SQuAD's format ({type(error).__name__}: {error}). Required fields: "
            "data, paragraphs, context, qas, id, question, answers, text, answer_start.",
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
    if not (Path(directory) / "dataset_info.json").is_file():
        raise DataError(
            f"{directory} is not a prepared data set: it has no dataset_info.json. Use the "
            "folder of a version, for example squad/v1.1/3.0.0.",
            path=directory,
        )
    rows, _ = open_prepared(directory, split)
    try:
        return [_from_row(row) for row in all_rows(rows, directory)]
    except KeyError as error:
        raise DataError(
            f"{directory} has no field {error}. Use a prepared squad or squad_v2.", path=directory
        ) from None


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
        raise DataError(
            f"{name} has {impossible} impossible questions, so it is SQuAD 2.0. Use "
            "configs/squad.py:v2.",
            value=impossible,
        )
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
