"""Parallel text as rows on disk: prepared in parallel, resumable, checked when opened.

A folder has the files that `prepared.Preparation` describes, and a file of pair lengths for each
shard. Separate vocabularies are in the folders "source" and "target".
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.config import Config, PairFormat, ParallelSection
from convbert_jax.data import pair_worker
from convbert_jax.data.errors import DataError
from convbert_jax.data.pair_worker import (
    FAULTS,
    Job,
    Vocabularies,
    process_pairs,
    tokenizers_of,
)
from convbert_jax.data.prepared import Preparation, Split, elsewhere
from convbert_jax.data.readers.pair_sources import open_pairs
from convbert_jax.data.readers.row_sources import RowSource, Targets
from convbert_jax.data.readers.rows import Fault
from convbert_jax.data.shards import id_dtype
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, describe_tokenizer
from convbert_jax.data.units import Runner, Work

VERSION = 1  # increment it when the same config produces different rows
KIND = "parallel"
METADATA_FIELDS = {"made_from": dict}
RECORD_FIELDS = {"faults": dict}
SUMMARY_FIELDS = {"tokenizers": list, "faults": dict}


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """Prepared pairs, the input of `batching`.

    `fingerprint` is a hash of sources, vocabularies, filters and splits. `cut_to` is the number of
    tokens that texts were truncated to; 0 if they were not. For `form` see `pair_worker.Job`.
    """

    directory: Path
    vocabularies: Vocabularies
    sampling: float
    cut_to: int
    form: PairFormat
    fingerprint: str
    splits: dict[str, Split]  # "train", "validation"

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """The tokenizer of each text of a row."""
        return tokenizers_of(self.vocabularies, self.form)

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
    kind, reads = KIND, "pairs"
    settings_key, fingerprint_key = "vocabularies", "tokenizers"
    tallies = ("bytes", "characters", "unknown", "pairs")
    metadata_fields, summary_fields = METADATA_FIELDS, SUMMARY_FIELDS
    record_fields = RECORD_FIELDS
    shard_fields = ("lengths_crc32", "source_tokens", "target_tokens")

    def open_sources(self) -> dict[str, RowSource]:
        return open_sources(self.config)

    def origin(self, sources: Mapping[str, RowSource] | None) -> dict[str, Any]:
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
        if (form := self.config.spec.pair_format(self.config)) != PairFormat():
            result["form"] = dataclasses.asdict(form)
        if section.prompts:
            result["prompts"] = list(section.prompts)
        if sources:
            result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
        return result

    def load_tokenizers(self, directory: Path) -> Vocabularies:
        return pair_worker.load(self.config, directory)

    def begin(
        self, directory: Path, source: RowSource, made_from: dict[str, Any]
    ) -> tuple[dict[str, Any], Vocabularies]:
        made = pair_worker.make(self.config, directory, source)
        sections = [tokenizer.section for tokenizer in made[: len(made_from["vocabularies"])]]
        made_from["vocabularies"] = [describe_tokenizer(section) for section in sections]
        return {"tokenizers": [tokenizer.fingerprint for tokenizer in made]}, made

    def make_work(self, directory: Path, metadata: dict, sources: dict, tokenizers: tuple) -> Work:
        form = self.config.spec.pair_format(self.config)
        job = Job(directory, tokenizers, self.config.parallel, form)
        return Work(job, sources, process_pairs)

    def is_usable(self, record: Mapping[str, Any]) -> bool:
        # Processing a unit with faults again raises the error for the first one.
        return not record["faults"] or self.config.parallel.bad_pairs != "error"

    def summarize(self, records: list[dict]) -> dict[str, Any]:
        faults = {}
        for kind in FAULTS:
            of_kind = [record["faults"][kind] for record in records if kind in record["faults"]]
            if of_kind:
                faults[kind] = [sum(count for count, _ in of_kind), of_kind[0][1]]
        cut = [record["cut"] for record in records if record["cut"][0]]
        cut = [sum(count for count, _ in cut), cut[0][1] if cut else ""]
        return {**super().summarize(records), "faults": faults, "cut": cut}

    def check_counts(self, metadata: Mapping[str, Any]) -> None:
        section, faults = self.config.parallel, metadata["faults"]
        first = f" First unusable pair: {next(iter(faults.values()))[1]}." if faults else ""
        if not metadata["splits"]["train"]:
            raise DataError(
                "has no usable pair to train on. Check it, config.parallel.columns, max_length and "
                f"max_ratio.{first}",
                field="config.parallel.source",
                value=section.source,
            )
        if not metadata["splits"]["validation"] and section.validation_source:
            raise DataError(
                f"has no usable pair to evaluate on. Check it.{first}",
                field="config.parallel.validation_source",
                value=section.validation_source,
            )
        if not metadata["splits"]["validation"]:
            raise DataError(
                "holds out no pair. Increase it and use a new config.data.directory, or set "
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
                "Truncated %d texts of %d pairs to config.parallel.max_length; the first: %s.",
                metadata["cut"][0], metadata["pairs"], metadata["cut"][1],
            )  # fmt: skip
        for kind, (count, first) in metadata["faults"].items():
            logging.warning(
                "Skipped %d of %d pairs (%s); the first: %s.", count, metadata["pairs"], kind, first
            )

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
        form = self.config.spec.pair_format(self.config)
        return ParallelText(
            directory, tokenizers, section.sampling, cut_to, form, fingerprint, splits
        )


def open_sources(config: Config) -> dict[str, RowSource]:
    """Opens the sources of `config.parallel`, by split, without reading them completely.

    Raises:
      DataError: no source is set, or it does not exist.
    """
    section = config.parallel
    if not section.source:
        raise DataError(
            "is empty. Set it, for example to parallel:train.de,train.en, csv:FILE, jsonl:FILE or "
            "parquet:FILE.",
            field="config.parallel.source",
        )
    targets: list[Targets] = ["one", "first"]
    if (form := config.spec.pair_format(config)).encoder:
        targets = ["scored" if form.scored else "each"] * 2
    sources = {"train": open_pairs(section.source, section, targets[0])}
    if section.validation_source:
        sources["validation"] = open_pairs(section.validation_source, section, targets[1])
    return sources


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
    job = Job(text.directory, text.vocabularies, section, text.form)
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
                fix = "Correct it, or omit that file of references"
                raise source.place(number, pair.file).error(f"{pair.problem}. {fix}.")
            continue
        count = len(pair) - 1
        first = first or (number, count)
        if alike and count != first[1]:
            few, many = sorted((first, (number, count)), key=lambda found: found[1])
            raise source.place(few[0]).error(
                f"has {few[1]} reference{'s' * (few[1] != 1)} and {source.place(many[0])} has "
                f"{many[1]}, but BLEU needs the same number for each source. Add the missing "
                "references or remove the additional ones."
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
            problem = "has an empty reference. Correct it or remove the pair."
            raise source.place(number, 1).error(problem)
        else:
            pairs.append(pair)
    if not pairs:
        raise DataError(
            f"{spec} has no usable pair{f'; the first: {first}' * bool(first)}.", value=spec
        )
    return References(tuple(pairs), (bad, first))
