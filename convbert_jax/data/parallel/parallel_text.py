"""Parallel text as rows on disk: prepared in parallel, resumable, checked when opened.

A directory has the files and guarantees of a corpus (`corpus/corpus.py`), and a file of pair
lengths for each shard. Separate vocabularies are in the folders "source" and "target".
"""

import dataclasses
import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.data.corpus.metadata import (
    METADATA,
    has_finished_units,
    refuse_units_of_unknown,
)
from convbert_jax.data.corpus.shards import damaged_shard, shard_path
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import vocabularies
from convbert_jax.data.parallel.metadata import (
    origin,
    read_metadata,
    refuse_changed,
    refuse_other,
    summary,
)
from convbert_jax.data.parallel.pair_source import PairSource, open_pairs
from convbert_jax.data.parallel.pair_worker import Job, lengths_path, process_pairs
from convbert_jax.data.parallel.records import id_dtype
from convbert_jax.data.parallel.vocabularies import Vocabularies
from convbert_jax.data.records import read_record, write_record
from convbert_jax.data.sources.source import refuse_shared_text
from convbert_jax.data.units.changes import check_content, elsewhere, list_changed, take_stamps
from convbert_jax.data.units.lock import lock
from convbert_jax.data.units.processes import Processes
from convbert_jax.data.units.work import Runner, Work, do_units, record_path

COUNTS = {"rows": int, "file_bytes": int}
RECORD_FIELDS = {
    "unit": int,
    "digest": str,
    "splits": {"train": COUNTS, "validation": COUNTS},
    **dict.fromkeys(("bytes", "characters", "unknown", "pairs"), int),
    "faults": dict,
}


@dataclasses.dataclass(frozen=True)
class PairSplit:
    """A split; `lengths` are the planned tokens of source and target, [rows, 2] with end marks."""

    shards: tuple[tuple[Path, int], ...]  # (file, rows), in order
    checksums: tuple[int, ...]
    lengths: np.ndarray
    tokens: tuple[int, int]  # of all sources and all targets

    @property
    def rows(self) -> int:
        return len(self.lengths)


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """Prepared pairs, the input of `batching`.

    `fingerprint` is a hash of sources, vocabularies, filters and splits. `cut_to` is the number of
    tokens that sources were truncated to; 0 if they were not.
    """

    directory: Path
    vocabularies: Vocabularies
    sampling: float
    cut_to: int
    fingerprint: str
    splits: dict[str, PairSplit]  # "train", "validation"

    @property
    def id_dtype(self) -> np.dtype:
        return id_dtype(*(tokenizer.vocab_size for tokenizer in self.vocabularies))


def prepare(
    config: Config, directory: Path, runner: Runner | None = None, *, compare: bool = False
) -> ParallelText:
    """Opens the parallel text of `config` in `directory`, after preparing its missing parts.

    Trains or loads the vocabularies and checks them on a sample; then `runner` (default:
    `config.data.workers` processes) writes the shards. Can be killed and restarted. Waits for
    another process that prepares the same directory.

    Args:
      compare: read the sources of finished units again even if no file seems to have changed.

    Raises:
      DataError: there are no pairs, unequal line counts, bad pairs with bad_pairs="error", an
        unusable vocabulary, a full disk, or different data in the directory (left unchanged).
    """
    directory = Path(directory)
    if opened := open_prepared(config, directory, compare=compare):
        return opened
    with lock(directory):
        if opened := open_prepared(config, directory):  # finished while waiting
            return opened
        started = time.monotonic()
        sources = open_sources(config)
        if "validation" in sources:
            refuse_shared_text(sources["train"], sources["validation"], section="parallel")
        for source in sources.values():
            _ = source.units  # counts lines, to reject unequal files before anything is written
        made_from = origin(config, sources)
        metadata = read_metadata(directory)
        if metadata is None:
            refuse_units_of_unknown(directory)
        if metadata and has_finished_units(directory):
            changed = list_changed(directory, sources, metadata["stamps"])
            refuse_other(made_from, metadata["made_from"], directory, changed)
            made = vocabularies.load(config, directory)
            refuse_changed(made, metadata["tokenizers"], directory)
        else:
            made = vocabularies.make(config, directory, sources["train"])
            metadata = {
                "complete": False,
                "made_from": made_from,
                "tokenizers": [tokenizer.fingerprint for tokenizer in made],
                "stamps": take_stamps(sources),
            }
            write_record(directory / METADATA, metadata)
        records = do_units(
            Work(make_job(config, directory, made), sources, process_pairs),
            lambda i: _finished(directory, i, config.parallel.bad_pairs),
            runner or Processes(config.data.workers),
            lambda done: check_content(
                directory, sources, metadata["stamps"], done, config.data.workers, always=compare
            ),
        )
        metadata |= summary(records)
        _log_summary(metadata, directory, time.monotonic() - started)
        _check_splits(metadata, config)
        write_record(directory / METADATA, metadata | {"complete": True})
    return open_prepared(config, directory, sources=sources)


def open_sources(config: Config) -> dict[str, PairSource]:
    """Opens the sources of `config.parallel`, by split, without reading them completely.

    Raises:
      DataError: no source is set, or it does not exist.
    """
    section = config.parallel
    if not section.source:
        raise DataError(
            "config.parallel.source is empty. Set it, for example to parallel:train.de,train.en, "
            "csv:FILE, jsonl:FILE or parquet:FILE.",
            field="config.parallel.source",
        )
    sources = {"train": open_pairs(section.source, section)}
    if section.validation_source:
        sources["validation"] = open_pairs(section.validation_source, section, "first")
    return sources


def make_job(config: Config, directory: Path, made: Vocabularies) -> Job:
    """Returns the settings that select pairs and assign them to splits."""
    section = config.parallel
    return Job(
        directory=directory,
        vocabularies=made,
        max_length=section.max_length,
        cut_sources=section.cut_sources,
        max_ratio=section.max_ratio,
        bad_pairs=section.bad_pairs,
        sampling=section.sampling,
        heldout_fraction=section.heldout_fraction,
    )


def _finished(directory: Path, index: int, bad_pairs: str) -> dict[str, Any] | None:
    remedy = "delete it and start again to prepare this part again"
    path = record_path(directory, index)
    try:
        record = read_record(path, remedy=remedy, fields=RECORD_FIELDS)
    except FileNotFoundError:
        return None
    if record["unit"] != index:
        raise files.damaged(path, "its unit number is wrong", remedy)
    for split, counts in record["splits"].items():
        made = (shard_path, lengths_path) if counts["rows"] else ()
        if not all(of(directory, split, index).is_file() for of in made):
            logging.warning("A shard of unit %d is missing; preparing it again.", index)
            return None
    # Processing a unit with faults again raises the error for the first one.
    return None if record["faults"] and bad_pairs == "error" else record


# --- Existing directories ---


def open_prepared(
    config: Config,
    directory: Path,
    *,
    compare: bool = False,
    sources: dict[str, PairSource] | None = None,
) -> ParallelText | None:
    """Opens the pairs in `directory`; None if they are incomplete. Their files may be missing.

    Args:
      compare: as in `prepare`.
      sources: sources by split, if already open.

    Raises:
      DataError: the directory contains different pairs, or damaged ones.
    """
    metadata = read_metadata(directory)
    if not metadata or not metadata["complete"]:
        return None
    gone = None
    try:
        sources = sources or open_sources(config)
    except DataError as error:
        gone = error
    made_from = metadata["made_from"]
    changed = list_changed(directory, sources, metadata["stamps"])
    refuse_other(origin(config, sources), made_from, directory, changed)
    if gone:
        logging.warning("%s Using the pairs prepared from it in %s.", gone, directory)
    else:
        units = {index: {"digest": digest} for index, digest in enumerate(metadata["digests"])}
        workers = config.data.workers
        check_content(directory, sources, metadata["stamps"], units, workers, always=compare)
    if metadata["faults"] and config.parallel.bad_pairs == "error":
        first = next(iter(metadata["faults"].values()))[1]
        raise DataError(
            f"{first}, but {directory} was prepared without such pairs. Set "
            "config.parallel.bad_pairs=skip, or correct the pairs and prepare new data with "
            f"{elsewhere(directory)}.",
            field="config.parallel.bad_pairs",
            path=directory,
        )
    made = vocabularies.load(config, directory)
    refuse_changed(made, metadata["tokenizers"], directory)
    splits = {}
    for name, listed in metadata["splits"].items():
        shards, lengths = [], [np.zeros((0, 2), np.int64)]
        for shard in listed:
            path = shard_path(directory, name, shard["unit"])
            of_rows = lengths_path(directory, name, shard["unit"])
            missing = [str(file) for file in (path, of_rows) if not file.is_file()]
            if missing and not gone:
                return None
            if missing:
                raise DataError(
                    f"{missing[0]} is missing. Restore a copy; it cannot be prepared again: {gone}",
                    path=missing[0],
                )
            if path.stat().st_size != shard["file_bytes"]:
                what = f"it has {path.stat().st_size} bytes instead of {shard['file_bytes']}"
                raise damaged_shard(path, what, gone)
            lengths.append(_read_lengths(of_rows, shard, gone))
            shards.append((path, shard["rows"]))
        splits[name] = PairSplit(
            shards=tuple(shards),
            checksums=tuple(shard["crc32"] for shard in listed),
            lengths=np.concatenate(lengths),
            tokens=tuple(
                sum(shard[side] for shard in listed) for side in ("source_tokens", "target_tokens")
            ),
        )
    rest = ("source", "validation_source", "vocabularies")
    identity = [
        metadata["tokenizers"],
        {name: value for name, value in made_from.items() if name not in rest},
        metadata["digests"],
    ]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    section = config.parallel
    cut_to = section.max_length if section.cut_sources else 0
    return ParallelText(directory, made, section.sampling, cut_to, fingerprint, splits)


def _read_lengths(path: Path, shard: Mapping[str, int], gone: object) -> np.ndarray:
    data = path.read_bytes()
    if zlib.crc32(data) != shard["lengths_crc32"] or len(data) != 8 * shard["rows"]:
        raise damaged_shard(path, "checksum mismatch", gone)
    return np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)


# --- Counts ---


def _check_splits(metadata: dict[str, Any], config: Config) -> None:
    section = config.parallel
    faults = metadata["faults"]
    first = f" First unusable pair: {next(iter(faults.values()))[1]}." if faults else ""
    if not metadata["splits"]["train"]:
        raise DataError(
            f"config.parallel.source='{section.source}' has no usable pair to train on. Check it, "
            f"config.parallel.columns, max_length and max_ratio.{first}",
            field="config.parallel.source",
            value=section.source,
        )
    if not metadata["splits"]["validation"]:
        if section.validation_source:
            raise DataError(
                f"config.parallel.validation_source='{section.validation_source}' has no usable "
                f"pair to evaluate on. Check it.{first}",
                field="config.parallel.validation_source",
                value=section.validation_source,
            )
        raise DataError(
            f"config.parallel.heldout_fraction={section.heldout_fraction} holds out no pair. "
            "Increase it and use a new config.data.directory, or set "
            "config.parallel.validation_source.",
            field="config.parallel.heldout_fraction",
            value=section.heldout_fraction,
        )


def _log_summary(metadata: dict[str, Any], directory: Path, seconds: float) -> None:
    rows = {name: sum(s["rows"] for s in metadata["splits"][name]) for name in metadata["splits"]}
    tokens = [
        sum(shard[side] for part in metadata["splits"].values() for shard in part)
        for side in ("source_tokens", "target_tokens")
    ]
    logging.info(
        "Prepared %s: %d training pairs, %d held-out pairs, %d source and %d target tokens, "
        "%.3f%% of characters unknown, %.1f MB of text in %.1f s (%.0f pairs/s).",
        directory,
        rows["train"],
        rows["validation"],
        *tokens,
        100 * metadata["unknown"] / max(1, metadata["characters"]),
        metadata["bytes"] / 1e6,
        seconds,
        metadata["pairs"] / max(0.001, seconds),
    )
    if metadata["cut"][0]:
        logging.info(
            "Truncated %d of %d sources to config.parallel.max_length; the first: %s.",
            metadata["cut"][0], metadata["pairs"], metadata["cut"][1],
        )  # fmt: skip
    for kind, (count, first) in metadata["faults"].items():
        logging.warning(
            "Skipped %d of %d pairs (%s); the first: %s.", count, metadata["pairs"], kind, first
        )
