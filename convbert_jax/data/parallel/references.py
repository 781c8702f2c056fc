"""Reference texts for scoring generated text, unmodified: not truncated, not normalized."""

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
