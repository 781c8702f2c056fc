"""Generates texts for sets of pairs and scores them against the references.

FOLDER/NAME.txt                                   generated texts, one line per pair
FOLDER/NAME.source.txt, FOLDER/NAME.reference.txt sources and references; further references are in
                                                  .reference-2.txt and so on
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.analysis import text_scores
from convbert_jax.analysis.text_scores import Scores
from convbert_jax.config import Config, ParallelSection
from convbert_jax.config.sequences import DecodingSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel_text import (
    ParallelText,
    References,
    check_references,
    read_heldout,
    read_whole,
)
from convbert_jax.data.readers.pair_sources import open_pairs
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.generation import Writer
from convbert_jax.training import environment
from convbert_jax.training.partitioning import Params

_OF_METHOD = {
    "beam": ("beam", "length_penalty"),
    "greedy": (),
    # of n_best samples, the one with the best score is used
    "sample": ("n_best", "length_penalty", "temperature", "top_k", "top_p"),
}


def collect_settings(config: Config, steps: Sequence[int], dtype: str) -> dict[str, Any]:
    """Returns the settings that determine the generated texts, JSON-compatible.

    Args:
      steps: steps of the averaged checkpoints.
      dtype: dtype of the computation.
    """
    d = config.decoding
    drawn = {"seed": config.seed} if d.method == "sample" else {}
    return {
        "method": d.method,
        **{name: getattr(d, name) for name in _OF_METHOD[d.method]},
        **drawn,
        "length_ratio": d.length_ratio,
        "length_extra": d.length_extra,
        "checkpoints": list(steps),
        "dtype": dtype,
    }


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Formats the settings of `collect` as one line."""
    d = DecodingSection(
        **{name: value for name, value in settings.items() if hasattr(DecodingSection, name)}
    )
    how = {
        "beam": f"beam {d.beam}",
        "greedy": "greedy",
        "sample": f"sampled (temperature {d.temperature:g}, top k {d.top_k}, top p {d.top_p:g}, "
        f"seed {settings.get('seed')})",
    }[d.method]
    if d.method == "sample" and d.n_best > 1:
        how += f", the best of {d.n_best}"
    if d.method != "greedy" and (d.method == "beam" or d.n_best > 1):
        how += f", score / length^{d.length_penalty:g}"
    steps = settings["checkpoints"]
    checkpoints = f"checkpoint {steps[0]}"
    if len(steps) > 1:
        checkpoints = f"mean of {len(steps)} checkpoints, {steps[0]} to {steps[-1]}"
    most = f"at most {d.length_extra} tokens"
    if d.length_ratio:
        most = f"at most {d.length_ratio:g} x source tokens + {d.length_extra}"
    return f"{how}; {most}; {checkpoints}; {settings['dtype']}"


HELDOUT = "validation"
_EXAMPLES = 3
_WIDTH = 300  # maximum characters of a text in a report


@dataclasses.dataclass(frozen=True)
class Set:
    """A set of pairs with generated texts and scores.

    Attributes:
      written: generated texts.
      unread: (number of sources that could not be read, as too long ones; reason of the first).
        Their texts are empty and scored as such.
      cut: number of sources truncated because of config.parallel.cut_sources.
      decoding: decoding settings, see `settings.collect`.
      file: file of the generated texts.
      lost: message about characters of the references that the vocabulary cannot encode, or "".
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
    """Whether texts are generated and scored: only with a single process."""
    return jax.process_count() == 1


NOT_SCORED = (
    "Texts are not generated and scored with several processes. Run --mode=eval on one process."
)


def check(config: Config, *, tests: bool) -> dict[str, References]:
    """Checks before training or evaluation that the sets can be scored afterwards.

    Args:
      tests: also read the sets of config.decoding.test_sources.

    Returns:
      The test sets by name; {} without `tests`.

    Raises:
      ScoreError: a library is missing.
      DataError: a set does not exist, a reference is empty or unreadable, or, for corpus-level
        scores, pairs have different numbers of references.
    """
    text_scores.check_library(config.recipe, config.decoding.score_words)
    section, alike = config.parallel, config.recipe in text_scores.OF_CORPUS
    found = {}
    for name, spec in config.decoding.tests if tests else ():
        found[name] = read_whole(spec, section)
        check_references(spec, section, alike=alike)
    if section.validation_source and not _is_gone(section):  # prepared pairs do not need the files
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
    """Generates and scores texts for the held-out pairs and the sets of `tests`.

    Args:
      params: unsharded parameters on the host.
      folder: output folder of the texts.
      steps: steps of the checkpoints averaged in `params`.
      tests: further sets by name, see `check`.

    Returns:
      (scored sets, reason if the held-out pairs were not scored). The text files of the held-out
      pairs may be gone while the prepared pairs still exist.
    """
    sets, unwritten = {}, ""
    try:
        sets[HELDOUT] = read_heldout(config, text, config.train.eval_rows)
    except DataError as error:
        unwritten = f"The held-out pairs were not scored: {error}"
        logging.warning("%s", unwritten)
    sets |= tests
    if not sets:
        return [], unwritten
    device = jax.local_devices()[0]
    dtype = environment.compute_dtype(config, device)
    writer = Writer(config, params, tokenizers, dtype)
    how = collect_settings(config, steps, jnp.dtype(dtype).name)
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
        storage.write_text(path, "".join(_line(text) + "\n" for text in texts))
    unread = len(problems), "".join(problems[:1])
    cut = sum(answer.cut for answer in answers)
    lost = target.describe_lost([text for texts in right for text in texts])
    found = Set(name, references, written, scores, unread, cut, how, file, lost)
    for line in list_warnings(found):
        logging.warning("%s", line)
    return found


def describe(sets: Sequence[Set]) -> list[str]:
    """Returns report lines: scores and settings of each set, and examples of the first set."""
    lines = []
    for found in sets:
        numbers = ", ".join(" ".join(number) for number in list_scores(found))
        lines += [
            f"Scores of {len(found.written):,} pairs of {found.name}: {numbers}",
            *(f"  {line}" for line in list_settings(found)),
            *(f"  {line}" for line in list_warnings(found)),
        ]
    for example in choose_examples(sets[0]):
        lines += ["", *(f"  {name:<11}{text}" for name, text in example.items())]
    return [*lines, "", f"Texts: {sets[0].file.parent}"]


def list_settings(found: Set) -> list[str]:
    """Returns the score signature, the decoding settings, and the number of truncated sources."""
    lines = [found.scores.signature, describe_settings(found.decoding)]
    if found.cut:
        lines.append(f"{found.cut} of {len(found.written)} sources truncated to the model's length")
    return lines


def list_scores(found: Set) -> list[tuple[str, str]]:
    """Returns titles and formatted values of the scores."""
    return [
        (text_scores.TITLES[name], f"{value:.1f}") for name, value in found.scores.values.items()
    ]


def choose_examples(found: Set) -> list[dict[str, str]]:
    """Returns evenly spaced pairs of the set as {"source": …, "reference": …, "ours": …}."""
    count = len(found.written)
    examples = []
    for place in [n * count // _EXAMPLES for n in range(min(_EXAMPLES, count))]:
        source, right = found.references.pairs[place][:2]
        texts = {"source": source, "reference": right, "ours": found.written[place]}
        examples.append({name: _short(text) for name, text in texts.items()})
    return examples


def list_warnings(found: Set) -> list[str]:
    """Returns messages about skipped pairs, unread sources and characters lost in references."""
    lines = []
    if bad := found.references.bad[0]:
        lines.append(f"{bad} more pairs skipped; the first: {found.references.bad[1]}.")
    if unread := found.unread[0]:
        lines.append(f"{unread} pairs scored as empty; the first: {found.unread[1]}.")
    if found.lost:
        lines.append(f"References: {found.lost}.")
    return lines


def to_json(sets: Sequence[Set]) -> dict[str, dict[str, Any]]:
    """Returns JSON-compatible scores and settings by set name."""
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
    """Returns the scores by set name."""
    return {found.name: dict(found.scores.values) for found in sets}


def _line(text: str) -> str:
    return " ".join(text.splitlines())


def _short(text: str) -> str:
    text = _line(text)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
