"""Layouts "packed" and "electra" ("pairs" is in `pairs`): documents to rows of a fixed length.

All layouts take a document as the token ids of its lines and return rows without padding.
"""

import dataclasses
import random
from collections.abc import Iterator

from convbert_jax.interfaces.special_ids import SpecialIds

SHORTEST_PIECE = 16  # tokens; a shorter part of a longer document does not fill the end of a row


@dataclasses.dataclass
class Row:
    """Fields of `interfaces.batch.PairBatch` for one row.

    "packed" has no type ids (they are 0 and added to the batch); only "pairs" has a label.
    """

    tokens: list[int]
    segment_ids: list[int]
    type_ids: list[int] = dataclasses.field(default_factory=list)
    pair_label: int | None = None


class PackedRows:
    """Concatenated documents, each piece as [CLS] piece [SEP] with its segment id.

    A document is cut at the end of a row if at least `SHORTEST_PIECE` of its tokens (an eighth of a
    short row) or its whole rest fit there; otherwise the row is padded. Long documents therefore
    need no padding, and at most `SHORTEST_PIECE` + 1 positions are padded before a document.
    """

    def __init__(self, length: int, special: SpecialIds):
        self._length = length
        self._special = special
        self._shortest = min(SHORTEST_PIECE, length // 8)
        self._row = Row([], [])

    def add(self, lines: list[list[int]]) -> Iterator[Row]:
        """Adds a document and yields the rows that it completes."""
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
        """Yields the current row unless it is empty."""
        if self._row.tokens:
            yield self._row
            self._row = Row([], [])


class ElectraRows:
    """Examples of ELECTRA's official code: two segments of neighboring lines of a document.

    Lines are collected up to a target length. One example in ten has a single segment; in the
    others the first segment takes the lines that fit into half the target. One target in twenty is
    short, uniform in 5 to `length`. Text beyond the row is dropped. (ELECTRA, Clark et al., 2020,
    build_pretraining_dataset.py of the official code.)

    With `release_bug`, the two tests for an empty segment are inverted as in ConvBERT's official
    code: all lines join a first segment that has a token, and the first segment can stay empty if
    the first line is at least half as long as the target.
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
        """Yields all examples of a document; the last one is short."""
        for line in lines:
            self._lines.append(line)
            self._size += len(line)
            if self._size >= self._target:
                yield self._example()
        if self._size:
            yield self._example()
        self._lines = []

    def flush(self) -> Iterator[Row]:
        """Yields nothing, because examples do not cross documents."""
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
        middle = (self._target - 3) // 2  # without [CLS] and two [SEP]
        if self._random.random() < 0.1:
            middle = 100_000  # a single segment, as in single-sentence tasks
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
