"""Processing of one unit of pairs, and the vocabularies of both sides."""

import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config, TokenizerSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.layouts import heldout_hash
from convbert_jax.data.prepared import hashed, new_digest
from convbert_jax.data.readers.pair_sources import PairSource
from convbert_jax.data.readers.tables import Fault
from convbert_jax.data.shards import (
    Pair,
    ShardWriter,
    checksum,
    id_dtype,
    lengths_path,
    pairs_to_records,
    shard_path,
)
from convbert_jax.data.tokenizer.normalization import choose_normalization
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    count_characters,
    load_tokenizer,
    make_tokenizer,
)
from convbert_jax.data.units import record_path, write_record

CHECKED_BYTES = 2_000_000  # of text for checking a vocabulary
SIDES = ("source", "target")


class Vocabularies(NamedTuple):
    """Tokenizers of both sides; the same object twice if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer


def list_sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """Returns (folder name, settings) of each vocabulary; the name is "" if it is shared."""
    section, pairs = config.tokenizer, config.parallel
    if not section.path:
        section = choose_normalization(section, is_generative=True)
    if config.sequence.shared_vocabulary:
        return [("", section)]
    own = dataclasses.replace(
        section,
        vocab_size=pairs.target_vocab_size or section.vocab_size,
        path=pairs.target_vocabulary,
    )
    return [("source", section), ("target", own)]


def load(config: Config, directory: Path) -> Vocabularies:
    """Loads the configured vocabularies, or those trained into `directory`.

    Raises:
      TokenizerError: as in `load_tokenizer`.
    """
    found = [load_tokenizer(section, directory / name) for name, section in list_sections(config)]
    return Vocabularies(found[0], found[-1])


def make(config: Config, directory: Path, source: PairSource) -> Vocabularies:
    """Loads or trains the vocabularies and checks each on a sample of its texts.

    Raises:
      TokenizerError: a vocabulary cannot be trained, or fails the check.
      DataError: the source has no text.
    """
    made = []
    for name, section in list_sections(config):
        sides = (0, 1) if not name else (SIDES.index(name),)
        checked = list(_sample(source, CHECKED_BYTES, sides))
        if not checked:
            raise DataError(
                f"config.parallel.source='{config.parallel.source}' has no text for a "
                f"vocabulary{_first_fault(source)}. Check it and config.parallel.columns.",
                field="config.parallel.source",
                value=config.parallel.source,
            )
        tokenizer = make_tokenizer(
            section,
            directory / name,
            checked,
            functools.partial(_sample, source, sides=sides),
            is_generative=True,
        )
        made.append(tokenizer)
    if lost := made[-1].describe_lost(list(_sample(source, CHECKED_BYTES, (1,)))):
        logging.warning("Targets of config.parallel.source: %s.", lost)
    return Vocabularies(made[0], made[-1])


def _first_fault(source: PairSource) -> str:
    """Describes the first unreadable pair, for an error; "" if all pairs are readable."""
    for unit in source.units:
        for number, pair in source.pairs(unit):
            if isinstance(pair, Fault):
                return f" ({source.place(number, pair.file)} {pair.problem})"
    return ""


def _sample(source: PairSource, size: int, sides: tuple[int, ...]) -> Iterator[str]:
    """Yields about `size` bytes of text, an equal part from the beginning of every unit."""
    share = max(1, size // len(source.units))
    for unit in source.units:
        left = share
        for text in itertools.chain.from_iterable(
            (pair[side] for side in sides)
            for _, pair in source.pairs(unit)
            if not isinstance(pair, Fault)
        ):
            if left <= 0:
                break
            if text.strip():
                yield text
                left -= len(text.encode())


PAIRS_AT_ONCE = 2_048
TRIALS = 4  # sampled tokenizations of a text, to estimate its length
FAULTS = ("unreadable", "empty", "long", "uneven")


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings shared by all units of a parallel text."""

    directory: Path
    vocabularies: Vocabularies
    max_length: int
    cut_sources: bool
    max_ratio: float
    bad_pairs: str
    sampling: float
    heldout_fraction: float


def process_pairs(
    job: Job, index: int, source: PairSource, unit: Any, split: str = ""
) -> dict[str, Any]:
    """Writes the shards of unit `index`, then its record, and returns the record.

    Args:
      split: "train" or "validation" for all pairs, or "" to hold some out by their hash.

    Raises:
      DataError: there is a bad pair and bad_pairs="error", a file is unreadable, or the disk is
        full; no record is written.
    """
    started = time.monotonic()
    dtype = id_dtype(*(tokenizer.vocab_size for tokenizer in job.vocabularies))
    names = ("train", "validation")
    writers = {
        name: ShardWriter(
            shard_path(job.directory, name, index), functools.partial(pairs_to_records, dtype=dtype)
        )
        for name in names
    }
    counts, lengths = {name: Counter() for name in names}, {name: [] for name in names}
    tally: Counter = Counter()
    faults: dict[str, list] = {}
    cut = [0, ""]
    digest = new_digest()
    found = hashed(source.pairs(unit), digest)
    while block := list(itertools.islice(found, PAIRS_AT_ONCE)):
        tally["pairs"] += len(block)
        texts = [pair for _, pair in block if not isinstance(pair, Fault)]
        encoded = iter(encode_pairs(job, texts))
        for number, pair in block:
            ids, whole = (None, 0) if isinstance(pair, Fault) else next(encoded)
            if fault := judge(job, pair, ids):
                _report(job, source, faults, number, fault)
                continue
            name = split or ("validation" if is_heldout(job, pair) else "train")
            tally["characters"] += count_characters(pair)
            for tokenizer, text, part in zip(job.vocabularies, pair, ids, strict=True):
                if tokenizer.special.unknown in part:
                    tally["unknown"] += tokenizer.count_unknown([text])
            if whole > len(ids[0]):
                said = f"{source.place(number)} has a source of {whole + 1} tokens"
                cut = [cut[0] + 1, cut[1] or said]
                # Sampling tokenizes this text in each epoch. The most likely tokenizations of the
                # whole document may all have the same beginning.
                pair = (job.vocabularies.source.decode(ids[0]), pair[1])
            tally["bytes"] += sum(len(text.encode()) for text in pair)
            row = Pair(*ids, *(pair if job.sampling else ("", "")))
            writers[name].write([row])
            lengths[name].append(_room(job, pair, ids))
            counts[name]["source_tokens"] += len(ids[0]) + 1
            counts[name]["target_tokens"] += len(ids[1]) + 1
    for name in names:
        counts[name]["file_bytes"] = writers[name].finish()
        counts[name]["rows"] = writers[name].rows
        if writers[name].rows:
            counts[name]["crc32"] = checksum(writers[name].path)
            path = lengths_path(writers[name].path)
            _write_lengths(path, lengths[name])
            counts[name]["lengths_crc32"] = checksum(path)
    record = {
        "unit": index,
        "digest": digest.hexdigest(),
        "splits": counts,
        **{name: tally[name] for name in ("bytes", "characters", "unknown")},
        "pairs": tally["pairs"],
        "faults": faults,
        "cut": cut,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_record(record_path(job.directory, index), record)
    return record


def draw(
    tokenizer: Tokenizer, text: str, power: float, room: int, *names: object, cut: bool = False
) -> list[int]:
    """Samples a tokenization of `text` with fewer than `room` tokens, which leaves an end mark.

    Args:
      power: as in `Tokenizer.sample`.
      names: values that the seed is derived from.
      cut: truncate the first sample instead of sampling again.

    Returns:
      Token ids; [] if all of `TRIALS` samples are too long.
    """
    for trial in range(TRIALS):
        seed = int(heldout_hash(" ".join(map(str, (*names, trial)))) * 2**32)
        ids = tokenizer.sample(text, power, seed)
        ids = ids[: room - 1] if cut else ids
        if 0 < len(ids) < room:
            return ids
    return []


def is_heldout(job: Job, pair: tuple[str, str]) -> bool:
    """Returns whether the hash of its texts holds the pair out."""
    return heldout_hash("\t".join(pair)) < job.heldout_fraction


def encode_pairs(
    job: Job, texts: Sequence[tuple[str, str]]
) -> Iterator[tuple[tuple[Sequence[int], Sequence[int]], int]]:
    """Yields ((source ids, target ids), length of the whole source) of each pair.

    With `job.cut_sources`, source ids are truncated to leave space for the end mark.
    """
    sources, targets = (
        tokenizer.encode([pair[side] for pair in texts]) if texts else []
        for side, tokenizer in enumerate(job.vocabularies)
    )
    most = job.max_length - 1 if job.cut_sources else None
    for source, target in zip(sources, targets, strict=True):
        yield (source[:most], target), len(source)


def judge(job: Job, pair: tuple[str, str] | Fault, ids) -> tuple[str, str, int] | None:
    """Returns (kind, problem, index of the text) of an unusable pair; None for a usable one."""
    if isinstance(pair, Fault):
        return "unreadable", pair.problem, pair.file
    for text, part in enumerate(ids):
        if not len(part):
            return "empty", f"has an empty {SIDES[text]}", text
    sizes = [len(part) + 1 for part in ids]
    for text, size in enumerate(sizes):
        if size > job.max_length:
            most = f"config.parallel.max_length={job.max_length}"
            return "long", f"has a {SIDES[text]} of {size} tokens, more than {most}", text
    if job.max_ratio and max(sizes) > job.max_ratio * min(sizes):
        most = f"config.parallel.max_ratio={job.max_ratio:g}"
        return "uneven", f"has texts of {sizes[0]} and {sizes[1]} tokens, exceeding {most}", 0
    return None


def _report(
    job: Job, source: PairSource, faults: dict, number: int, fault: tuple[str, str, int]
) -> None:
    kind, what, text = fault
    place = source.place(number, text)
    said = f"{place} {what}"
    if job.bad_pairs == "error":
        raise DataError(
            f"{said}. Correct it, or skip such pairs with config.parallel.bad_pairs=skip.",
            field="config.parallel.bad_pairs",
            path=place.path,
            line=place.line,
        )
    count, first = faults.get(kind, (0, said))
    faults[kind] = [count + 1, first]


def _room(job: Job, pair: tuple[str, str], ids) -> tuple[int, int]:
    """Returns the lengths for batch planning; with sampling, the maximum of `TRIALS` samples."""
    if not job.sampling:
        return len(ids[0]) + 1, len(ids[1]) + 1
    result = []
    for side, tokenizer in enumerate(job.vocabularies):
        seeds = (int((trial + 0.5) / TRIALS * 2**32) for trial in range(TRIALS))
        drawn = (len(tokenizer.sample(pair[side], job.sampling, seed)) + 1 for seed in seeds)
        result.append(max(len(ids[side]) + 1, min(job.max_length, max(drawn))))
    return result[0], result[1]


def _write_lengths(path: Path, lengths: Sequence[tuple[int, int]]) -> None:
    try:
        with storage.replacing(path) as file:
            file.write(np.asarray(lengths, "<u4").tobytes())
    except OSError as error:
        raise DataError(
            f"Cannot write {path}: {error.strerror}. Free disk space or use another "
            "config.data.directory, then start again; finished units are kept.",
            field="config.data.directory",
            path=path,
        ) from None
