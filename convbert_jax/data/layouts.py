"""Documents as rows of token ids: the layouts "packed", "electra" and "pairs", and their worker.

All layouts take a document as the token ids of its lines and return rows without padding.
`process_unit` writes a shard for each split of a unit and a record of counts.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from convbert_jax.config import DataSection
from convbert_jax.data.prepared import UnitWriter, hashed
from convbert_jax.data.readers.sources import Source
from convbert_jax.data.readers.text_files import cut_document
from convbert_jax.data.shards import Row, row_dtype, to_records
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, count_characters
from convbert_jax.interfaces import SpecialIds

SHORTEST_PIECE = 16  # tokens; a shorter part of a longer document does not fill the end of a row


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


FOLLOWS, OTHER, UNLABELLED = 0, 1, -1  # labels, as Hugging Face's next_sentence_label; -1: no pair
POOL_TOKENS = 1_000_000  # of buffered documents, from which second texts are sampled; about 40 MB
SHORT_SHARE = 0.1  # fraction of rows with a short target, as in BERT's official code
DRAWS = 10  # attempts to find a second text in another document, as in BERT's official code
# Sentence ends that need no following space (Chinese and Japanese, Devanagari, Urdu and Arabic,
# Amharic, Burmese, Khmer), and closing quotation marks and brackets.
_ENDS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u1362\u104b\u17d4\u17d5"
_CLOSING = r"\"')\]\u2019\u201d\u00bb\u300d\u300f\uff09\u3011\u3015\u3009\u300b"
_SENTENCE_END = re.compile(rf"[.!?][{_CLOSING}]*(\s+)|[{_ENDS}][{_ENDS}.!?]*[{_CLOSING}]*(\s*)")


def split_sentences(line: str, keeps_spaces: bool = False) -> list[str]:
    """Splits a line after every . ! or ? before a space, and after sentence ends of other scripts.

    Closing quotation marks and brackets belong to the sentence that they end. Abbreviations
    ("Mr. X") are split too, which only makes sentences shorter.

    Args:
      keeps_spaces: whether a sentence includes the white space before it, and the last one the
        white space after it; else white space between sentences is left out.
    """
    parts, start = [], 0
    for end in _SENTENCE_END.finditer(line):
        if keeps_spaces and end.end() == len(line):
            break
        parts.append(line[start : end.start(end.lastindex)])
        start = end.start(end.lastindex) if keeps_spaces else end.end()
    return [part for part in [*parts, line[start:]] if part.strip()]


class PairRows:
    """Rows [CLS] first [SEP] second [SEP] of whole sentences: true or false pairs.

    A row takes the sentences that fit its target: the row length, or for one row in ten uniform
    from 2 to the row length. The sentences that fit a uniform part of the target, up to three
    quarters, are the first text. No text is lost: sentences that do not fit, or that were replaced
    by a text of another document, start the next row.

    Lengths reveal little about the label. Both texts begin and end at sentence boundaries, and a
    false second text is cut and filled by the same rules as a true one. For "order" half of the
    documents are read backwards, because the earlier text would otherwise be the shorter one. One
    bias remains: a sentence that did not fit starts the next row, so sentences at some boundaries
    are longer than others.

    A row has no label if it has no pair: the next sentence does not fit, the document has one
    sentence, or (for "next") no text of another document fits. (BERT's official code always adds a
    false second text to a single sentence.)
    """

    def __init__(self, length: int, special: SpecialIds, *, pairs: str, seed: str):
        """
        Args:
          pairs: "next" or "order".
        """
        self._room = length - 3  # [CLS] and two [SEP]
        self._special = special
        self._next = pairs == "next"
        self._random = random.Random(seed)
        self._documents: list[list[list[int]]] = []
        self._ends: list[int] = []  # cumulative number of tokens of the documents
        self._size = 0

    def add(self, lines: list[list[int]]) -> Iterator[Row]:
        """Adds a document; yields the rows of all documents once the pool is full.

        Args:
          lines: token ids of its sentences.
        """
        sentences = [
            line[start : start + self._room]
            for line in lines
            for start in range(0, len(line), self._room)
        ]
        if sentences:
            self._documents.append(sentences)
            self._size += sum(map(len, sentences))
        if self._size >= POOL_TOKENS:
            yield from self.flush()

    def flush(self) -> Iterator[Row]:
        """Yields the rows of all documents in the pool, in order."""
        sizes = (sum(map(len, sentences)) for sentences in self._documents)
        self._ends = list(itertools.accumulate(sizes))
        for number, sentences in enumerate(self._documents):
            yield from self._rows(number, sentences)
        self._documents, self._size = [], 0

    def _rows(self, number: int, sentences: list[list[int]]) -> Iterator[Row]:
        backwards = not self._next and self._random.random() < 0.5
        if backwards:
            sentences = sentences[::-1]
        start = 0
        while start < len(sentences):
            target = self._room
            if self._random.random() < SHORT_SHARE:
                target = self._random.randint(2, self._room)
            if not self._next:  # with "next", the end of a document would reveal a true second text
                target = min(target, self._left(sentences, start))
            middle = self._fill(sentences, start, 0, self._cut(target))
            first = sentences[start:middle]
            taken = sum(map(len, first))
            end = self._fill(sentences, middle, taken, target)
            second, label, start = sentences[middle:end], FOLLOWS, end
            if backwards:
                first, second = (second[::-1] or first[::-1]), (second and first[::-1])
            if not second or (self._next and len(self._documents) == 1):
                label = UNLABELLED  # a single document has true pairs only
            elif self._random.random() < 0.5:
                label = OTHER
                if not self._next:
                    first, second = second, first
                elif other := self._other(number, taken, target):
                    second, start = other, middle
                else:
                    label = UNLABELLED
            yield self._row(first, second, label)

    def _fill(self, sentences: list[list[int]], start: int, taken: int, target: int) -> int:
        """Returns the end of the sentences from `start` that fit `target` with `taken` tokens.

        The first sentence may exceed `target` if it fits the row.
        """
        size = taken
        for end in range(start, len(sentences)):
            size += len(sentences[end])
            if size > (self._room if end == start else target):
                return end
        return len(sentences)

    def _cut(self, target: int) -> int:
        """Draws the maximum number of tokens of a first text, which leaves space for a second."""
        return self._random.randint(1, target - target // 4)

    def _left(self, sentences: list[list[int]], start: int) -> int:
        """Counts the tokens from `start` to the end of the document, at most one row."""
        end = self._fill(sentences, start, 0, self._room)
        return sum(map(len, sentences[start:end])) if end == len(sentences) else self._room

    def _other(self, number: int, taken: int, target: int) -> list[list[int]]:
        """Samples sentences of another document that fit with `taken` tokens; [] if none fit.

        Documents are sampled in proportion to their tokens, as for true second texts; uniform
        sampling would prefer short documents. The sentences start after an omitted first text,
        because a sentence after a cut by tokens is longer than average.
        """
        for _ in range(DRAWS):
            drawn = bisect.bisect(self._ends, self._random.randrange(self._ends[-1]))
            if drawn == number:
                continue
            sentences = self._documents[drawn]
            begun = self._random.randrange(len(sentences))
            start = self._fill(sentences, begun, 0, self._cut(target))
            if start == len(sentences) or (start and len(sentences[start - 1]) == self._room):
                continue  # inside a sentence longer than a row, where no true second text begins
            end = self._fill(sentences, start, taken, target)
            if end > start:
                return sentences[start:end]
        return []

    def _row(self, first: list[list[int]], second: list[list[int]], label: int) -> Row:
        tokens = [self._special.cls, *(i for part in first for i in part), self._special.sep]
        types = [0] * len(tokens)
        if second:
            tokens += [*(i for part in second for i in part), self._special.sep]
            types += [1] * (len(tokens) - len(types))
        return Row(tokens, [1] * len(tokens), types, label)


BATCH_CHARACTERS = 200_000  # tokenized at once
SHUFFLED_CHARACTERS = 64_000_000  # of documents that are shuffled in memory


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings shared by all units of a corpus."""

    directory: Path
    tokenizer: Tokenizer
    data: DataSection
    sentence_pairs: str  # of the layout "pairs"
    heldout_fraction: float
    pieces: int  # per document; more than 1 if the source is a single document


def heldout_hash(text: str) -> float:
    """Hashes a text to a number in [0, 1); texts below the held-out fraction are held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def process_unit(
    job: Job, index: int, source: Source, unit: Any, split: str = ""
) -> dict[str, Any]:
    """Writes the shards of unit `index`, then its record, and returns the record.

    Args:
      split: "train" or "validation" for all documents, or "" to hold some out by their hash.

    Raises:
      DataError: the text is unreadable or the disk is full; no record is written.
    """
    special = job.tokenizer.special
    dtype = row_dtype(job.data.length, job.tokenizer.vocab_size, job.data.layout)
    padded = functools.partial(to_records, dtype=dtype, pad=special.pad)
    writer = UnitWriter(job.directory, index, padded)
    counts, tally = writer.counts, writer.tally
    layouts = {name: _make_layout(job, seed=f"{index} {name}") for name in counts}

    def write(name: str, rows: Iterable[Row]) -> None:
        rows = list(rows)
        counts[name]["tokens"] += sum(len(row.tokens) for row in rows)
        if job.data.layout == "pairs":
            counts[name]["pairs"] += sum(row.pair_label != UNLABELLED for row in rows)
        writer.write(name, rows)

    documents = hashed(source.documents(unit, tally), writer.digest)
    if job.pieces > 1:
        documents = (piece for text in documents for piece in cut_document(text, job.pieces))
    if job.data.shuffle_documents:
        documents = _shuffled(documents, random.Random(f"{index} documents"))
    sentences = job.data.layout == "pairs"
    for text, parts, lines in _encoded(documents, job.tokenizer, sentences=sentences):
        tally["bytes"] += len(text.encode())
        if not any(lines):
            tally["dropped"] += 1
            continue
        pairs = zip(parts, lines, strict=True)
        affected = [part for part, line in pairs if special.unknown in line]
        tally["unknown"] += job.tokenizer.count_unknown(affected)
        tally["characters"] += count_characters([text])
        name = split or ("validation" if heldout_hash(text) < job.heldout_fraction else "train")
        counts[name]["documents"] += 1
        counts[name]["words"] += len(text.split())
        write(name, layouts[name].add(lines))
    for name in counts:
        write(name, layouts[name].flush())
    return writer.finish(
        **{name: tally[name] for name in ("bytes", "dropped", "characters", "unknown")},
        undecodable=tally["undecodable"],
        skipped=tally["skipped"],
        encoding_errors=job.data.encoding_errors,
    )


def _make_layout(job: Job, seed: str) -> PackedRows | ElectraRows | PairRows:
    length, special = job.data.length, job.tokenizer.special
    if job.data.layout == "electra":
        return ElectraRows(length, special, release_bug=job.data.release_builder_bug, seed=seed)
    if job.data.layout == "pairs":
        return PairRows(length, special, pairs=job.sentence_pairs, seed=seed)
    return PackedRows(length, special)


def _shuffled(documents: Iterator[str], rng: random.Random) -> Iterator[str]:
    """Shuffles `documents` within buffers of `SHUFFLED_CHARACTERS`, which hold most units."""
    waiting, size = [], 0
    for text in documents:
        waiting.append(text)
        size += len(text)
        if size >= SHUFFLED_CHARACTERS:
            rng.shuffle(waiting)
            yield from waiting
            waiting, size = [], 0
    rng.shuffle(waiting)
    yield from waiting


def _encoded(
    documents: Iterator[str], tokenizer: Tokenizer, *, sentences: bool
) -> Iterator[tuple[str, list[str], list[list[int]]]]:
    """Yields (document, lines, token ids of each line), tokenizing many documents at once.

    Args:
      sentences: whether sentences take the place of the lines.
    """

    def encode(batch: list[str]) -> Iterator[tuple[str, list[str], list[list[int]]]]:
        lines = [tokenizer.split_lines(text) for text in batch]
        if sentences:
            lines = [
                [
                    part
                    for line in document
                    for part in split_sentences(line, tokenizer.keeps_spaces)
                ]
                for document in lines
            ]
        ids = iter(tokenizer.encode([line for document in lines for line in document]))
        for text, document in zip(batch, lines, strict=True):
            yield text, document, [next(ids) for _ in document]

    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield from encode(batch)
            batch, size = [], 0
    yield from encode(batch)
