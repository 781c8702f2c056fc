"""Steps of `corpus.prepare`: sample text, train the tokenizer, process the missing units."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax import files, progress
from convbert_jax.config import Config, DataSection
from convbert_jax.data.corpus.shards import shard_path
from convbert_jax.data.corpus.unit_worker import Job, heldout_hash, process_unit
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import read_record
from convbert_jax.data.sources.documents import cut_document
from convbert_jax.data.sources.source import Source
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    settle_normalization,
    train_tokenizer,
)
from convbert_jax.data.units.work import Runner, Work, do_units, record_path

CHECKED_BYTES = 2_000_000  # of text for checking a vocabulary
HELDOUT_PIECES = 20  # maximum for a single document
PIECE_CHARACTERS = 200  # minimum, unless the document then had fewer than two pieces
COUNTS = {"rows": int, "file_bytes": int}
RECORD_FIELDS = {
    "unit": int,
    "digest": str,
    "splits": {"train": COUNTS, "validation": COUNTS},
    **dict.fromkeys(("bytes", "dropped", "characters", "unknown", "undecodable", "skipped"), int),
    "encoding_errors": str,
}


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


def prepare_tokenizer(config: Config, directory: Path, source: Source) -> Tokenizer:
    """Loads or trains the tokenizer and checks it on a sample of `source`."""
    section, data = config.tokenizer, config.data
    texts = []
    total = min(CHECKED_BYTES, sum(unit.size for unit in source.units))
    with progress.show_progress(total, "Reading text to check the vocabulary on") as advance:
        for text in sample(source, CHECKED_BYTES):
            texts.append(text)
            advance(len(text))
    if not texts:
        raise DataError(
            f"config.data.source='{data.source}' has no text. Check it and config.data.format.",
            field="config.data.source",
            value=data.source,
        )
    if section.path:
        tokenizer = load_tokenizer(section, directory)
    else:
        section = settle_normalization(section, texts, is_generative=config.writes_text)
        started = time.monotonic()
        logging.info("Training a %s vocabulary of %d entries.", section.kind, section.vocab_size)
        tokenizer = train_tokenizer(
            sample(source, section.train_megabytes * 1_000_000), section, directory
        )
        logging.info("Trained %s in %.0f s.", tokenizer.path, time.monotonic() - started)
    check_tokenizer(tokenizer, texts)
    return tokenizer


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


def process_units(
    config: Config,
    directory: Path,
    tokenizer: Tokenizer,
    heldout: Mapping[str, Any],
    sources: dict[str, Source],
    runner: Runner,
    check: Callable[[Mapping[int, dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Processes the missing units with `runner` and returns the records of all units.

    Args:
      heldout: result of `choose_heldout`.
      check: as in `do_units`.

    Raises:
      DataError: the first error of a unit; finished units are kept.
    """
    data = config.data
    job = Job(
        directory=directory,
        tokenizer=tokenizer,
        length=data.length,
        layout=data.layout,
        sentence_pairs=config.objective.sentence_pairs,
        release_bug=data.release_builder_bug,
        shuffle_documents=data.shuffle_documents,
        heldout_fraction=heldout["fraction"],
        pieces=heldout["pieces"],
        encoding_errors=data.encoding_errors,
    )
    work = Work(job, sources, process_unit)
    return do_units(work, lambda i: _finished(directory, i, data.encoding_errors), runner, check)


def _finished(directory: Path, index: int, encoding_errors: str) -> dict[str, Any] | None:
    path = record_path(directory, index)
    remedy = "delete it and start again to prepare this part again"
    try:
        record = read_record(path, remedy=remedy, fields=RECORD_FIELDS)
    except FileNotFoundError:
        return None
    counts = [count for split in record["splits"].values() for count in split.values()]
    if record["unit"] != index or not all(isinstance(count, int) for count in counts):
        raise files.damaged(path, "its unit number or its counts are wrong", remedy)
    for split, counts in record["splits"].items():
        if counts["rows"] and not shard_path(directory, split, index).is_file():
            logging.warning("A shard of unit %d is missing; preparing it again.", index)
            return None
    # A unit without undecodable text does not depend on the policy.
    if record["undecodable"] and record["encoding_errors"] != encoding_errors:
        return None
    return record
