"""A corpus as rows of token ids on disk: prepared once, in parallel, resumable, checked on opening.

A directory holds

    metadata.json          what it was made from, and counts
    tokenizer.*            the vocabulary, if it was trained here
    units/00000.json       one record for each finished unit of the source
    train-00000.array_record, validation-00000.array_record

`metadata.json` is written before the first unit, so a directory with shards of another corpus is
refused at any stage; one without a finished unit begins anew with other settings. A unit's shards
are renamed into place before its record is written: after a crash only units without a record are
done again, with the same result.
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
from convbert_jax.data import preparation
from convbert_jax.data.errors import DataError
from convbert_jax.data.rows import row_dtype
from convbert_jax.data.sources import REMOTE, Source, open_source
from convbert_jax.data.tokenizer import Tokenizer, load_tokenizer, training_settings
from convbert_jax.data.unit_worker import write_json

VERSION = 1  # of the rows and their order; raise it when the same config gives other rows
METADATA = "metadata.json"


@dataclasses.dataclass(frozen=True)
class Split:
    shards: tuple[tuple[Path, int], ...]  # (file, rows), in order
    rows: int
    tokens: int  # that are not padding
    documents: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Prepared rows, ready for `batching`.

    `fingerprint` identifies the rows: source, tokenizer, layout, length and splits.
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


def prepare(config: Config, directory: Path) -> Corpus:
    """The corpus of `config` in `directory`; does whatever is missing there, which can be nothing.

    Trains or loads the tokenizer, checks it on a sample, and writes shards on
    `config.data.workers` processes. Safe to kill and to run again. Another process that prepares
    the same directory is waited for.

    Raises:
      DataError: no text, unreadable text, a vocabulary that cannot be used, a full disk, or a
        directory that holds another corpus. Nothing there is overwritten or deleted.
    """
    directory = Path(directory)
    if opened := _open_finished(config, directory):
        return opened
    try:
        (directory / "units").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory} could not be made ({error.strerror}); set config.data.directory."
        ) from None
    with preparation.lock(directory):
        if opened := _open_finished(config, directory):  # finished while waiting
            return opened
        started = time.monotonic()
        sources = _open_sources(config.data)
        made_from = _made_from(config, sources)
        metadata, tokenizer = _go_on(config, made_from, directory)
        if metadata is None:
            tokenizer = preparation.prepare_tokenizer(config, directory, sources["train"])
            metadata = {
                "complete": False,
                "made_from": made_from,
                "tokenizer": tokenizer.fingerprint,
            }
            write_json(directory / METADATA, metadata)
        records = preparation.process_units(config, directory, tokenizer, sources)
        metadata |= _summary(records, config.data.length, time.monotonic() - started)
        _check_splits(metadata, config.data)
        write_json(directory / METADATA, metadata | {"complete": True})
    _log_summary(metadata, tokenizer, config, directory)
    return _open_finished(config, directory)


def _open_sources(data: DataSection) -> dict[str, Source]:
    sources = {"train": open_source(data, data.source)}
    if data.validation_source:
        sources["validation"] = open_source(data, data.validation_source)
    return sources


# --- Does a directory belong to a config? ---


def _go_on(
    config: Config, made_from: dict[str, Any], directory: Path
) -> tuple[dict[str, Any], Tokenizer] | tuple[None, None]:
    """Metadata and vocabulary of what was begun in `directory`; None where nothing is to be kept.

    Raises:
      DataError: it has finished shards, of another corpus.
    """
    metadata = _read_metadata(directory)
    if metadata is None:
        return None, None
    try:
        _refuse_other(made_from, metadata["made_from"], directory)
        tokenizer = load_tokenizer(config.tokenizer, directory)
        _refuse_changed_tokenizer(tokenizer, metadata["tokenizer"], directory)
    except DataError:
        if any((directory / "units").glob("*.json")):
            raise
        logging.info("No shard in %s is finished: it begins anew, with other settings.", directory)
        return None, None
    return metadata, tokenizer


def _elsewhere(directory: Path) -> str:
    """The flag that leaves `directory` as it is."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in range(2, 1000))
    free = next((path for path in names if not path.exists()), directory.with_name("other"))
    return f"--config.data.directory={free}"


def _made_from(config: Config, sources: dict[str, Source] | None) -> dict[str, Any]:
    """Everything that decides the rows, by the name used when it differs."""
    data, tokenizer = config.data, config.tokenizer
    layout = data.layout + (" with the release's bug" if data.release_builder_bug else "")
    layout += " of shuffled documents" if data.shuffle_documents else ""
    result = {
        "version": VERSION,
        "layout": layout,
        "length": data.length,
        "tokenizer": {"path": tokenizer.path} if tokenizer.path else training_settings(tokenizer),
        "heldout_fraction": 0 if data.validation_source else data.heldout_fraction,
        "source": data.source,
        "validation_source": data.validation_source,
    }
    if sources:
        result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
    return result


def _refuse_other(wanted: dict, there: dict, directory: Path) -> None:
    different = [
        f"{name} ({there.get(name)!r} there, {wanted[name]!r} wanted)"
        for name in ("version", "layout", "length", "heldout_fraction")
        if there.get(name) != wanted[name]
    ]
    old, new = there.get("tokenizer", {}), wanted["tokenizer"]
    if "path" not in new or "path" not in old:  # the content of a named file is compared later
        different += [
            f"tokenizer.{name} ({old.get(name)!r} there, {new.get(name)!r} wanted)"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    if "fingerprints" in wanted:
        old, new = there.get("fingerprints", {}), wanted["fingerprints"]
        different += [
            f"the {name} source (other files, content or format than those of {spec!r} when it "
            "was prepared)"
            for name, spec in (
                ("train", there.get("source")),
                ("validation", there.get("validation_source")),
            )
            if old.get(name) != new.get(name)
        ]
    elif any(there.get(key) != wanted[key] for key in ("source", "validation_source")):
        different.append(f"source ({there.get('source')!r} there, {wanted['source']!r} wanted)")
    if different:
        raise DataError(
            f"{directory} holds another corpus; it differs in {', '.join(different)}: set that "
            f"back, or prepare these elsewhere with {_elsewhere(directory)}."
        )


def _refuse_changed_tokenizer(tokenizer: Tokenizer, fingerprint: str, directory: Path) -> None:
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"{directory} was prepared with another vocabulary or normalization than "
            f"{tokenizer.path} has now: put it back, or prepare elsewhere with "
            f"{_elsewhere(directory)}."
        )


def _read_metadata(directory: Path) -> dict[str, Any] | None:
    path = directory / METADATA
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise DataError(f"{path} is damaged; delete {directory} and prepare it again.") from None


def _open_finished(config: Config, directory: Path) -> Corpus | None:
    """The corpus, if `directory` holds all of it; the source itself may be gone by then."""
    metadata = _read_metadata(directory)
    if not metadata or not metadata["complete"]:
        return None
    sources, gone = None, None
    data = config.data
    if not any(spec.startswith(REMOTE) for spec in (data.source, data.validation_source)):
        try:
            sources = _open_sources(data)
        except DataError as error:
            gone = error
    _refuse_other(_made_from(config, sources), metadata["made_from"], directory)
    if gone:
        logging.warning("%s The rows prepared from it in %s are used.", gone, directory)
    if metadata["undecodable"] and metadata["encoding_errors"] != data.encoding_errors:
        raise DataError(
            f"{directory} was prepared with encoding_errors='{metadata['encoding_errors']}', which "
            f"mattered for {metadata['undecodable']} places; set it back, or prepare elsewhere "
            f"with {_elsewhere(directory)}."
        )
    tokenizer = load_tokenizer(config.tokenizer, directory)
    _refuse_changed_tokenizer(tokenizer, metadata["tokenizer"], directory)
    splits = {}
    for name, counts in metadata["splits"].items():
        shards = []
        for file, rows, size in counts["shards"]:
            path = directory / file
            if not path.is_file() or path.stat().st_size != size:
                raise DataError(
                    f"{path} is missing or damaged; delete {directory} and prepare it again."
                )
            shards.append((path, rows))
        splits[name] = Split(tuple(shards), counts["rows"], counts["tokens"], counts["documents"])
    made_from = metadata["made_from"]
    identity = [
        metadata["tokenizer"],
        made_from["fingerprints"],
        [made_from[key] for key in ("version", "layout", "length", "heldout_fraction")],
        metadata["encoding_errors"] if metadata["undecodable"] else "",
    ]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Corpus(directory, tokenizer, data.length, data.layout, fingerprint, splits)


# --- Counts ---


def _summary(records: list[dict], length: int, seconds: float) -> dict[str, Any]:
    splits = {}
    for name in ("train", "validation"):
        parts = [record["splits"][name] for record in records]
        total = {
            key: sum(part.get(key, 0) for part in parts) for key in ("rows", "tokens", "documents")
        }
        total["fill"] = round(total["tokens"] / max(1, total["rows"] * length), 4)
        total["shards"] = [
            [f"{name}-{record['unit']:05d}.array_record", part["rows"], part["file_bytes"]]
            for record, part in zip(records, parts, strict=True)
            if part["rows"]
        ]
        splits[name] = total
    totals = {
        key: sum(record[key] for record in records)
        for key in ("bytes", "dropped", "pieces", "unknown", "undecodable", "skipped")
    }
    policies = [record["encoding_errors"] for record in records if record["undecodable"]]
    return {
        "splits": splits,
        **totals,
        "unknown_rate": totals["unknown"] / max(1, totals["pieces"]),
        "encoding_errors": policies[0] if policies else "error",
        "seconds": round(seconds, 1),
    }


def _check_splits(metadata: dict[str, Any], data: DataSection) -> None:
    if not metadata["splits"]["train"]["rows"]:
        raise DataError(
            f"config.data.source='{data.source}' has no text to train on"
            + (" besides what is held out" if metadata["splits"]["validation"]["rows"] else "")
            + "; check the source, its format and config.data.heldout_fraction."
        )
    if not metadata["splits"]["validation"]["rows"]:
        if data.validation_source:
            raise DataError(
                f"config.data.validation_source='{data.validation_source}' has no text."
            )
        raise DataError(preparation.nothing_held_out(data))


def _log_summary(metadata: dict, tokenizer: Tokenizer, config: Config, directory: Path) -> None:
    train, validation = metadata["splits"]["train"], metadata["splits"]["validation"]
    logging.info(
        "Prepared %s: %d documents, %d tokens in %d rows of %d (%.1f%% filled), %d rows held out, "
        "%.3f%% unknown, %d empty documents dropped, %.1f MB of text in %.0f s (%.1f MB/s).",
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
    if metadata["undecodable"]:
        logging.warning(
            "%d places of the text are not UTF-8; %d documents were left out for them.",
            metadata["undecodable"],
            metadata["skipped"],
        )
    if metadata["unknown_rate"] > config.tokenizer.max_unknown_rate:
        logging.warning(
            "%.2f%% of all tokens are unknown, more than in the sample that %s was checked on.",
            100 * metadata["unknown_rate"],
            tokenizer.path,
        )
