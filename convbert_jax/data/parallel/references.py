"""Pairs to score what a model writes by, as their files have them: not cut, not normalized."""

import dataclasses
import itertools

import numpy as np

from convbert_jax.config import Config, ParallelSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import pair_worker
from convbert_jax.data.parallel.pair_source import open_pairs
from convbert_jax.data.parallel.parallel_text import ParallelText, make_job
from convbert_jax.data.tables.table_formats import Fault


@dataclasses.dataclass(frozen=True)
class References:
    """Texts and what is right for each.

    Attributes:
      pairs: a source and its references, one or more.
      bad: how many more there are, that cannot be read, and what is wrong with the first.
    """

    pairs: tuple[tuple[str, ...], ...]
    bad: tuple[int, str] = (0, "")


def read_heldout(config: Config, text: ParallelText, rows: int) -> References:
    """The pairs that training holds out, found again by its rules in the files that it was prepared
    from.

    Args:
      rows: how many, spread evenly as `batching.evaluation_batches` does; 0 is all.

    Raises:
      DataError: the files are not there any more, or are others.
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
            f"{source.name} holds {len(found)} pairs to evaluate on, and {text.directory} was "
            f"prepared with {split.rows}; put the files back that it was prepared from.",
            path=text.directory,
        )
    used = min(rows or split.rows, split.rows)
    return References(tuple(found[place] for place in np.arange(used) * split.rows // used))


def check_references(spec: str, section: ParallelSection, *, alike: bool) -> None:
    """Reads a source through for what keeps its pairs from being scored.

    Args:
      alike: whether each pair must have as many references: a corpus score of several takes as many
        for each text.

    Raises:
      DataError: a further reference that cannot be read, as the pair without it could be trained
        on, files of unequal line count, or references that are not `alike`.
    """
    source = open_pairs(spec, section, "all")
    first = None
    for number, pair in itertools.chain.from_iterable(map(source.pairs, source.units)):
        if isinstance(pair, Fault):
            if pair.file > 1:
                place = source.place(number, pair.file)
                raise DataError(
                    f"{place} {pair.problem}; mend it, or leave that "
                    "file of further references out.",
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
                f"{source.place(many[0])} has {many[1]}, but BLEU takes as many for each text; add "
                "what is missing or leave the further ones out.",
                path=place.path,
                line=place.line,
            )


def read_whole(spec: str, section: ParallelSection) -> References:
    """All pairs of a source, as `open_pairs` takes it, in order.

    Raises:
      DataError: it cannot be read, it has no pair, or a reference is empty.
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
                f"{place} has an empty reference, which nothing can be compared "
                "to; mend it or leave the pair out.",
                path=place.path,
                line=place.line,
            )
        else:
            pairs.append(pair)
    if not pairs:
        raise DataError(
            f"{spec} has no pair to score by{f'; the first: {first}' * bool(first)}.", value=spec
        )
    return References(tuple(pairs), (bad, first))
