"""Layout "pairs": rows of two texts, with a label whether the second follows the first.

"next" is BERT's next sentence prediction (Devlin et al., 2019, §3.1, task 2): half of the second
texts come from another document. "order" is ALBERT's sentence order prediction (Lan et al., 2020,
§3.1): half of the pairs are swapped.
"""

import bisect
import itertools
import random
import re
from collections.abc import Iterator

from convbert_jax.data.corpus.packing import Row
from convbert_jax.interfaces.special_ids import SpecialIds

FOLLOWS, OTHER, UNLABELLED = 0, 1, -1  # labels, as Hugging Face's next_sentence_label; -1: no pair
POOL_TOKENS = 1_000_000  # of buffered documents, from which second texts are sampled; about 40 MB
SHORT_SHARE = 0.1  # fraction of rows with a short target, as in BERT's official code
DRAWS = 10  # attempts to find a second text in another document, as in BERT's official code
# Sentence ends that need no following space (Chinese and Japanese, Devanagari, Urdu and Arabic,
# Amharic, Burmese, Khmer), and closing quotation marks and brackets.
_ENDS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u1362\u104b\u17d4\u17d5"
_CLOSING = r"\"')\]\u2019\u201d\u00bb\u300d\u300f\uff09\u3011\u3015\u3009\u300b"
_SENTENCE_END = re.compile(rf"[.!?][{_CLOSING}]*(\s+)|[{_ENDS}][{_ENDS}.!?]*[{_CLOSING}]*(\s*)")


def split_sentences(line: str) -> list[str]:
    """Splits a line after every . ! or ? before a space, and after sentence ends of other scripts.

    Closing quotation marks and brackets belong to the sentence that they end. Abbreviations
    ("Mr. X") are split too, which only makes sentences shorter.
    """
    parts, start = [], 0
    for end in _SENTENCE_END.finditer(line):
        parts.append(line[start : end.start(end.lastindex)])
        start = end.end()
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
