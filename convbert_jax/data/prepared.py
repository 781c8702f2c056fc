"""Prepared folders: the steps of their preparation, the lock, detection of changed sources.

Each unit is hashed while it is tokenized. Later starts compare sizes and modification times
of the source files, which is fast, and read the units again only if one of these differs.
"""

import abc
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.readers.sources import refuse_shared_text
from convbert_jax.data.shards import (
    ShardWriter,
    checksum,
    damaged_shard,
    lengths_path,
    read_lengths,
    shard_path,
)
from convbert_jax.data.units import (
    Processes,
    Runner,
    Source,
    Work,
    do_units,
    record_path,
    write_record,
)

METADATA = "metadata.json"
_COMPARED_BY_CONTENT = {
    *("source", "validation_source", "fingerprints"),
    *("tokenizer", "vocabularies"),
}
LOCK_PATIENCE = 12 * 3600  # seconds


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Locks `directory`, after creating it and its folder "units"; waits while it is locked.

    The operating system releases the lock of a process that dies.

    Raises:
      DataError: the folder cannot be created, or is still locked after `LOCK_PATIENCE` seconds.
    """
    try:
        (directory / "units").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"Cannot create {directory}: {error.strerror}. Set config.data.directory."
        raise DataError(problem, field="config.data.directory", path=directory) from None
    with open(directory / "lock", "w", opener=storage.no_follow) as file:
        started = logged = time.monotonic()
        while not storage.try_lock(
            file, f"{directory} cannot be locked; prepare it with one process only."
        ):
            now = time.monotonic()
            if now - started > LOCK_PATIENCE:
                raise DataError(
                    f"{directory} has been locked by another process for {LOCK_PATIENCE // 3600} "
                    "hours. Stop that process or use another config.data.directory.",
                    field="config.data.directory",
                    path=directory,
                )
            if logged == started or now - logged > 60:
                logging.info("Waiting for another process that prepares %s.", directory)
                logged = now
            time.sleep(0.2)
        storage.remove_temporary(directory)
        yield


# Newer stamps of unchanged content, as seen from this machine; metadata.json keeps the first ones.
STAMPS = "stamps.json"
# Path relative to the common folder of all files -> [size in bytes, modification time in ns].
Stamps = Mapping[str, Sequence[int]]


def hashed(items: Iterable[Any], digest) -> Iterator[Any]:
    """Yields `items` (texts, or pairs with their numbers) and adds each to `digest`."""
    for item in items:
        digest.update(ascii(item).encode())  # repr depends on the version of Python
        yield item


def take_stamps(sources: Mapping[str, Source]) -> dict[str, list[int]]:
    """Returns size and modification time of every file of `sources`, by relative path."""
    paths, stats = _list_files(sources), {}
    for name in paths:
        stat = paths[name].stat()
        stats[name] = [stat.st_size, stat.st_mtime_ns]
    return stats


def elsewhere(directory: Path) -> str:
    """Returns the flag that prepares a new directory instead of `directory`."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in range(2, 1000))
    free = next((path for path in names if not path.exists()), directory.with_name("other"))
    return f"--config.data.directory={free}"


def _list_files(sources: Mapping[str, Source]) -> dict[str, Path]:
    paths = sorted({path.absolute() for source in sources.values() for path in source.files})
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return {os.path.relpath(path, root): path for path in paths}


def list_changed(
    directory: Path, sources: Mapping[str, Source] | None, recorded: Stamps
) -> list[str]:
    """Returns the paths of files whose stamp differs from `recorded` and the last comparison.

    Raises:
      DamagedFileError: the stamps of the last comparison are not in the form that was written.
    """
    if not sources:
        return []
    try:
        remedy = "delete it to compare the sources by content"
        newer = storage.read_json(directory / STAMPS, remedy=remedy, fields={"files": dict})[
            "files"
        ]
    except FileNotFoundError:
        newer = {}
    paths = _list_files(sources)
    return [
        str(paths[name])
        for name, stamp in take_stamps(sources).items()
        if stamp not in (recorded.get(name), newer.get(name))
    ]


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The `Job` that compares units; `reads` is the method of a source that yields its texts."""

    directory: Path
    reads: str
    digests: Mapping[int, str]
    changed: tuple[str, ...]

    def error(self, paths: Sequence[str]) -> DataError:
        return DataError(
            f"The source of {self.directory} changed after it was prepared: the content of "
            f"{shorten(', '.join(paths))} differs. Restore the original files, or prepare the new "
            f"ones with {elsewhere(self.directory)}.",
            field="config.data.directory",
            path=paths[0],
        )


def _compare_unit(job: _Comparison, index: int, source: Any, unit: Any, split: str = "") -> dict:
    digest = hashlib.blake2b(digest_size=16)
    for _ in hashed(getattr(source, job.reads)(unit), digest):
        pass
    if digest.hexdigest() != job.digests[index]:
        paths = sorted(str(path.absolute()) for path in source.files_of(unit))
        raise job.error([path for path in paths if path in job.changed] or paths)
    return {}


def has_finished_units(directory: Path) -> bool:
    return any((directory / "units").glob("*.json"))


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of prepared data.

    Attributes:
      shards: (file, rows), in order.
      checksums: CRC-32 of each shard.
      rows: number of all rows.
      counts: other numbers, for example "tokens", summed over the shards.
      lengths: of pairs, the planned tokens of source and target, [rows, 2] with end marks.
    """

    shards: tuple[tuple[Path, int], ...]
    checksums: tuple[int, ...]
    rows: int
    counts: Mapping[str, int]
    lengths: np.ndarray


SPLITS = ("train", "validation")


class UnitWriter:
    """Writes the shards and the record of a unit.

    Attributes:
      counts: numbers of each split, which the metadata of the folder lists by shard.
      tally: numbers of the whole unit.
      digest: hash of the content of the unit.
    """

    def __init__(self, directory: Path, index: int, to_records: Callable[[Sequence], list[bytes]]):
        self._directory, self._index, self._started = directory, index, time.monotonic()
        self.counts: dict[str, Counter] = {split: Counter() for split in SPLITS}
        self.tally: Counter = Counter()
        self.digest = hashlib.blake2b(digest_size=16)
        self._writers = {
            split: ShardWriter(shard_path(directory, split, index), to_records) for split in SPLITS
        }

    def write(self, split: str, rows: Iterable[Any]) -> None:
        """Appends rows. Raises DataError if the disk is full."""
        self._writers[split].write(rows)

    def finish(self, **fields: Any) -> dict[str, Any]:
        """Completes the shards, then writes and returns the record with `fields`."""
        for split, writer in self._writers.items():
            counts = self.counts[split]
            counts["file_bytes"] = writer.finish()
            counts["rows"] = writer.rows
            if writer.rows:
                counts["crc32"] = checksum(writer.path)
        record = {
            "unit": self._index,
            "digest": self.digest.hexdigest(),
            "splits": self.counts,
            **fields,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        write_record(record_path(self._directory, self._index), record)
        return record


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Preparation(abc.ABC):
    """Prepares and opens a folder of rows; the subclasses are for corpora and for pairs.

    A folder contains

        metadata.json          settings, sources and counts
        tokenizer.*            the vocabulary, if it was trained here
        units/00000.json       one record for each finished unit of the source
        train-00000.array_record, validation-00000.array_record

    `metadata.json` is written before the first unit, so a folder with shards of different data is
    rejected at any stage. A folder without a finished unit is restarted with the new settings. A
    unit's shards are renamed into place before its record is written: after a crash only units
    without a record are processed again, with the same result.

    Attributes:
      section: the config section that names the sources.
      contents: what a folder contains, for messages about different contents.
      new_contents: the same for new contents.
      kind: value of "kind" in the settings of the metadata; "": there is none.
      reads: method of a source that yields the texts of a unit.
      settings_key: key of the vocabulary settings in the result of `origin`, a dict or a list.
      fingerprint_key: key of the fingerprints of the vocabularies in the metadata.
      tallies: numbers in the record of a unit, which the metadata sums.
      metadata_fields, summary_fields, record_fields: further fields and their types of metadata,
        of complete metadata, and of the record of a unit.
      shard_fields: numbers of each shard, besides rows, bytes and checksum.
    """

    section: ClassVar[str]
    contents: ClassVar[str]
    new_contents: ClassVar[str]
    kind: ClassVar[str] = ""
    reads: ClassVar[str]
    settings_key: ClassVar[str]
    fingerprint_key: ClassVar[str]
    tallies: ClassVar[tuple[str, ...]]
    metadata_fields: ClassVar[Mapping[str, Any]]
    summary_fields: ClassVar[Mapping[str, Any]]
    record_fields: ClassVar[Mapping[str, Any]]
    shard_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config):
        self.config = config

    # --- Differences between corpora and pairs ---

    @abc.abstractmethod
    def open_sources(self) -> dict[str, Any]:
        """Opens the sources by split, without reading them completely."""

    def may_open_sources(self) -> bool:
        """Returns whether the sources can be opened without the network."""
        return True

    @abc.abstractmethod
    def origin(self, sources: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns all settings that determine the rows, by the names used in error messages.

        Args:
          sources: sources by split; None if they are missing or remote.
        """

    @abc.abstractmethod
    def load_tokenizers(self, directory: Path) -> tuple[Any, ...]:
        """Loads the vocabularies that `begin` made."""

    @abc.abstractmethod
    def begin(
        self, directory: Path, source: Any, made_from: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Trains or loads the vocabularies; returns fields of the metadata and the tokenizers.

        Args:
          made_from: result of `origin`; settings that the vocabulary determines are replaced.
        """

    @abc.abstractmethod
    def make_work(self, directory: Path, metadata: dict, sources: dict, tokenizers: tuple) -> Work:
        """Returns the work on all units."""

    @abc.abstractmethod
    def is_usable(self, record: Mapping[str, Any]) -> bool:
        """Returns whether the record of a unit is valid with the current settings."""

    @abc.abstractmethod
    def check_counts(self, metadata: Mapping[str, Any]) -> None:
        """Raises DataError if a split has no rows."""

    @abc.abstractmethod
    def log_summary(self, metadata: Mapping[str, Any], directory: Path, seconds: float) -> None:
        """Logs the counts."""

    @abc.abstractmethod
    def check_policy(self, metadata: Mapping[str, Any], directory: Path) -> None:
        """Raises DataError if the rows depend on a policy that has changed since."""

    @staticmethod
    @abc.abstractmethod
    def identity(metadata: Mapping[str, Any]) -> list[Any]:
        """Returns the JSON value that the fingerprint of the prepared data is a hash of."""

    @abc.abstractmethod
    def result(self, directory: Path, tokenizers: tuple, fingerprint: str, splits: dict) -> Any:
        """Returns the prepared data."""

    def summarize(self, records: list[dict]) -> dict[str, Any]:
        """Sums the counts of all units and lists their shards, for the metadata."""
        return {
            "splits": {
                split: [
                    {"unit": record["unit"], **record["splits"][split]}
                    for record in records
                    if record["splits"][split]["rows"]
                ]
                for split in SPLITS
            },
            "digests": [record["digest"] for record in records],
            **{name: sum(record[name] for record in records) for name in self.tallies},
        }

    # --- Steps ---

    def prepare(self, directory: Path, runner: Runner | None = None, *, compare: bool = False):
        """Opens the data in `directory`, after preparing its missing parts."""
        directory = Path(directory)
        if opened := self.open(directory, compare=compare):
            return opened
        with lock(directory):
            if opened := self.open(directory):  # finished while waiting
                return opened
            started = time.monotonic()
            sources = self.open_sources()
            if "validation" in sources:
                refuse_shared_text(sources["train"], sources["validation"], section=self.section)
            for source in sources.values():
                _ = source.units  # rejects unequal parallel files before anything is written
            made_from = self.origin(sources)
            metadata, tokenizers = self._find_started(directory, sources, made_from)
            if metadata is None:
                begun, tokenizers = self.begin(directory, sources["train"], made_from)
                metadata = {"complete": False, "made_from": made_from, **begun}
                metadata["stamps"] = take_stamps(sources)
                write_record(directory / METADATA, metadata)
            records = do_units(
                self.make_work(directory, metadata, sources, tokenizers),
                lambda index: self._finished(directory, index),
                runner or Processes(self.config.data.workers),
                lambda done: self._check_content(
                    directory,
                    sources,
                    metadata["stamps"],
                    {index: record["digest"] for index, record in done.items()},
                    always=compare,
                ),
            )
            seconds = time.monotonic() - started
            metadata |= {**self.summarize(records), "seconds": round(seconds, 1)}
            self.check_counts(metadata)
            write_record(directory / METADATA, metadata | {"complete": True})
        self.log_summary(metadata, directory, seconds)
        return self.open(directory, sources=sources)

    def open(
        self, directory: Path, *, compare: bool = False, sources: dict[str, Any] | None = None
    ):
        """Opens the data in `directory`; None if it is incomplete. The sources may be missing.

        Args:
          compare: read the sources again even if no file seems to have changed.
          sources: sources by split, if already open.

        Raises:
          DataError: the directory contains different data, or damaged data.
        """
        metadata = self.read_metadata(directory)
        if not metadata or not metadata["complete"]:
            return None
        gone = None
        if not sources and self.may_open_sources():
            try:
                sources = self.open_sources()
            except DataError as error:
                gone = error
        changed = list_changed(directory, sources, metadata["stamps"])
        self._refuse_other(self.origin(sources), metadata["made_from"], directory, changed)
        if gone:
            logging.warning("%s Using the rows prepared from it in %s.", gone, directory)
        elif sources:
            digests = dict(enumerate(metadata["digests"]))
            self._check_content(directory, sources, metadata["stamps"], digests, always=compare)
        self.check_policy(metadata, directory)
        tokenizers = self.load_tokenizers(directory)
        self._refuse_changed(tokenizers, metadata, directory)
        splits = {}
        for name, entries in metadata["splits"].items():
            shards = [shard_path(directory, name, entry["unit"]) for entry in entries]
            lengths = [np.zeros((0, 2), np.int64)]
            for path, entry in zip(shards, entries, strict=True):
                files = [path, lengths_path(path)] if "lengths_crc32" in entry else [path]
                missing = [file for file in files if not file.is_file()]
                if missing and not gone:
                    return None
                if missing:
                    problem = f"missing. Restore a copy; it cannot be prepared again: {gone}"
                    raise DataError(problem, path=missing[0])
                if (size := path.stat().st_size) != entry["file_bytes"]:
                    what = f"it has {size} bytes instead of {entry['file_bytes']}"
                    raise damaged_shard(path, what, gone)
                if "lengths_crc32" in entry:
                    lengths.append(read_lengths(path, entry, gone))
            splits[name] = Split(
                shards=tuple(
                    (path, entry["rows"]) for path, entry in zip(shards, entries, strict=True)
                ),
                checksums=tuple(entry["crc32"] for entry in entries),
                rows=sum(entry["rows"] for entry in entries),
                counts={
                    field: sum(entry[field] for entry in entries) for field in self.shard_fields
                },
                lengths=np.concatenate(lengths),
            )
        identity = json.dumps(self.identity(metadata), sort_keys=True)
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return self.result(directory, tokenizers, fingerprint, splits)

    @classmethod
    def read_metadata(cls, directory: Path) -> dict[str, Any] | None:
        """Reads the metadata of a folder; None if it has none.

        Raises:
          DamagedFileError: the file is not in the form that was written.
        """
        path = directory / METADATA
        if not path.is_file():
            return None
        remedy = f"restore a copy, or prepare {cls.new_contents} with {elsewhere(directory)}"
        fields = {"complete": bool, "stamps": dict, **cls.metadata_fields}
        metadata = storage.read_json(path, remedy=remedy, fields=fields)
        if metadata["complete"] and metadata["made_from"].get("kind", "") == cls.kind:
            fields |= {"splits": dict.fromkeys(SPLITS, list), "digests": list}
            fields |= cls.summary_fields
            metadata = storage.read_json(path, remedy=remedy, fields=fields)
            numbers = ("unit", "rows", "file_bytes", "crc32", *cls.shard_fields)
            entries = [entry for entries in metadata["splits"].values() for entry in entries]
            if not all(isinstance(e, dict) and all(isinstance(e.get(n), int) for n in numbers)
                       for e in entries):  # fmt: skip
                why = "an entry of its list of shards is invalid"
                raise storage.damaged(path, why, remedy)
        return metadata

    def _find_started(
        self, directory: Path, sources: dict[str, Any], made_from: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple] | tuple[None, None]:
        """Returns metadata and tokenizers of an unfinished preparation; (None, None) to start anew.

        Raises:
          DataError: the directory has finished units of different or unknown data.
        """
        metadata = self.read_metadata(directory)
        if metadata is None and has_finished_units(directory):
            raise DataError(
                f"finished units, but no {METADATA} with their settings. Restore a copy of it, or "
                "delete the folder to prepare it again.",
                path=directory,
            )
        if metadata is None:
            return None, None
        try:
            changed = list_changed(directory, sources, metadata["stamps"])
            self._refuse_other(made_from, metadata["made_from"], directory, changed)
            tokenizers = self.load_tokenizers(directory)
            self._refuse_changed(tokenizers, metadata, directory)
        except DataError:
            if has_finished_units(directory):
                raise
            logging.info("%s has no finished shard; restarting with the new settings.", directory)
            return None, None
        return metadata, tokenizers

    def _finished(self, directory: Path, index: int) -> dict[str, Any] | None:
        """Returns the record of a unit; None if the unit is to be processed."""
        path = record_path(directory, index)
        remedy = "delete it and start again to prepare this part again"
        try:
            counts = {split: {"rows": int, "file_bytes": int} for split in SPLITS}
            fields = {"unit": int, "digest": str, "splits": counts, **self.record_fields}
            fields |= dict.fromkeys(self.tallies, int)
            record = storage.read_json(path, remedy=remedy, fields=fields)
        except FileNotFoundError:
            return None
        splits = record["splits"].values()
        valid = all(isinstance(count, int) for split in splits for count in split.values())
        needed = {"crc32", *self.shard_fields}
        valid &= all(needed <= split.keys() for split in splits if split["rows"])
        if record["unit"] != index or not valid:
            raise storage.damaged(path, "its unit number or its counts are wrong", remedy)
        for split, counts in record["splits"].items():
            shard = shard_path(directory, split, index)
            there = [shard, lengths_path(shard)] if "lengths_crc32" in counts else [shard]
            if counts["rows"] and not all(path.is_file() for path in there):
                logging.warning("A shard of unit %d is missing; preparing it again.", index)
                return None
        return record if self.is_usable(record) else None

    def _check_content(
        self,
        directory: Path,
        sources: Mapping[str, Source],
        stamps: Stamps,
        digests: Mapping[int, str],
        *,
        always: bool,
    ) -> None:
        """Compares units with their recorded digests if the stamp of a file differs.

        Args:
          stamps: stamps of the source files when they were prepared.
          digests: digests by unit index; other units are not read.
          always: compare even if all stamps are equal.

        Raises:
          DataError: the content of a unit differs.
          DamagedFileError: the stamps in `directory` are not in the form that was written.
        """
        changed = list_changed(directory, sources, stamps)
        if not changed and not always:
            return
        job = _Comparison(directory, self.reads, digests, tuple(changed))
        work = Work(job, sources, _compare_unit)
        assignments = [each for each in work.list_assignments() if each.index in digests]
        if len(assignments) < len(digests):
            raise job.error(changed or [source.name for source in sources.values()])
        why = f"size or modification time of {shorten(', '.join(changed))} changed"
        logging.info(
            "Comparing the content of the sources with the digests in %s: %s.",
            directory,
            why if changed else "--mode=prepare always does",
        )
        present = take_stamps(sources)
        Processes(self.config.data.workers, "Comparing").run(work, assignments)
        try:
            write_record(directory / STAMPS, {"files": present})
        except DataError as error:  # for example a folder of another user
            logging.warning("%s The next start will compare the sources again.", error)

    def _refuse_other(
        self, wanted: dict, there: dict, directory: Path, changed: Sequence[str]
    ) -> None:
        """Raises DataError unless the `origin` of a folder matches the wanted one.

        Paths of sources and vocabularies are ignored if their content is known.

        Args:
          changed: paths of changed source files, for the message.
        """
        names = [name for name in {**wanted, **there} if name not in _COMPARED_BY_CONTENT]
        if "fingerprints" not in wanted:
            names += ["source", "validation_source"]
        different = [
            f"{name} (prepared: {there.get(name)!r}, config: {wanted.get(name)!r})"
            for name in names
            if there.get(name) != wanted.get(name)
        ]
        old, new = (_as_list(made.get(self.settings_key, [])) for made in (there, wanted))
        if len(old) != len(new):
            different.append(f"vocabularies (prepared: {len(old)}, config: {len(new)})")
        for one, other in zip(old, new, strict=False):
            if "path" not in one or "path" not in other:  # files are compared by fingerprint
                different += [
                    f"tokenizer.{name} (prepared: {one.get(name)!r}, config: {other.get(name)!r})"
                    for name in sorted({*one, *other})
                    if other.get(name) not in (one.get(name), "auto")
                ]
        if "fingerprints" in wanted:
            shown = f": {shorten(', '.join(changed))}" if changed else ""
            specs = {"train": there.get("source"), "validation": there.get("validation_source")}
            different += [
                f"the {name} source (files, content or format of {spec!r} changed after the "
                f"preparation{shown})"
                for name, spec in specs.items()
                if there.get("fingerprints", {}).get(name) != wanted["fingerprints"].get(name)
            ]
        if different:
            raise DataError(
                f"{directory} contains {self.contents}. Differences: {', '.join(different)}. "
                f"Restore these settings, or prepare {self.new_contents} with "
                f"{elsewhere(directory)}.",
                path=directory,
            )

    def _refuse_changed(self, tokenizers: tuple, metadata: dict, directory: Path) -> None:
        recorded_here = _as_list(metadata[self.fingerprint_key])
        for tokenizer, recorded in zip(tokenizers, recorded_here, strict=False):
            if tokenizer.fingerprint != recorded:
                raise DataError(
                    f"The vocabulary or normalization in {tokenizer.path} changed after "
                    f"{directory} was prepared. Restore it, or prepare {self.new_contents} with "
                    f"{elsewhere(directory)}.",
                    path=directory,
                )
