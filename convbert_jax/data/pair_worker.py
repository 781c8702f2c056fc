"""Processing of one unit of pairs, and the vocabularies of both sides."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from convbert_jax.config import Config, PairFormat, ParallelSection, TokenizerSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.layouts import heldout_hash
from convbert_jax.data.prepared import UnitWriter, hashed
from convbert_jax.data.readers.row_sources import RowSource
from convbert_jax.data.readers.rows import Fault
from convbert_jax.data.shards import (
    Pair,
    id_dtype,
    lengths_path,
    pairs_to_records,
    shard_path,
    write_lengths,
)
from convbert_jax.data.tokenizer.normalization import choose_normalization
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    count_characters,
    load_tokenizer,
    make_tokenizer,
)

CHECKED_BYTES = 2_000_000  # of text for checking a vocabulary
SIDES = ("source", "target", "negative")


class Vocabularies(NamedTuple):
    """Tokenizers of both sides; the same object twice if the vocabulary is shared."""

    source: Tokenizer
    target: Tokenizer


def tokenizers_of(vocabularies: Vocabularies, form: PairFormat) -> tuple[Tokenizer, ...]:
    """Returns the tokenizer of each text of a row."""
    return (*vocabularies, vocabularies.target)[: form.texts]


def list_sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """Returns (folder name, settings) of each vocabulary; the name is "" if it is shared."""
    section, pairs = config.tokenizer, config.parallel
    if config.spec.generates and not section.path:  # for encoders a sample of the text decides
        section = choose_normalization(section, is_generative=True)
    if not config.spec.has_two_vocabularies(config):
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


def make(config: Config, directory: Path, source: RowSource) -> Vocabularies:
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
            faults = (
                f" ({source.place(number, pair.file)} {pair.problem})"
                for unit in source.units
                for number, pair in source.pairs(unit)
                if isinstance(pair, Fault)
            )
            raise DataError(
                f"has no text for a vocabulary{next(faults, '')}. Check it and "
                "config.parallel.columns.",
                field="config.parallel.source",
                value=config.parallel.source,
            )
        tokenizer = make_tokenizer(
            section,
            directory / name,
            checked,
            functools.partial(_sample, source, sides=sides),
            is_generative=config.spec.generates,
        )
        made.append(tokenizer)
    targets = list(_sample(source, CHECKED_BYTES, (1,))) if config.spec.generates else []
    if lost := made[-1].describe_lost(targets):
        logging.warning("Targets of config.parallel.source: %s.", lost)
    return Vocabularies(made[0], made[-1])


def _sample(source: RowSource, size: int, sides: tuple[int, ...]) -> Iterator[str]:
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
    """Settings shared by all units of a parallel text.

    Attributes:
      form: format of the rows, see `RecipeSpec.pair_format`.
    """

    directory: Path
    vocabularies: Vocabularies
    section: ParallelSection
    form: PairFormat

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """The tokenizer of each text of a row."""
        return tokenizers_of(self.vocabularies, self.form)


def process_pairs(
    job: Job, index: int, source: RowSource, unit: Any, split: str = ""
) -> dict[str, Any]:
    """Writes the shards of unit `index`, then its record, and returns the record.

    Args:
      split: "train" or "validation" for all pairs, or "" to hold some out by their hash.

    Raises:
      DataError: there is a bad pair and bad_pairs="error", a file is unreadable, or the disk is
        full; no record is written.
    """
    dtype = id_dtype(*(tokenizer.vocab_size for tokenizer in job.vocabularies))
    writer = UnitWriter(job.directory, index, functools.partial(pairs_to_records, dtype=dtype))
    counts, tally = writer.counts, writer.tally
    lengths: dict[str, list] = {name: [] for name in counts}
    faults: dict[str, list] = {}
    cut = [0, ""]
    found = hashed(source.pairs(unit), writer.digest)
    while block := list(itertools.islice(found, PAIRS_AT_ONCE)):
        tally["pairs"] += len(block)
        usable = [pair for _, pair in block if not isinstance(pair, Fault)]
        encoded = iter(encode_pairs(job, usable))
        for number, pair in block:
            ids, whole = (None, ()) if isinstance(pair, Fault) else next(encoded)
            if fault := judge(job, pair, ids):
                _report(job, source, faults, number, fault)
                continue
            texts, score = _split_score(job, pair)
            name = split or ("validation" if is_heldout(job, pair) else "train")
            tally["characters"] += count_characters(texts)
            for tokenizer, text, part in zip(job.tokenizers, texts, ids, strict=True):
                if tokenizer.special.unknown in part:
                    tally["unknown"] += tokenizer.count_unknown([text])
            for side, size in enumerate(whole):
                if size == len(ids[side]):
                    continue
                size += job.form.added_tokens
                said = f"{source.place(number, side)} has a {SIDES[side]} of {size} tokens"
                cut = [cut[0] + 1, cut[1] or said]
                # Sampling tokenizes this text in each epoch. The most likely tokenizations of the
                # whole document may all have the same beginning.
                texts[side] = job.tokenizers[side].decode(ids[side])
            tally["bytes"] += sum(len(text.encode()) for text in texts)
            kept = texts if job.section.sampling else [""] * len(texts)
            writer.write(name, [Pair(ids, tuple(kept), score)])
            lengths[name].append(_room(job, texts, ids))
            sizes = [len(part) + job.form.added_tokens for part in ids]
            counts[name]["source_tokens"] += sizes[0]
            counts[name]["target_tokens"] += sum(sizes[1:])
    for name, of_split in lengths.items():
        if of_split:
            path = lengths_path(shard_path(job.directory, name, index))
            counts[name]["lengths_crc32"] = write_lengths(path, of_split)
    tallies = {name: tally[name] for name in ("bytes", "characters", "unknown", "pairs")}
    return writer.finish(**tallies, faults=faults, cut=cut)


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


def _split_score(job: Job, pair: Sequence[str | float]) -> tuple[list[str], float | None]:
    """Returns the texts, with their prompts, and the score of a pair."""
    texts, (score, *_) = list(pair[: job.form.texts]), (*pair[job.form.texts :], None)
    if prompts := job.section.prompts:
        before = (prompts[0], *prompts[1:] * (len(texts) - 1))
        texts = [" ".join(filter(None, both)) for both in zip(before, texts, strict=True)]
    return texts, score


def is_heldout(job: Job, pair: Sequence[str | float]) -> bool:
    """Returns whether the hash of its texts holds the pair out."""
    return heldout_hash("\t".join(pair[: job.form.texts])) < job.section.heldout_fraction


def encode_pairs(
    job: Job, pairs: Sequence[Sequence[str | float]]
) -> Iterator[tuple[tuple[Sequence[int], ...], tuple[int, ...]]]:
    """Yields (ids of each text, length of each whole text) of each pair.

    With `job.section.cut_sources`, source ids, or those of all texts of an encoder, are truncated
    to leave space for the added tokens.
    """
    if not pairs:
        return
    texts = zip(*(_split_score(job, pair)[0] for pair in pairs), strict=True)
    most = job.section.max_length - job.form.added_tokens if job.section.cut_sources else None
    cuts = (most, *[most if job.form.encoder else None] * (job.form.texts - 1))
    sides = zip(job.tokenizers, texts, strict=True)
    encoded = (tokenizer.encode(list(of_side)) for tokenizer, of_side in sides)
    for row in zip(*encoded, strict=True):
        yield tuple(ids[:cut] for ids, cut in zip(row, cuts, strict=True)), tuple(map(len, row))


def judge(job: Job, pair: Sequence[str | float] | Fault, ids) -> tuple[str, str, int] | None:
    """Returns (kind, problem, index of the text) of an unusable pair; None for a usable one."""
    if isinstance(pair, Fault):
        return "unreadable", pair.problem, pair.file
    for text, part in enumerate(ids):
        if not len(part):
            return "empty", f"has an empty {SIDES[text]}", text
    sizes = [len(part) + job.form.added_tokens for part in ids]
    for text, size in enumerate(sizes):
        if size > job.section.max_length:
            most = f"config.parallel.max_length={job.section.max_length}"
            return "long", f"has a {SIDES[text]} of {size} tokens, more than {most}", text
    if job.section.max_ratio and max(sizes) > job.section.max_ratio * min(sizes):
        most = f"config.parallel.max_ratio={job.section.max_ratio:g}"
        return "uneven", f"has texts of {sizes[0]} and {sizes[1]} tokens, exceeding {most}", 0
    return None


def _report(
    job: Job, source: RowSource, faults: dict, number: int, fault: tuple[str, str, int]
) -> None:
    kind, what, text = fault
    place = source.place(number, text)
    said = f"{place} {what}"
    if job.section.bad_pairs == "error":
        fix = "Correct it, or skip such pairs with config.parallel.bad_pairs=skip"
        raise place.error(f"{what}. {fix}.", field="config.parallel.bad_pairs")
    count, first = faults.get(kind, (0, said))
    faults[kind] = [count + 1, first]


def _room(job: Job, texts: Sequence[str], ids) -> tuple[int, int]:
    """Returns the lengths for batch planning: of the first text and of the longest other one.

    With sampling, lengths are the maximum of `TRIALS` samples.
    """
    sizes = [len(part) + job.form.added_tokens for part in ids]
    if job.section.sampling:
        for side, (tokenizer, text) in enumerate(zip(job.tokenizers, texts, strict=True)):
            seeds = (int((trial + 0.5) / TRIALS * 2**32) for trial in range(TRIALS))
            drawn = max(len(tokenizer.sample(text, job.section.sampling, seed)) for seed in seeds)
            drawn += job.form.added_tokens
            sizes[side] = max(sizes[side], min(job.section.max_length, drawn))
    return sizes[0], max(sizes[1:])
