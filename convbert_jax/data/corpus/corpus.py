"""Corpora as rows of token ids on disk: prepared in parallel, resumable, checked when opened.

A directory contains

    metadata.json          settings, sources and counts
    tokenizer.*            the vocabulary, if it was trained here
    units/00000.json       one record for each finished unit of the source
    train-00000.array_record, validation-00000.array_record

`metadata.json` is written before the first unit, so a directory with shards of a different corpus
is rejected at any stage. A directory without a finished unit is restarted with the new settings.
A unit's shards are renamed into place before its record is written: after a crash only units
without a record are processed again, with the same result.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import Config, DataSection
from convbert_jax.data.corpus import preparation
from convbert_jax.data.corpus.metadata import (
    METADATA,
    describe_tokenizer,
    has_finished_units,
    origin,
    read_metadata,
    refuse_other,
    refuse_units_of_unknown,
    summary,
)
from convbert_jax.data.corpus.rows import row_dtype
from convbert_jax.data.corpus.shards import damaged_shard
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import write_record
from convbert_jax.data.sources.source import (
    REMOTE,
    Source,
    open_source,
    refuse_shared_text,
)
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from convbert_jax.data.units.changes import check_content, elsewhere, list_changed, take_stamps
from convbert_jax.data.units.lock import lock
from convbert_jax.data.units.processes import Processes
from convbert_jax.data.units.work import Runner


@dataclasses.dataclass(frozen=True)
class Split:
    shards: tuple[tuple[Path, int], ...]  # (file, rows), in order
    checksums: tuple[int | None, ...]  # CRC-32 of each shard; None if it was not recorded
    rows: int
    tokens: int  # without padding
    documents: int


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
    directory = Path(directory)
    if opened := open_prepared(config, directory, compare=compare):
        return opened
    with lock(directory):
        if opened := open_prepared(config, directory):  # finished while waiting
            return opened
        started = time.monotonic()
        sources = _open_sources(config.data)
        if "validation" in sources:
            refuse_shared_text(sources["train"], sources["validation"], section="data")
        made_from = origin(config, sources)
        metadata, tokenizer = _go_on(config, sources, made_from, directory)
        if metadata is None:
            tokenizer = preparation.prepare_tokenizer(config, directory, sources["train"])
            config = dataclasses.replace(config, tokenizer=tokenizer.section)
            made_from["tokenizer"] = describe_tokenizer(tokenizer.section)
            metadata = {
                "complete": False,
                "made_from": made_from,
                "tokenizer": tokenizer.fingerprint,
                "heldout": preparation.choose_heldout(config.data, sources["train"]),
                "stamps": take_stamps(sources),
            }
            write_record(directory / METADATA, metadata)
        runner = runner or Processes(config.data.workers)
        records = preparation.process_units(
            config,
            directory,
            tokenizer,
            metadata["heldout"],
            sources,
            runner,
            lambda done: check_content(
                directory, sources, metadata["stamps"], done, config.data.workers, always=compare
            ),
        )
        metadata |= summary(records, config.data.length, time.monotonic() - started)
        _check_splits(metadata, config.data)
        write_record(directory / METADATA, metadata | {"complete": True})
    _log_summary(metadata, tokenizer, config, directory)
    return open_prepared(config, directory, sources=sources)


def _open_sources(data: DataSection) -> dict[str, Source]:
    sources = {"train": open_source(data, data.source)}
    if data.validation_source:
        sources["validation"] = open_source(data, data.validation_source)
    return sources


# --- Existing directories ---


def _go_on(
    config: Config, sources: dict[str, Source], made_from: dict[str, Any], directory: Path
) -> tuple[dict[str, Any], Tokenizer] | tuple[None, None]:
    """Returns metadata and vocabulary of an unfinished preparation; (None, None) to start anew.

    Raises:
      DataError: the directory has finished shards of a different or unknown corpus.
    """
    metadata = read_metadata(directory)
    if metadata is None:
        refuse_units_of_unknown(directory)
        return None, None
    try:
        changed = list_changed(directory, sources, metadata["stamps"])
        refuse_other(made_from, metadata["made_from"], directory, changed)
        tokenizer = load_tokenizer(config.tokenizer, directory)
        _refuse_changed_tokenizer(tokenizer, metadata["tokenizer"], directory)
    except DataError:
        if has_finished_units(directory):
            raise
        logging.info("%s has no finished shard; restarting with the new settings.", directory)
        return None, None
    return metadata, tokenizer


def _refuse_changed_tokenizer(tokenizer: Tokenizer, fingerprint: str, directory: Path) -> None:
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"The vocabulary or normalization in {tokenizer.path} changed after {directory} was "
            f"prepared. Restore it, or prepare a new corpus with {elsewhere(directory)}.",
            path=directory,
        )


def open_prepared(
    config: Config,
    directory: Path,
    *,
    compare: bool = False,
    sources: dict[str, Source] | None = None,
) -> Corpus | None:
    """Opens the corpus in `directory`; None if it is incomplete. The source may be missing.

    Args:
      compare: as in `prepare`.
      sources: sources by split, if already open.

    Raises:
      DataError: the directory contains a different corpus, or a damaged one.
    """
    metadata = read_metadata(directory)
    if not metadata or not metadata["complete"]:
        return None
    gone = None
    data = config.data
    if not sources and not any(
        spec.startswith(REMOTE) for spec in (data.source, data.validation_source)
    ):
        try:
            sources = _open_sources(data)
        except DataError as error:
            gone = error
    wanted, there = origin(config, sources), metadata["made_from"]
    if there["version"] < wanted["version"]:  # complete, so that its runs can be resumed
        logging.warning(
            "%s was prepared by an earlier version, which split texts slightly differently. Using "
            "its rows unchanged; to prepare new rows, pass %s.",
            directory,
            elsewhere(directory),
        )
        wanted["version"] = there["version"]
    refuse_other(wanted, there, directory, list_changed(directory, sources, metadata["stamps"]))
    if gone:
        logging.warning("%s Using the rows prepared from it in %s.", gone, directory)
    elif sources:
        units = {index: {"digest": digest} for index, digest in enumerate(metadata["digests"])}
        workers = config.data.workers
        check_content(directory, sources, metadata["stamps"], units, workers, always=compare)
    if metadata["undecodable"] and metadata["encoding_errors"] != data.encoding_errors:
        raise DataError(
            f"{directory} was prepared with encoding_errors='{metadata['encoding_errors']}', which "
            f"affected {metadata['undecodable']} places. Restore this setting, or prepare a new "
            f"corpus with {elsewhere(directory)}.",
            path=directory,
        )
    tokenizer = load_tokenizer(config.tokenizer, directory)
    _refuse_changed_tokenizer(tokenizer, metadata["tokenizer"], directory)
    splits = {}
    for name, counts in metadata["splits"].items():
        shards, checksums = [], []
        for file, rows, size, *checksum in counts["shards"]:
            path = directory / file
            if not path.is_file():
                if gone:
                    raise DataError(
                        f"{path} is missing. Restore a copy; it cannot be prepared again: {gone}",
                        path=path,
                    )
                return None
            if path.stat().st_size != size:
                what = f"it has {path.stat().st_size} bytes instead of {size}"
                raise damaged_shard(path, what, gone)
            shards.append((path, rows))
            checksums.append(checksum[0] if checksum else None)
        splits[name] = Split(
            shards=tuple(shards),
            checksums=tuple(checksums),
            **{key: counts[key] for key in ("rows", "tokens", "documents")},
        )
    made_from = metadata["made_from"]
    identity = [
        metadata["tokenizer"],
        made_from["fingerprints"],
        metadata["digests"],
        [made_from[key] for key in ("version", "layout", "length", "heldout_fraction")],
        metadata["encoding_errors"] if metadata["undecodable"] else "",
    ]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Corpus(directory, tokenizer, data.length, data.layout, fingerprint, splits)


# --- Counts ---


def _check_splits(metadata: dict[str, Any], data: DataSection) -> None:
    if not metadata["splits"]["train"]["rows"]:
        raise DataError(
            f"config.data.source='{data.source}' has no text to train on"
            + (" except the held-out text" if metadata["splits"]["validation"]["rows"] else "")
            + ". Check the source, its format and config.data.heldout_fraction.",
            field="config.data.source",
            value=data.source,
        )
    if not metadata["splits"]["validation"]["rows"]:
        if data.validation_source:
            raise DataError(
                f"config.data.validation_source='{data.validation_source}' has no text. Check it.",
                field="config.data.validation_source",
                value=data.validation_source,
            )
        raise DataError(
            f"config.data.heldout_fraction={data.heldout_fraction} holds out no document with a "
            "token. Increase it and use a new config.data.directory, or set "
            "config.data.validation_source.",
            field="config.data.heldout_fraction",
            value=data.heldout_fraction,
        )
    for name, split in metadata["splits"].items():
        if not split.get("pairs", 1):
            raise DataError(
                f"config.data.layout='pairs' found no sentence pair in the {name} text. It needs "
                "documents with several sentences; config.objective.sentence_pairs=next also needs "
                "several documents. Check config.data.format, increase config.data.length, or hold "
                "out more text.",
                field="config.data.layout",
                value="pairs",
            )


def _log_summary(metadata: dict, tokenizer: Tokenizer, config: Config, directory: Path) -> None:
    train, validation = metadata["splits"]["train"], metadata["splits"]["validation"]
    logging.info(
        "Prepared %s: %d documents, %d tokens in %d rows of %d (%.1f%% filled), %d rows held out, "
        "%.3f%% of characters unknown, %d empty documents dropped, %.1f MB of text in %.0f s "
        "(%.1f MB/s).",
        directory,
        train["documents"] + validation["documents"],
        train["tokens"],
        train["rows"],
        config.data.length,
        100 * train["fill"],
        validation["rows"],
        100 * metadata["unknown_rate"],
        metadata["dropped"],
        metadata["bytes"] / 1e6,
        metadata["seconds"],
        metadata["bytes"] / 1e6 / max(0.001, metadata["seconds"]),
    )
    if "pairs" in train:
        logging.info(
            "%d training rows and %d held-out rows have a labeled sentence pair.",
            train["pairs"],
            validation["pairs"],
        )
    if metadata["undecodable"]:
        logging.warning(
            "The text has %d places that are not UTF-8; skipped %d documents because of them.",
            metadata["undecodable"],
            metadata["skipped"],
        )
    if metadata["unknown_rate"] > config.tokenizer.max_unknown_rate:
        logging.warning(
            "%.2f%% of all characters are unknown, more than in the sample used to check %s.",
            100 * metadata["unknown_rate"],
            tokenizer.path,
        )
