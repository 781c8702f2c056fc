"""Documents to rows of two texts, and whether the second follows the first: the layout "pairs".

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

FOLLOWS, OTHER, UNLABELLED = 0, 1, -1  # of a row: as Hugging Face's next_sentence_label; no pair
POOL_TOKENS = 1_000_000  # of documents in memory, to take second texts from; some 40 MB
SHORT_SHARE = 0.1  # of rows that are made short on purpose, as in BERT's release
DRAWS = 10  # places tried for a second text of another document, as in BERT's release
# Ends that need no blank behind them: of Chinese and Japanese, Hindi and its kin, Urdu and Arabic,
# Amharic, Burmese, Khmer. And what closes a quotation behind an end.
_ENDS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u1362\u104b\u17d4\u17d5"
_CLOSING = r"\"')\]\u2019\u201d\u00bb\u300d\u300f\uff09\u3011\u3015\u3009\u300b"
_SENTENCE_END = re.compile(rf"[.!?][{_CLOSING}]*(\s+)|[{_ENDS}][{_ENDS}.!?]*[{_CLOSING}]*(\s*)")


def split_sentences(line: str) -> list[str]:
    """A line behind every . ! or ? that a blank follows, and behind their kin of other scripts;
    what closes a quotation there belongs to its sentence.

    So "Mr. X" is cut too: what an abbreviation cuts is a shorter sentence, here no harm.
    """
    parts, start = [], 0
    for end in _SENTENCE_END.finditer(line):
        parts.append(line[start : end.start(end.lastindex)])
        start = end.end()
    return [part for part in [*parts, line[start:]] if part.strip()]


class PairRows:
    """[CLS] first [SEP] second [SEP], both whole sentences of neighboring text or a false pair.

    A row takes the sentences that fit its target, which is its length but for every tenth row,
    where it is uniform from 2; those that fit a uniform part of it, up to three quarters, are the
    first text. No text is lost: a sentence that does not fit begins the next row, and so do those
    that the second text of another document has displaced.

    Lengths tell little: both texts begin and end with a sentence, and a false second text begins
    where one would have been cut and is filled up by the same rule as a true one. For "order" every
    other document, by chance, is read from its end: else the earlier text would be the shorter one.
    What is left: a sentence that did not fit begins the next row, so that sentences at some ends of
    texts are longer than others.

    A row has no label where there is no pair to judge: a sentence whose neighbor does not fit
    beside it, a document of one sentence, and with "next" a row beside which no text of another
    document fits. (BERT's release gives a lone sentence a false second text, always.)
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
        self._ends: list[int] = []  # tokens of all documents up to each
        self._size = 0

    def add(self, lines: list[list[int]]) -> Iterator[Row]:
        """Rows of the documents so far, once they are many; `lines` are sentences."""
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
        """Rows of the documents in hand, in their order."""
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
            if not self._next:  # there the end of a document would tell a true second text
                target = min(target, self._left(sentences, start))
            middle = self._fill(sentences, start, 0, self._cut(target))
            first = sentences[start:middle]
            taken = sum(map(len, first))
            end = self._fill(sentences, middle, taken, target)
            second, label, start = sentences[middle:end], FOLLOWS, end
            if backwards:
                first, second = (second[::-1] or first[::-1]), (second and first[::-1])
            if not second or (self._next and len(self._documents) == 1):
                label = UNLABELLED  # a document alone would have true pairs only
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
        """The end of the sentences from `start` that fit `target` beside `taken` tokens; one of
        them is enough if it fits the row."""
        size = taken
        for end in range(start, len(sentences)):
            size += len(sentences[end])
            if size > (self._room if end == start else target):
                return end
        return len(sentences)

    def _cut(self, target: int) -> int:
        """Most tokens of a first text; a second one fits beside them."""
        return self._random.randint(1, target - target // 4)

    def _left(self, sentences: list[list[int]], start: int) -> int:
        """Tokens from `start` on, counted up to a row."""
        end = self._fill(sentences, start, 0, self._room)
        return sum(map(len, sentences[start:end])) if end == len(sentences) else self._room

    def _other(self, number: int, taken: int, target: int) -> list[list[int]]:
        """Sentences of another document to stand beside `taken` tokens; none where none fit.

        A document is drawn by its tokens, as true second texts are: of short ones, all alike, there
        would be too many. And they begin behind a first text that is left out: one cut by tokens
        is followed by a sentence that is longer than the mean.
        """
        for _ in range(DRAWS):
            drawn = bisect.bisect(self._ends, self._random.randrange(self._ends[-1]))
            if drawn == number:
                continue
            sentences = self._documents[drawn]
            begun = self._random.randrange(len(sentences))
            start = self._fill(sentences, begun, 0, self._cut(target))
            if start == len(sentences) or (start and len(sentences[start - 1]) == self._room):
                continue  # the rest of a sentence longer than a row: no true second text begins so
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
