"""Texts of many lengths to batches of few shapes, each of which is compiled once."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from convbert_jax.config.sequences.sections import DecodingSection
from convbert_jax.data.tasks.length_buckets import choose_buckets
from convbert_jax.inference.predictor import choose_batch_size

SHORTEST = 16  # tokens that a text is padded to


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts that are written together.

    Attributes:
      places: of the texts, [B], -1 for a filler.
      length: tokens that they are padded to.
    """

    places: np.ndarray
    length: int


def deal(
    lengths: Sequence[int], longest: int, batch_tokens: int, *, exact: bool = False
) -> Iterator[Batch]:
    """Each text once, the shortest first, beside texts of its length.

    Padded lengths are powers of two and at last `longest`; rows times length are at most
    `batch_tokens`, unless one text has more; and of each length there are up to three numbers of
    rows (`choose_batch_size`).

    Args:
      exact: pads nothing, for a model that reads padding.
    """
    lengths = np.asarray(lengths)
    buckets = np.unique(lengths)
    if not exact:
        powers = [SHORTEST << i for i in range(longest.bit_length())]
        buckets = np.asarray(choose_buckets(powers, longest))
    of = np.searchsorted(buckets, lengths)
    for number, bucket in enumerate(map(int, buckets)):
        members = np.flatnonzero(of == number)
        members = members[np.argsort(lengths[members], kind="stable")]
        rows = choose_batch_size(len(members), max(1, batch_tokens // bucket))
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            filler = np.full(rows - len(part), -1)
            yield Batch(np.concatenate([part, filler]), bucket)


def most_written(tokens: int, decoding: DecodingSection) -> int:
    """Most tokens that are written to a source of so many, its end mark counted and their own
    not, as fairseq counts them.
    """
    return int(decoding.length_ratio * tokens + decoding.length_extra)
