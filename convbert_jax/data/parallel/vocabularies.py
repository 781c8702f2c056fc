"""Vocabularies of pairs: one of both texts, or one each."""

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

CHECKED_BYTES = 2_000_000  # of text, to check a vocabulary on
SIDES = ("source", "target")


class Vocabularies(NamedTuple):
    """One object twice where the texts share a vocabulary."""

    source: Tokenizer
    target: Tokenizer


def list_sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """(name of a folder, settings) of each vocabulary; "" where there is one."""
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
    """What decides the vocabularies."""
    return [describe_tokenizer(section) for _, section in list_sections(config)]


def load(config: Config, directory: Path) -> Vocabularies:
    """Those named or trained into `directory`; TokenizerError as `load_tokenizer` has it."""
    found = [load_tokenizer(section, directory / name) for name, section in list_sections(config)]
    return Vocabularies(found[0], found[-1])


def make(config: Config, directory: Path, source: PairSource) -> Vocabularies:
    """Loads or trains the vocabularies, and checks each on a sample of its texts.

    Raises:
      TokenizerError: no vocabulary can be made or trusted.
      DataError: there is no text.
    """
    made = []
    for name, section in list_sections(config):
        sides = (0, 1) if not name else (SIDES.index(name),)
        checked = list(_sample(source, CHECKED_BYTES, sides))
        if not checked:
            raise DataError(
                f"config.parallel.source='{config.parallel.source}' has no text to make a "
                f"vocabulary of{_first_fault(source)}; check it and config.parallel.columns.",
                field="config.parallel.source",
                value=config.parallel.source,
            )
        if section.path:
            tokenizer = load_tokenizer(section, directory)
        else:
            section = settle_normalization(section, checked, is_generative=True)
            what = f"the {name}" if name else "both texts"
            logging.info(
                "Training a %s vocabulary of %d, of %s.", section.kind, section.vocab_size, what
            )
            texts = _sample(source, section.train_megabytes * 1_000_000, sides)
            tokenizer = train_tokenizer(texts, section, directory / name)
        check_tokenizer(tokenizer, checked)
        made.append(tokenizer)
    if lost := made[-1].describe_lost(list(_sample(source, CHECKED_BYTES, (1,)))):
        logging.warning("Targets of config.parallel.source: %s.", lost)
    return Vocabularies(made[0], made[-1])


def _first_fault(source: PairSource) -> str:
    """Where and what it is, for an error; "" if there is none."""
    for unit in source.units:
        for number, pair in source.pairs(unit):
            if isinstance(pair, Fault):
                return f" ({source.place(number, pair.file)} {pair.problem})"
    return ""


def _sample(source: PairSource, size: int, sides: tuple[int, ...]) -> Iterator[str]:
    """Some `size` bytes of text, from the beginning of every unit in equal parts."""
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
