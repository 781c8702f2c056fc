"""Several corpora with one vocabulary, from which a run draws rows by weight (config.data.mixture).

Each source is a corpus in its own subfolder. Their vocabulary is trained in the folder itself, on
text of all sources in proportion to their weights.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.config import Config, SourceSection
from convbert_jax.data import corpus
from convbert_jax.data.corpus import Corpus
from convbert_jax.data.prepared import METADATA, lock
from convbert_jax.data.readers.sources import open_source
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    is_trained,
    load_tokenizer,
    make_tokenizer,
)
from convbert_jax.data.units import Runner


@dataclasses.dataclass(frozen=True)
class MixedCorpus:
    """The prepared sources of config.data.mixture, by name, and their vocabulary."""

    tokenizer: Tokenizer
    sources: dict[str, Corpus]

    @property
    def fingerprint(self) -> str:
        """Hash of names, text and rows of all sources, in order."""
        parts = [f"{name} {source.fingerprint}" for name, source in self.sources.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def prepare(
    config: Config, directory: Path, runner: Runner | None = None, *, compare: bool = False
) -> MixedCorpus:
    """Opens the sources in `directory`, after preparing the missing ones; see `corpus.prepare`."""
    if not config.tokenizer.path:
        with lock(directory):
            if not is_trained(directory):
                _train_tokenizer(config, directory)
    tokenizer = load_tokenizer(config.tokenizer, directory)
    sources = {}
    for section in config.data.mixture:
        own, folder = _config_of(config, section, tokenizer), directory / section.name
        sources[section.name] = corpus.prepare(own, folder, runner, compare=compare)
    return MixedCorpus(tokenizer, sources)


def open_prepared(config: Config, directory: Path) -> MixedCorpus | None:
    """Opens the sources in `directory`; None if one is incomplete. See `corpus.open_prepared`."""
    if not config.tokenizer.path and not is_trained(directory):
        return None
    tokenizer = load_tokenizer(config.tokenizer, directory)
    sources = {}
    for section in config.data.mixture:
        own = _config_of(config, section, tokenizer)
        if (found := corpus.open_prepared(own, directory / section.name)) is None:
            return None
        sources[section.name] = found
    return MixedCorpus(tokenizer, sources)


def read_metadata(directory: Path) -> dict[str, Any] | None:
    """Reads what `corpus.read_metadata` gives for a single corpus; None without any source."""
    found = [corpus.read_metadata(path.parent) for path in sorted(directory.glob(f"*/{METADATA}"))]
    complete = all(metadata and metadata["complete"] for metadata in found)
    return {**found[0], "complete": complete} if found and found[0] else None


def rates(config: Config, directory: Path) -> dict[str, Fraction]:
    """Returns the average words of a training step; {} if a source is not prepared."""
    parts = [(s.weight, corpus.rates(config, directory / s.name)) for s in config.data.mixture]
    if not all("words" in rates_of_source for _, rates_of_source in parts):
        return {}
    return {"words": sum(Fraction(weight) * found["words"] for weight, found in parts)}


def _config_of(config: Config, section: SourceSection, tokenizer: Tokenizer) -> Config:
    """Returns the config of the corpus of one source."""
    data = dataclasses.replace(
        config.data,
        source=section.source,
        validation_source=section.validation_source,
        mixture=(),
    )
    made = dataclasses.replace(tokenizer.section, path=str(tokenizer.path))
    return dataclasses.replace(config, data=data, tokenizer=made)


def _train_tokenizer(config: Config, directory: Path) -> None:
    shares = [
        (open_source(config.data, section.source), section.weight)
        for section in config.data.mixture
        if section.weight
    ]

    def sample(size: int) -> Iterator[str]:
        for source, share in shares:
            yield from corpus.sample(source, int(size * share))

    logging.info("Training the vocabulary on text of all sources, in proportion to their weights.")
    make_tokenizer(
        config.tokenizer,
        directory,
        list(sample(corpus.CHECKED_BYTES)),
        sample,
        is_generative=config.spec.generates,
    )
