"""The work behind `corpus.prepare`: sample, tokenizer, the units that are not there yet."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax import files, progress
from convbert_jax.config import Config, DataSection
from convbert_jax.data.corpus.shards import shard_path
from convbert_jax.data.corpus.unit_worker import Job, heldout_hash, process_unit
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import read_record
from convbert_jax.data.sources.source import Source
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    settle_normalization,
    train_tokenizer,
)
from convbert_jax.data.units.work import Runner, Work, do_units, record_path

CHECKED_BYTES = 2_000_000  # of text, to check a vocabulary on
COUNTS = {"rows": int, "file_bytes": int}
RECORD_FIELDS = {
    "unit": int,
    "digest": str,
    "splits": {"train": COUNTS, "validation": COUNTS},
    **dict.fromkeys(("bytes", "dropped", "characters", "unknown", "undecodable", "skipped"), int),
    "encoding_errors": str,
}


def sample(source: Source, size: int) -> Iterator[str]:
    """Some `size` bytes of text, taken from the beginning of every unit in equal parts."""
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
    """Loads or trains the tokenizer, and checks it on a sample of `source`."""
    section, data = config.tokenizer, config.data
    texts = []
    total = min(CHECKED_BYTES, sum(unit.size for unit in source.units))
    with progress.show_progress(total, "Reading text to check the vocabulary on") as advance:
        for text in sample(source, CHECKED_BYTES):
            texts.append(text)
            advance(len(text))
    if not texts:
        raise DataError(
            f"config.data.source='{data.source}' has no text; check it and config.data.format."
        )
    if not data.validation_source and sum(unit.size for unit in source.units) <= CHECKED_BYTES:
        if len(texts) == 1:
            raise DataError(_one_document(data, source, texts[0]))
        hashes = [heldout_hash(text) for text in texts]
        if min(hashes) >= data.heldout_fraction:
            raise DataError(nothing_held_out(data, hashes))
    if section.path:
        tokenizer = load_tokenizer(section, directory)
    else:
        section = settle_normalization(section, texts, is_generative=config.writes_text)
        started = time.monotonic()
        logging.info("Training a %s vocabulary of %d.", section.kind, section.vocab_size)
        tokenizer = train_tokenizer(
            sample(source, section.train_megabytes * 1_000_000), section, directory
        )
        logging.info("Trained %s in %.0f s.", tokenizer.path, time.monotonic() - started)
    check_tokenizer(tokenizer, texts)
    return tokenizer


def _one_document(data: DataSection, source: Source, text: str) -> str:
    """What to say of a corpus from which no document can be held out."""
    read_as = getattr(source, "format", "")  # text files have one
    parts = {
        "blank_lines": len(re.split(r"\n\s*\n", text)),
        "lines": sum(bool(line.strip()) for line in text.split("\n")),
    }
    better = [
        f"config.data.format={name} ({count} documents)"
        for name, count in parts.items()
        if read_as in ("blank_lines", "file") and count > 1 and name != read_as
    ]
    advice = f"set {' or '.join(better)}, " if better else "add more text "
    return (
        f"config.data.source='{data.source}' is a single document"
        + (f" (config.data.format={data.format}, read as '{read_as}')" if read_as else "")
        + f", so none can be held out to evaluate on; {advice}or name another text in "
        "config.data.validation_source."
    )


def nothing_held_out(data: DataSection, hashes: Sequence[float] = ()) -> str:
    """What to say when no document fell into the held-out part."""
    advice = "raise it and name another config.data.directory,"
    if hashes and min(hashes) < 0.5:
        advice = f"set --config.data.heldout_fraction={min(hashes) + 0.005:.2f}"
    return (
        f"config.data.heldout_fraction={data.heldout_fraction} holds out no document; "
        f"{advice} or name config.data.validation_source."
    )


def process_units(
    config: Config,
    directory: Path,
    tokenizer: Tokenizer,
    sources: dict[str, Source],
    runner: Runner,
    check: Callable[[Mapping[int, dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Records of all units; `runner` does the missing ones and `check` is as in `do_units`.

    Raises:
      DataError: the first that a unit raised; finished units are kept.
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
        heldout_fraction=data.heldout_fraction,
        encoding_errors=data.encoding_errors,
    )
    work = Work(job, sources, process_unit)
    return do_units(work, lambda i: _finished(directory, i, data.encoding_errors), runner, check)


def _finished(directory: Path, index: int, encoding_errors: str) -> dict[str, Any] | None:
    path = record_path(directory, index)
    remedy = "delete it and start again: that part is prepared anew"
    try:
        record = read_record(path, remedy=remedy, fields=RECORD_FIELDS)
    except FileNotFoundError:
        return None
    counts = [count for split in record["splits"].values() for count in split.values()]
    if record["unit"] != index or not all(isinstance(count, int) for count in counts):
        raise files.damaged(path, "it is of another unit or has other counts", remedy)
    for split, counts in record["splits"].items():
        if counts["rows"] and not shard_path(directory, split, index).is_file():
            logging.warning("A shard of unit %d is missing; it is prepared anew.", index)
            return None
    # A unit without undecodable text is the same under every policy.
    if record["undecodable"] and record["encoding_errors"] != encoding_errors:
        return None
    return record
