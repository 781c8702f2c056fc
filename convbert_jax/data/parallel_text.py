"""Parallel text as rows on disk: prepared in parallel, resumable, checked when opened.

A folder has the files that `prepared.Preparation` describes, and a file of pair lengths for each
shard. Separate vocabularies are in the folders "source" and "target".
"""

import dataclasses
import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import Config, ParallelSection
from convbert_jax.data import pair_worker
from convbert_jax.data.errors import DataError
from convbert_jax.data.pair_worker import FAULTS, Job, Vocabularies, process_pairs
from convbert_jax.data.prepared import Preparation, Shard, elsewhere
from convbert_jax.data.readers.pair_sources import PairSource, open_pairs
from convbert_jax.data.readers.tables import Fault
from convbert_jax.data.shards import damaged_shard, id_dtype, lengths_path, shard_path
from convbert_jax.data.tokenizer.tokenizer import describe_tokenizer
from convbert_jax.data.units import Runner, Work

VERSION = 1  # increment it when the same config produces different rows
KIND = "parallel"
METADATA_FIELDS = {"complete": bool, "made_from": dict, "stamps": dict}
SUMMARY_FIELDS = {
    "tokenizers": list,
    "digests": list,
    "splits": {"train": list, "validation": list},
    "faults": dict,
}
SHARD_FIELDS = (
    *("unit", "rows", "file_bytes", "crc32", "lengths_crc32"),
    *("source_tokens", "target_tokens"),
)
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
    return _PairPreparation(config).prepare(directory, runner, compare=compare)


def open_prepared(config: Config, directory: Path) -> ParallelText | None:
    """Opens the pairs in `directory`; None if they are incomplete. Their files may be missing.

    Raises:
      DataError: the directory contains different pairs, or damaged ones.
    """
    return _PairPreparation(config).open(directory)


def read_metadata(directory: Path) -> dict[str, Any] | None:
    """Reads the metadata of a folder, see `Preparation.read_metadata`."""
    return _PairPreparation.read_metadata(directory)


class _PairPreparation(Preparation):
    section = "parallel"
    contents, new_contents = "different data", "new data"
    metadata_fields, summary_fields = METADATA_FIELDS, SUMMARY_FIELDS
    record_fields = RECORD_FIELDS
    kind, settings_key, fingerprint_key = KIND, "vocabularies", "tokenizers"

    def open_sources(self) -> dict[str, PairSource]:
        return open_sources(self.config)

    def origin(self, sources: Mapping[str, PairSource] | None) -> dict[str, Any]:
        section = self.config.parallel
        vocabularies = pair_worker.list_sections(self.config)
        result = {
            "kind": KIND,
            "version": VERSION,
            "vocabularies": [describe_tokenizer(each) for _, each in vocabularies],
            "max_length": section.max_length,
            "max_ratio": section.max_ratio,
            "sampling": section.sampling,
            "heldout_fraction": 0 if section.validation_source else section.heldout_fraction,
            "source": section.source,
            "validation_source": section.validation_source,
        }
        if section.cut_sources:
            result["cut_sources"] = True
        if sources:
            result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
        return result

    def load_tokenizers(self, directory: Path) -> Vocabularies:
        return pair_worker.load(self.config, directory)

    def begin(
        self, directory: Path, source: PairSource, made_from: dict[str, Any]
    ) -> tuple[dict[str, Any], Vocabularies]:
        made = pair_worker.make(self.config, directory, source)
        return {"tokenizers": [tokenizer.fingerprint for tokenizer in made]}, made

    def make_work(self, directory: Path, metadata: dict, sources: dict, tokenizers: tuple) -> Work:
        return Work(make_job(self.config, directory, tokenizers), sources, process_pairs)

    def is_usable(self, record: Mapping[str, Any]) -> bool:
        # Processing a unit with faults again raises the error for the first one.
        return not record["faults"] or self.config.parallel.bad_pairs != "error"

    def summarize(self, records: list[dict], seconds: float) -> dict[str, Any]:
        splits = {
            name: [
                {"unit": record["unit"], **record["splits"][name]}
                for record in records
                if record["splits"][name]["rows"]
            ]
            for name in ("train", "validation")
        }
        faults = {}
        for kind in FAULTS:
            of_kind = [record["faults"][kind] for record in records if kind in record["faults"]]
            if of_kind:
                faults[kind] = [sum(count for count, _ in of_kind), of_kind[0][1]]
        totals = {
            key: sum(record[key] for record in records)
            for key in ("bytes", "characters", "unknown", "pairs")
        }
        cut = [record["cut"] for record in records if record["cut"][0]]
        first = cut[0][1] if cut else ""
        return {
            "splits": splits,
            "digests": [record["digest"] for record in records],
            "faults": faults,
            "cut": [sum(count for count, _ in cut), first],
            **totals,
        }

    def check_counts(self, metadata: Mapping[str, Any]) -> None:
        section = self.config.parallel
        faults = metadata["faults"]
        first = f" First unusable pair: {next(iter(faults.values()))[1]}." if faults else ""
        if not metadata["splits"]["train"]:
            raise DataError(
                f"config.parallel.source='{section.source}' has no usable pair to train on. Check "
                f"it, config.parallel.columns, max_length and max_ratio.{first}",
                field="config.parallel.source",
                value=section.source,
            )
        if not metadata["splits"]["validation"]:
            if section.validation_source:
                raise DataError(
                    f"config.parallel.validation_source='{section.validation_source}' has no "
                    f"usable pair to evaluate on. Check it.{first}",
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

    def log_summary(self, metadata: Mapping[str, Any], directory: Path, seconds: float) -> None:
        splits = metadata["splits"]
        rows = {name: sum(shard["rows"] for shard in splits[name]) for name in splits}
        tokens = [
            sum(shard[side] for part in splits.values() for shard in part)
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

    @staticmethod
    def list_shards(directory: Path, split: str, counts: Any) -> list[Shard]:
        found = []
        for entry in counts:
            if not isinstance(entry, dict) or not set(SHARD_FIELDS) <= set(entry):
                raise ValueError(entry)
            path = shard_path(directory, split, entry["unit"])
            numbers = (entry[name] for name in ("rows", "file_bytes", "crc32"))
            found.append(Shard(path, *numbers, others=(lengths_path(path),)))
        return found

    def check_policy(self, metadata: Mapping[str, Any], directory: Path) -> None:
        if metadata["faults"] and self.config.parallel.bad_pairs == "error":
            first = next(iter(metadata["faults"].values()))[1]
            raise DataError(
                f"{first}, but {directory} was prepared without such pairs. Set "
                "config.parallel.bad_pairs=skip, or correct the pairs and prepare new data with "
                f"{elsewhere(directory)}.",
                field="config.parallel.bad_pairs",
                path=directory,
            )

    def make_split(self, shards: list[Shard], counts: Any, gone: DataError | None) -> PairSplit:
        lengths = [
            _read_lengths(shard.others[0], entry, gone)
            for shard, entry in zip(shards, counts, strict=True)
        ]
        return PairSplit(
            shards=tuple((shard.path, shard.rows) for shard in shards),
            checksums=tuple(shard.checksum for shard in shards),
            lengths=np.concatenate([np.zeros((0, 2), np.int64), *lengths]),
            tokens=tuple(
                sum(entry[side] for entry in counts) for side in ("source_tokens", "target_tokens")
            ),
        )

    @staticmethod
    def identity(metadata: Mapping[str, Any]) -> list[Any]:
        rest = ("source", "validation_source", "vocabularies")
        return [
            metadata["tokenizers"],
            {name: value for name, value in metadata["made_from"].items() if name not in rest},
            metadata["digests"],
        ]

    def result(
        self, directory: Path, tokenizers: tuple, fingerprint: str, splits: dict
    ) -> ParallelText:
        section = self.config.parallel
        cut_to = section.max_length if section.cut_sources else 0
        return ParallelText(directory, tokenizers, section.sampling, cut_to, fingerprint, splits)


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


def _read_lengths(path: Path, shard: Mapping[str, int], gone: object) -> np.ndarray:
    data = path.read_bytes()
    if zlib.crc32(data) != shard["lengths_crc32"] or len(data) != 8 * shard["rows"]:
        raise damaged_shard(path, "checksum mismatch", gone)
    return np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class References:
    """Sources and their references.

    Attributes:
      pairs: (source, reference, *more references) of each pair.
      bad: (number of unreadable pairs, problem of the first).
    """

    pairs: tuple[tuple[str, ...], ...]
    bad: tuple[int, str] = (0, "")


def read_heldout(config: Config, text: ParallelText, rows: int) -> References:
    """Reads the held-out pairs from the source files of the preparation.

    Args:
      rows: number of pairs, spread evenly as in `batching.evaluation_batches`; 0: all.

    Raises:
      DataError: the files are missing or have changed.
    """
    section, split = config.parallel, text.splits["validation"]
    if section.validation_source:
        source = open_pairs(section.validation_source, section, "all")
    else:
        source = open_pairs(section.source, section)
    job = make_job(config, text.directory, text.vocabularies)
    found = []
    for unit in source.units:
        numbered = source.pairs(unit)
        while block := list(itertools.islice(numbered, pair_worker.PAIRS_AT_ONCE)):
            pairs = [pair for _, pair in block if not isinstance(pair, Fault)]
            if not section.validation_source:
                pairs = [pair for pair in pairs if pair_worker.is_heldout(job, pair)]
            encoded = pair_worker.encode_pairs(job, [pair[:2] for pair in pairs])
            found += [
                pair
                for pair, (ids, _) in zip(pairs, encoded, strict=True)
                if not pair_worker.judge(job, pair[:2], ids)
            ]
    if len(found) != split.rows:
        raise DataError(
            f"{source.name} has {len(found)} pairs to evaluate on, but {text.directory} was "
            f"prepared with {split.rows}. Restore the original files.",
            path=text.directory,
        )
    used = min(rows or split.rows, split.rows)
    return References(tuple(found[place] for place in np.arange(used) * split.rows // used))


def check_references(spec: str, section: ParallelSection, *, alike: bool) -> None:
    """Reads a whole source and checks that its pairs can be scored.

    Args:
      alike: require the same number of references for each pair, as corpus scores do.

    Raises:
      DataError: a reference after the first is unreadable (training would accept the pair without
        it), line counts differ, or the numbers of references differ and `alike` is set.
    """
    source = open_pairs(spec, section, "all")
    first = None
    for number, pair in itertools.chain.from_iterable(map(source.pairs, source.units)):
        if isinstance(pair, Fault):
            if pair.file > 1:
                place = source.place(number, pair.file)
                raise DataError(
                    f"{place} {pair.problem}. Correct it, or omit that file of references.",
                    path=place.path,
                    line=place.line,
                )
            continue
        count = len(pair) - 1
        first = first or (number, count)
        if alike and count != first[1]:
            few, many = sorted((first, (number, count)), key=lambda found: found[1])
            place = source.place(few[0])
            raise DataError(
                f"{place} has {few[1]} reference{'s' * (few[1] != 1)} and "
                f"{source.place(many[0])} has {many[1]}, but BLEU needs the same number for each "
                "source. Add the missing references or remove the additional ones.",
                path=place.path,
                line=place.line,
            )


def read_whole(spec: str, section: ParallelSection) -> References:
    """Reads all pairs of a source of `open_pairs`, in order.

    Raises:
      DataError: the source is unreadable or has no pairs, or a reference is empty.
    """
    source = open_pairs(spec, section, "all")
    pairs, bad, first = [], 0, ""
    for number, pair in itertools.chain.from_iterable(map(source.pairs, source.units)):
        if isinstance(pair, Fault):
            bad += 1
            first = first or f"{source.place(number, pair.file)} {pair.problem}"
        elif not pair[1].strip():
            place = source.place(number, 1)
            raise DataError(
                f"{place} has an empty reference. Correct it or remove the pair.",
                path=place.path,
                line=place.line,
            )
        else:
            pairs.append(pair)
    if not pairs:
        raise DataError(
            f"{spec} has no usable pair{f'; the first: {first}' * bool(first)}.", value=spec
        )
    return References(tuple(pairs), (bad, first))
