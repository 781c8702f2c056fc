"""Sets of pairs written by a model and scored beside their references, with files and a report.

FOLDER/NAME.txt                                   what was written, a line for each pair
FOLDER/NAME.source.txt, FOLDER/NAME.reference.txt what it was written to, and what is right; of
                                                  several references .reference-2.txt and so on
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.analysis import text_scores
from convbert_jax.analysis.text_scores import Scores
from convbert_jax.config import Config, ParallelSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel.pair_source import open_pairs
from convbert_jax.data.parallel.parallel_text import ParallelText
from convbert_jax.data.parallel.references import (
    References,
    check_references,
    read_heldout,
    read_whole,
)
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.writing.writer import Writer
from convbert_jax.recipes.writing import settings
from convbert_jax.training.environment import devices
from convbert_jax.training.task import Params

HELDOUT = "validation"
_EXAMPLES = 3
_WIDTH = 300  # characters of a text in a report


@dataclasses.dataclass(frozen=True)
class Set:
    """Written and scored.

    Attributes:
      unread: sources that the model did not read, as too long ones; their texts are empty and
        scored so. And why, of the first.
      cut: sources of which config.parallel.cut_sources had the model read the beginning.
      lost: what the vocabulary cannot write of the references; "" for nothing.
      decoding: how, as `settings.collect` has it.
    """

    name: str
    references: References
    written: tuple[str, ...]
    scores: Scores
    unread: tuple[int, str]
    cut: int
    decoding: Mapping[str, Any]
    file: epath.Path
    lost: str = ""


def can_score() -> bool:
    """Whether this start writes and scores: of several processes none does."""
    return jax.process_count() == 1


NOT_SCORED = (
    "Several processes wrote and scored nothing; --mode=eval does on one, by the checkpoints."
)


def check(config: Config, *, tests: bool) -> dict[str, References]:
    """Refuses, before any long work, what could not be scored after it.

    Args:
      tests: whether those of config.decoding.test_sources will be.

    Returns:
      These sets, by name; {} without `tests`.

    Raises:
      ScoreError: a library is missing.
      DataError: a set is not there, a reference in it is empty or, of further ones, cannot be read,
        or it has more of one text than of another where the score is one of the corpus.
    """
    text_scores.check_library(config.recipe, config.decoding.score_words)
    section, alike = config.parallel, config.recipe in text_scores.OF_CORPUS
    found = {}
    for name, spec in config.decoding.tests if tests else ():
        found[name] = read_whole(spec, section)
        check_references(spec, section, alike=alike)
    if section.validation_source and not _is_gone(section):  # prepared pairs outlive their files
        check_references(section.validation_source, section, alike=alike)
    return found


def _is_gone(section: ParallelSection) -> bool:
    try:
        open_pairs(section.validation_source, section, "all")
    except DataError:
        return True
    return False


def score_sets(
    config: Config,
    params: Params,
    tokenizers: tuple[Tokenizer, Tokenizer],
    text: ParallelText,
    folder: epath.Path,
    *,
    steps: Sequence[int],
    tests: Mapping[str, References],
) -> tuple[list[Set], str]:
    """Writes to the held-out pairs and to `tests`.

    Args:
      params: whole, on the host.
      folder: of the files.
      steps: of the checkpoints whose mean `params` are.
      tests: further sets by name, as `check` has them.

    Returns:
      What was written and scored, and why the held-out pairs were not, "" if they were: prepared
      pairs outlive their files.
    """
    sets, unwritten = {}, ""
    try:
        sets[HELDOUT] = read_heldout(config, text, config.train.eval_rows)
    except DataError as error:
        unwritten = f"Nothing was written to the held-out pairs and scored: {error}"
        logging.warning("%s", unwritten)
    sets |= tests
    if not sets:
        return [], unwritten
    device = jax.local_devices()[0]
    dtype = devices.compute_dtype(config, device)
    writer = Writer(config, params, tokenizers, dtype)
    how = settings.collect(config, steps, jnp.dtype(dtype).name)
    scored = [_score(config, writer, name, found, how, folder) for name, found in sets.items()]
    return scored, unwritten


def _score(
    config: Config,
    writer: Writer,
    name: str,
    references: References,
    how: Mapping[str, Any],
    folder: epath.Path,
) -> Set:
    sources = [source for source, *_ in references.pairs]
    right = [of_pair[1:] for of_pair in references.pairs]
    answers = writer.write(sources, title=f"writing {name}")
    written = tuple(_line(a.texts[0].text) if a.texts else "" for a in answers)
    problems = [
        f"pair {number} {answer.problem}"
        for number, answer in enumerate(answers, start=1)
        if answer.problem
    ]
    target = writer.texts.target

    def normalize(text):
        (ids,) = target.encode([text])
        return target.decode(ids)

    scores = text_scores.score(
        config.recipe, written, right, normalize, config.decoding.score_words
    )
    file = folder / f"{name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"": written, ".source": sources}
    for number in range(max(map(len, right))):
        which = f"-{number + 1}" if number else ""
        columns[f".reference{which}"] = ["".join(texts[number : number + 1]) for texts in right]
    for of_file, texts in columns.items():
        path = folder / f"{name}{of_file}.txt"
        files.write_text(path, "".join(_line(text) + "\n" for text in texts))
    unread = len(problems), "".join(problems[:1])
    cut = sum(answer.cut for answer in answers)
    lost = target.describe_lost([text for texts in right for text in texts])
    found = Set(name, references, written, scores, unread, cut, how, file, lost)
    for line in list_warnings(found):
        logging.warning("%s", line)
    return found


def describe(sets: Sequence[Set]) -> list[str]:
    """Scores, where they come from, and examples of the first set, for a person."""
    lines = []
    for found in sets:
        numbers = ", ".join(" ".join(number) for number in list_scores(found))
        lines += [
            f"Written to {len(found.written):,} pairs of {found.name}: {numbers}",
            *(f"  {line}" for line in list_settings(found)),
            *(f"  {line}" for line in list_warnings(found)),
        ]
    for example in choose_examples(sets[0]):
        lines += ["", *(f"  {name:<11}{text}" for name, text in example.items())]
    return [*lines, "", f"Texts: {sets[0].file.parent}"]


def list_settings(found: Set) -> list[str]:
    """What made the scores: what counted, how the texts were written, what was read of them."""
    lines = [found.scores.signature, settings.describe(found.decoding)]
    if found.cut:
        lines.append(f"{found.cut} of {len(found.written)} sources cut to what the model reads")
    return lines


def list_scores(found: Set) -> list[tuple[str, str]]:
    """Titles and values, spelled out."""
    return [
        (text_scores.TITLES[name], f"{value:.1f}") for name, value in found.scores.values.items()
    ]


def choose_examples(found: Set) -> list[dict[str, str]]:
    """A few pairs from all over the set, as {"source": …, "reference": …, "ours": …}."""
    count = len(found.written)
    examples = []
    for place in [n * count // _EXAMPLES for n in range(min(_EXAMPLES, count))]:
        source, right = found.references.pairs[place][:2]
        texts = {"source": source, "reference": right, "ours": found.written[place]}
        examples.append({name: _short(text) for name, text in texts.items()})
    return examples


def list_warnings(found: Set) -> list[str]:
    """What was left out or not read."""
    lines = []
    if bad := found.references.bad[0]:
        lines.append(f"{bad} more pairs left out; the first: {found.references.bad[1]}.")
    if unread := found.unread[0]:
        lines.append(f"{unread} scored as empty; the first: {found.unread[1]}.")
    if found.lost:
        lines.append(f"References: {found.lost}.")
    return lines


def to_json(sets: Sequence[Set]) -> dict[str, dict[str, Any]]:
    """What is kept of each set, by its name."""
    return {
        found.name: {
            **found.scores.values,
            "signature": found.scores.signature,
            "decoding": dict(found.decoding),
            "pairs": len(found.written),
            "bad_pairs": found.references.bad[0],
            "unread_sources": found.unread[0],
            "cut_sources": found.cut,
        }
        for found in sets
    }


def values_of(sets: Sequence[Set]) -> Mapping[str, Mapping[str, float]]:
    """The scores of each set by its name."""
    return {found.name: dict(found.scores.values) for found in sets}


def _line(text: str) -> str:
    return " ".join(text.splitlines())


def _short(text: str) -> str:
    text = _line(text)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
