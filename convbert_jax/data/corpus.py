"""Corpora as rows of token ids on disk: prepared in parallel, resumable, checked when opened.

`prepared.Preparation` describes the files of a folder and the steps that corpora share with pairs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax import console
from convbert_jax.config import Config, DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.layouts import Job, heldout_hash, process_unit
from convbert_jax.data.prepared import SPLITS, Preparation, Split, elsewhere
from convbert_jax.data.readers.sources import REMOTE, Source, open_source
from convbert_jax.data.readers.text_files import cut_document
from convbert_jax.data.shards import row_dtype
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    describe_tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from convbert_jax.data.units import Runner, Work

# Version of the rows of each layout; increment it when the same config produces different rows.
VERSIONS = {"packed": 1, "electra": 1, "pairs": 2}
METADATA_FIELDS = {
    "made_from": {
        "version": int,
        "layout": str,
        "length": int,
        "tokenizer": dict,
        "heldout_fraction": (int, float),
        "source": str,
        "validation_source": str,
        "fingerprints": dict,
    },
    "tokenizer": str,
    "heldout": {"fraction": (int, float), "pieces": int},
}
RECORD_FIELDS = {"encoding_errors": str}
SUMMARY_FIELDS = {"undecodable": int, "encoding_errors": str}
CHECKED_BYTES = 2_000_000  # of text for checking a vocabulary
HELDOUT_PIECES = 20  # maximum for a single document
PIECE_CHARACTERS = 200  # minimum, unless the document then had fewer than two pieces


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus, the input of `batching`.

    `fingerprint` is a hash of source, tokenizer, layout, length and splits.
    """

    directory: Path
    tokenizer: Tokenizer
    length: int
    layout: str
    fingerprint: str
    splits: dict[str, Split]  # "train", "validation"

    @property
    def row_dtype(self) -> np.dtype:
        return row_dtype(self.length, self.tokenizer.vocab_size, self.layout)


def prepare(
    config: Config, directory: Path, runner: Runner | None = None, *, compare: bool = False
) -> Corpus:
    """Opens the corpus of `config` in `directory`, after preparing its missing parts.

    Trains or loads the tokenizer and checks it on a sample; then `runner` (default:
    `config.data.workers` processes) writes the shards. Can be killed and restarted. Waits for
    another process that prepares the same directory.

    Args:
      compare: read the sources of finished units again even if no file seems to have changed.

    Raises:
      DataError: the source has no text or unreadable text, the vocabulary is unusable, the disk is
        full, or the directory contains a different corpus (which is left unchanged).
    """
    return _CorpusPreparation(config).prepare(directory, runner, compare=compare)


def open_prepared(config: Config, directory: Path) -> Corpus | None:
    """Opens the corpus in `directory`; None if it is incomplete. The source may be missing.

    Raises:
      DataError: the directory contains a different corpus, or a damaged one.
    """
    return _CorpusPreparation(config).open(directory)


def read_metadata(directory: Path) -> dict[str, Any] | None:
    """Reads the metadata of a folder, see `Preparation.read_metadata`."""
    return _CorpusPreparation.read_metadata(directory)


def rates(config: Config, directory: Path) -> dict[str, Fraction]:
    """Returns the words and epochs of a training step; {} if the corpus is not prepared."""
    metadata = read_metadata(directory)
    if not metadata or not metadata["complete"]:
        return {}
    shards = metadata["splits"]["train"]
    epochs = Fraction(config.train.batch_size, sum(shard["rows"] for shard in shards))
    return {"epochs": epochs, "words": epochs * sum(shard["words"] for shard in shards)}


class _CorpusPreparation(Preparation):
    section = "data"
    contents, new_contents = "a different corpus", "a new corpus"
    reads = "documents"
    settings_key = fingerprint_key = "tokenizer"
    tallies = ("bytes", "dropped", "characters", "unknown", "undecodable", "skipped")
    metadata_fields, summary_fields = METADATA_FIELDS, SUMMARY_FIELDS
    record_fields = RECORD_FIELDS
    shard_fields = ("tokens", "documents")

    def open_sources(self) -> dict[str, Source]:
        data = self.config.data
        sources = {"train": open_source(data, data.source)}
        if data.validation_source:
            sources["validation"] = open_source(data, data.validation_source)
        return sources

    def may_open_sources(self) -> bool:
        data = self.config.data
        return not any(spec.startswith(REMOTE) for spec in (data.source, data.validation_source))

    def origin(self, sources: Mapping[str, Source] | None) -> dict[str, Any]:
        config, data = self.config, self.config.data
        layout = data.layout + (" with the release's bug" if data.release_builder_bug else "")
        layout += f" ({config.objective.sentence_pairs})" if data.layout == "pairs" else ""
        layout += " of shuffled documents" if data.shuffle_documents else ""
        result = {
            "version": VERSIONS[data.layout],
            "layout": layout,
            "length": data.length,
            "tokenizer": describe_tokenizer(config.tokenizer),
            "heldout_fraction": 0 if data.validation_source else data.heldout_fraction,
            "source": data.source,
            "validation_source": data.validation_source,
        }
        if sources:
            result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
        return result

    def load_tokenizers(self, directory: Path) -> tuple[Tokenizer]:
        return (load_tokenizer(self.config.tokenizer, directory),)

    def begin(
        self, directory: Path, source: Source, made_from: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[Tokenizer]]:
        tokenizer = _make_tokenizer(self.config, directory, source)
        made_from["tokenizer"] = describe_tokenizer(tokenizer.section)
        heldout = choose_heldout(self.config.data, source)
        return {"tokenizer": tokenizer.fingerprint, "heldout": heldout}, (tokenizer,)

    def make_work(self, directory: Path, metadata: dict, sources: dict, tokenizers: tuple) -> Work:
        data = self.config.data
        job = Job(
            directory=directory,
            tokenizer=tokenizers[0],
            data=data,
            sentence_pairs=self.config.objective.sentence_pairs,
            heldout_fraction=metadata["heldout"]["fraction"],
            pieces=metadata["heldout"]["pieces"],
        )
        return Work(job, sources, process_unit)

    def is_usable(self, record: Mapping[str, Any]) -> bool:
        # A unit without undecodable text does not depend on the policy.
        policy = self.config.data.encoding_errors
        return not record["undecodable"] or record["encoding_errors"] == policy

    def summarize(self, records: list[dict]) -> dict[str, Any]:
        policies = [record["encoding_errors"] for record in records if record["undecodable"]]
        policy = policies[0] if policies else "error"
        return {**super().summarize(records), "encoding_errors": policy}

    def check_counts(self, metadata: Mapping[str, Any]) -> None:
        data, splits = self.config.data, metadata["splits"]
        if not splits["train"]:
            held_out = " except the held-out text" if splits["validation"] else ""
            raise DataError(
                f"has no text to train on{held_out}. Check the source, its format and "
                "config.data.heldout_fraction.",
                field="config.data.source",
                value=data.source,
            )
        if not splits["validation"] and data.validation_source:
            raise DataError(
                "has no text. Check it.",
                field="config.data.validation_source",
                value=data.validation_source,
            )
        if not splits["validation"]:
            raise DataError(
                "holds out no document with a token. Increase it and use a new "
                "config.data.directory, or set config.data.validation_source.",
                field="config.data.heldout_fraction",
                value=data.heldout_fraction,
            )
        for name, shards in splits.items():
            if data.layout == "pairs" and not sum(shard.get("pairs", 0) for shard in shards):
                raise DataError(
                    f"found no sentence pair in the {name} text. It needs documents with several "
                    "sentences; config.objective.sentence_pairs=next also needs several documents. "
                    "Check config.data.format, increase config.data.length, or hold out more text.",
                    field="config.data.layout",
                    value="pairs",
                )

    def log_summary(self, metadata: Mapping[str, Any], directory: Path, seconds: float) -> None:
        config = self.config

        def total(name: str, *splits: str) -> int:
            found = (shard.get(name, 0) for split in splits for shard in metadata["splits"][split])
            return sum(found)

        size, tokens, rows = config.data.length, total("tokens", "train"), total("rows", "train")
        unknown_rate = metadata["unknown"] / max(1, metadata["characters"])
        logging.info(
            "Prepared %s: %d documents, %d tokens in %d rows of %d (%.1f%% filled), %d rows held "
            "out, %.3f%% of characters unknown, %d empty documents dropped, %.1f MB of text in "
            "%.0f s (%.1f MB/s).",
            directory,
            total("documents", *SPLITS),
            tokens,
            rows,
            size,
            100 * tokens / (rows * size),
            total("rows", "validation"),
            100 * unknown_rate,
            metadata["dropped"],
            metadata["bytes"] / 1e6,
            seconds,
            metadata["bytes"] / 1e6 / max(0.001, seconds),
        )
        if config.data.layout == "pairs":
            logging.info(
                "%d training rows and %d held-out rows have a labeled sentence pair.",
                total("pairs", "train"),
                total("pairs", "validation"),
            )
        if metadata["undecodable"]:
            logging.warning(
                "The text has %d places that are not UTF-8; skipped %d documents because of them.",
                metadata["undecodable"],
                metadata["skipped"],
            )
        if unknown_rate > config.tokenizer.max_unknown_rate:
            logging.warning(
                "%.2f%% of all characters are unknown, more than in the sample used to check the "
                "vocabulary.",
                100 * unknown_rate,
            )

    def check_policy(self, metadata: Mapping[str, Any], directory: Path) -> None:
        policy = metadata["encoding_errors"]
        if metadata["undecodable"] and policy != self.config.data.encoding_errors:
            raise DataError(
                f"{directory} was prepared with encoding_errors='{policy}', which affected "
                f"{metadata['undecodable']} places. Restore this setting, or prepare a new corpus "
                f"with {elsewhere(directory)}.",
                path=directory,
            )

    @staticmethod
    def identity(metadata: Mapping[str, Any]) -> list[Any]:
        made_from = metadata["made_from"]
        return [
            metadata["tokenizer"],
            made_from["fingerprints"],
            metadata["digests"],
            [made_from[key] for key in ("version", "layout", "length", "heldout_fraction")],
            metadata["encoding_errors"] if metadata["undecodable"] else "",
        ]

    def result(self, directory: Path, tokenizers: tuple, fingerprint: str, splits: dict) -> Corpus:
        data = self.config.data
        return Corpus(directory, tokenizers[0], data.length, data.layout, fingerprint, splits)


def sample(source: Source, size: int) -> Iterator[str]:
    """Yields about `size` bytes of text, an equal part from the beginning of every unit."""
    whole = sum(unit.size for unit in source.units) <= size
    share = max(1, size // len(source.units))
    for unit in source.units:
        left = share
        for text in source.documents(unit):
            yield text if whole else text[:left]
            left -= len(text)
            if left <= 0 and not whole:
                break


def _make_tokenizer(config: Config, directory: Path, source: Source) -> Tokenizer:
    """Loads or trains the tokenizer and checks it on a sample of `source`."""
    texts = []
    total = min(CHECKED_BYTES, sum(unit.size for unit in source.units))
    with console.show_progress(total, "Reading text to check the vocabulary on") as advance:
        for text in sample(source, CHECKED_BYTES):
            texts.append(text)
            advance(len(text))
    if not texts:
        raise DataError(
            "has no text. Check it and config.data.format.",
            field="config.data.source",
            value=config.data.source,
        )
    return make_tokenizer(
        config.tokenizer,
        directory,
        texts,
        functools.partial(sample, source),
        is_generative=config.spec.generates,
    )


def choose_heldout(data: DataSection, source: Source) -> dict[str, Any]:
    """Returns the hash threshold below which documents are held out, and the pieces per document.

    A fraction that holds out no document is increased to hold out one. A single document is split
    into pieces, one of which is held out.
    """
    if data.validation_source:
        return {"fraction": 0.0, "pieces": 1}
    least, count, document = 1.0, 0, ""
    for unit in source.units:
        for document in source.documents(unit):
            count += 1
            least = min(least, heldout_hash(document))
            if least < data.heldout_fraction:
                return {"fraction": data.heldout_fraction, "pieces": 1}
    if count > 1:
        logging.info(
            "config.data.heldout_fraction=%g holds out none of %d documents; holding out one. "
            "Set config.data.validation_source to other text to train on all of them.",
            data.heldout_fraction,
            count,
        )
        return {"fraction": math.nextafter(least, 1), "pieces": 1}
    pieces = min(HELDOUT_PIECES, max(2, len(document) // PIECE_CHARACTERS))
    parts = cut_document(document, pieces)
    logging.info(
        "config.data.source='%s' is a single document; holding out 1 of its %d pieces. Set "
        "config.data.validation_source to other text to train on all of it. "
        "config.data.format=lines makes each line a document.",
        data.source,
        len(parts),
    )
    return {"fraction": math.nextafter(min(map(heldout_hash, parts)), 1), "pieces": pieces}
