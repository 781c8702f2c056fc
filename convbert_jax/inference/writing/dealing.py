"""Batches texts of different lengths in a few shapes, each compiled once."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from convbert_jax.config.sequences.sections import DecodingSection
from convbert_jax.data.tasks.length_buckets import choose_buckets
from convbert_jax.inference.predictor import choose_batch_size

SHORTEST = 16  # minimum padded length in tokens


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of texts.

    Attributes:
      places: indices of the texts [B], -1 for padding rows.
      length: padded length in tokens.
    """

    places: np.ndarray
    length: int


def deal(
    lengths: Sequence[int], longest: int, batch_tokens: int, *, exact: bool = False
) -> Iterator[Batch]:
    """Yields batches of texts of similar length, the shortest first; each text occurs once.

    Padded lengths are powers of two and `longest`. Each length has up to three numbers of rows, see
    `choose_batch_size`.

    Args:
      lengths: tokens of each text.
      longest: maximum tokens of a text.
      batch_tokens: maximum of rows x length, unless a single text is longer.
      exact: batch only texts of equal length without padding, for a model that reads padding.
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
    """Returns the maximum output length for a source of `tokens` tokens.

    As in fairseq, `tokens` includes the source's end token; the result excludes the output's.
    """
    return int(decoding.length_ratio * tokens + decoding.length_extra)
