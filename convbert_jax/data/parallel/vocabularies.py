"""Vocabularies of parallel text: one shared, or one for each side."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from convbert_jax.config import Config, TokenizerSection
from convbert_jax.data.corpus.metadata import describe_tokenizer
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel.pair_source import PairSource
from convbert_jax.data.tables.table_formats import Fault
from convbert_jax.data.tokenizer.normalization import choose_normalization
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    settle_normalization,
    train_tokenizer,
)

CHECKED_BYTES = 2_000_000  # of text for checking a vocabulary
SIDES = ("source", "target")


class Vocabularies(NamedTuple):
    """Tokenizers of both sides; the same object twice if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer


def list_sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """Returns (folder name, settings) of each vocabulary; the name is "" if it is shared."""
    section, pairs = config.tokenizer, config.parallel
    if not section.path:
        section = choose_normalization(section, is_generative=True)
    if config.sequence.shared_vocabulary:
        return [("", section)]
    own = dataclasses.replace(
        section,
        vocab_size=pairs.target_vocab_size or section.vocab_size,
        path=pairs.target_vocabulary,
    )
    return [("source", section), ("target", own)]


def describe(config: Config) -> list[dict[str, Any]]:
    """Returns the settings that determine the vocabularies."""
    return [describe_tokenizer(section) for _, section in list_sections(config)]


def load(config: Config, directory: Path) -> Vocabularies:
    """Loads the configured vocabularies, or those trained into `directory`.

    Raises:
      TokenizerError: as in `load_tokenizer`.
    """
    found = [load_tokenizer(section, directory / name) for name, section in list_sections(config)]
    return Vocabularies(found[0], found[-1])


def make(config: Config, directory: Path, source: PairSource) -> Vocabularies:
    """Loads or trains the vocabularies and checks each on a sample of its texts.

    Raises:
      TokenizerError: a vocabulary cannot be trained, or fails the check.
      DataError: the source has no text.
    """
    made = []
    for name, section in list_sections(config):
        sides = (0, 1) if not name else (SIDES.index(name),)
        checked = list(_sample(source, CHECKED_BYTES, sides))
        if not checked:
            raise DataError(
                f"config.parallel.source='{config.parallel.source}' has no text for a "
                f"vocabulary{_first_fault(source)}. Check it and config.parallel.columns.",
                field="config.parallel.source",
                value=config.parallel.source,
            )
        if section.path:
            tokenizer = load_tokenizer(section, directory)
        else:
            section = settle_normalization(section, checked, is_generative=True)
            what = f"the {name} texts" if name else "both texts"
            logging.info(
                "Training a %s vocabulary of %d entries on %s.",
                section.kind,
                section.vocab_size,
                what,
            )
            texts = _sample(source, section.train_megabytes * 1_000_000, sides)
            tokenizer = train_tokenizer(texts, section, directory / name)
        check_tokenizer(tokenizer, checked)
        made.append(tokenizer)
    if lost := made[-1].describe_lost(list(_sample(source, CHECKED_BYTES, (1,)))):
        logging.warning("Targets of config.parallel.source: %s.", lost)
    return Vocabularies(made[0], made[-1])


def _first_fault(source: PairSource) -> str:
    """Describes the first unreadable pair, for an error; "" if all pairs are readable."""
    for unit in source.units:
        for number, pair in source.pairs(unit):
            if isinstance(pair, Fault):
                return f" ({source.place(number, pair.file)} {pair.problem})"
    return ""


def _sample(source: PairSource, size: int, sides: tuple[int, ...]) -> Iterator[str]:
    """Yields about `size` bytes of text, an equal part from the beginning of every unit."""
    share = max(1, size // len(source.units))
    for unit in source.units:
        left = share
        for text in itertools.chain.from_iterable(
            (pair[side] for side in sides)
            for _, pair in source.pairs(unit)
            if not isinstance(pair, Fault)
        ):
            if left <= 0:
                break
            if text.strip():
                yield text
                left -= len(text.encode())
