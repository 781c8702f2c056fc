"""Documents to rows of a fixed length: the layouts "packed" and "electra"; "pairs" is in `pairs`.

All take a document as the token ids of its lines and give rows that are not padded yet.
"""

import dataclasses
import random
from collections.abc import Iterator

from convbert_jax.interfaces.special_ids import SpecialIds

SHORTEST_PIECE = 16  # tokens; a row's end too short for this part of a longer document is padded


@dataclasses.dataclass
class Row:
    """Fields of `interfaces.batch.PairBatch` for one row; of "packed" no types, they are 0 and made
    with the batch; a label of "pairs" alone."""

    tokens: list[int]
    segment_ids: list[int]
    type_ids: list[int] = dataclasses.field(default_factory=list)
    pair_label: int | None = None


class PackedRows:
    """Documents one after the other, each piece as [CLS] piece [SEP] with a segment id of its own.

    A document is cut where a row ends, if at least `SHORTEST_PIECE` of its tokens (an eighth of
    short rows) fit there or all that is left of it; otherwise the row is padded. So long documents
    waste nothing, and at most `SHORTEST_PIECE` + 1 positions are padded where a document begins.
    """

    def __init__(self, length: int, special: SpecialIds):
        self._length = length
        self._special = special
        self._shortest = min(SHORTEST_PIECE, length // 8)
        self._row = Row([], [])

    def add(self, lines: list[list[int]]) -> Iterator[Row]:
        """Rows that became full with this document."""
        ids = [i for line in lines for i in line]
        start = 0
        while start < len(ids):
            room = self._length - len(self._row.tokens) - 2
            if room < min(self._shortest, len(ids) - start):
                yield from self.flush()
                continue
            piece = ids[start : start + room]
            start += room
            segment = self._row.segment_ids[-1] + 1 if self._row.segment_ids else 1
            self._row.tokens += [self._special.cls, *piece, self._special.sep]
            self._row.segment_ids += [segment] * (len(piece) + 2)

    def flush(self) -> Iterator[Row]:
        """The row in hand, if it has anything."""
        if self._row.tokens:
            yield self._row
            self._row = Row([], [])


class ElectraRows:
    """The example builder of ELECTRA's release: two segments of neighboring lines of a document.

    Lines are collected up to a target length. Of every ten examples one has a single segment; in
    the others the first segment takes the lines that fit into half the target. Every twentieth
    target is short, uniform in 5 to `length`. Text beyond the row is dropped, not carried over.
    (ELECTRA, Clark et al., 2020, build_pretraining_dataset.py in its release.)

    With `release_bug`, the two tests for an empty segment are inverted as in ConvBERT's release:
    once the first segment has a token everything joins it, and where the first line is as long as
    half the target the first segment can stay empty.
    """

    def __init__(self, length: int, special: SpecialIds, *, release_bug: bool, seed: str):
        self._length = length
        self._special = special
        self._release_bug = release_bug
        self._random = random.Random(seed)
        self._lines: list[list[int]] = []
        self._size = 0
        self._target = length

    def add(self, lines: list[list[int]]) -> Iterator[Row]:
        """All examples of this document; the last one is short."""
        for line in lines:
            self._lines.append(line)
            self._size += len(line)
            if self._size >= self._target:
                yield self._example()
        if self._size:
            yield self._example()
        self._lines = []

    def flush(self) -> Iterator[Row]:
        """Nothing: examples do not cross documents."""
        return iter(())

    def _example(self) -> Row:
        first, second = self._segments()
        first = first[: self._length - 2]
        second = second[: max(0, self._length - len(first) - 3)]
        self._lines, self._size = [], 0
        self._target = self._length
        if self._random.random() < 0.05:
            self._target = self._random.randint(5, self._length)
        tokens = [self._special.cls, *first, self._special.sep]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, self._special.sep]
            types += [1] * (len(second) + 1)
        return Row(tokens, [1] * len(tokens), types)

    def _segments(self) -> tuple[list[int], list[int]]:
        middle = (self._target - 3) // 2  # [CLS] and two [SEP] are not there yet
        if self._random.random() < 0.1:
            middle = 100_000  # one segment only, as in single-sentence tasks
        first: list[int] = []
        second: list[int] = []
        for line in self._lines:
            take = bool(first) if self._release_bug else not first
            take = take or len(first) + len(line) < middle
            if not take and len(first) < middle and bool(second) == self._release_bug:
                take = self._random.random() < 0.5
            if take:
                first += line
            else:
                second += line
        return first, second
