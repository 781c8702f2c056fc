"""Encodes texts as rows of token ids, and makes batches of fixed shapes from rows.

A row is [CLS] text [SEP], or [CLS] first [SEP] second [SEP] with type 1 from the second text on
(BERT §3.2). `length_buckets.py` selects the rows of each batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces.batch import FinetuneBatch

IGNORED = -1  # tag of tokens that do not begin a word
_AT_ONCE = 4_096  # texts per call of the tokenizer


@dataclasses.dataclass(frozen=True)
class Rows:
    """N encoded examples, padded to L tokens.

    Attributes:
      lengths: [N], number of tokens of each row.
      by_token: name -> [N, L, ...], truncated to the length of the bucket: tokens, type_ids and
        the columns of an objective, see `interfaces.batch`.
      by_row: name -> [N, ...], for example labels.
    """

    lengths: np.ndarray
    by_token: Mapping[str, np.ndarray]
    by_row: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def with_columns(self, **by_row: np.ndarray) -> "Rows":
        """Returns the same rows with additional columns in `by_row`."""
        return dataclasses.replace(self, by_row={**self.by_row, **by_row})

    def batch(self, index: np.ndarray, length: int) -> FinetuneBatch:
        """Returns the rows at `index` [..., B], truncated to `length` tokens, as [..., B, ...].

        An index of -1 is a padding row with `weight` 0. `segment_ids` is 1 for tokens and 0 for
        padding.
        """
        index = np.asarray(index)
        columns = {name: values[index, :length] for name, values in self.by_token.items()}
        columns |= {name: values[index] for name, values in self.by_row.items()}
        real = np.arange(length) < self.lengths[index][..., None]
        columns["segment_ids"] = real.astype(np.int32)
        columns["weight"] = (index >= 0).astype(np.float32)
        return columns


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Encoded rows, and the number of truncated examples."""

    rows: Rows
    truncated: int


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Sequence[str]], *, length: int, types: int = 2
) -> Encoded:
    """Encodes each text or pair of texts as a row.

    Args:
      texts: tuples of one text, or tuples of two texts.
      length: maximum tokens of a row; in a pair, the longer text is truncated first.
      types: number of segment types of the model; with 1, both texts have type 0.
    """
    special = tokenizer.special
    parts = [_encode_all(tokenizer, column) for column in zip(*texts, strict=True)]
    pieces, second, truncated = [], [], 0
    for row in zip(*parts, strict=True):
        kept = _fit(row, length - 1 - len(row))
        truncated += sum(map(len, kept)) < sum(map(len, row))
        ids = [special.cls]
        for part in kept:
            start = len(ids)
            ids += [*part, special.sep]
        pieces.append(ids)
        second.append(start if len(kept) > 1 and types > 1 else len(ids))
    return Encoded(pad_rows(pieces, length, pad=special.pad, second=second), truncated)


def encode_words(
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    tags: Sequence[Sequence[int] | None],
    *,
    length: int,
) -> Encoded:
    """Encodes each sentence of words as a row; the first token of a word has its tag.

    Adds two columns by token: `tags` [N, L] and `words` [N, L], the index of the word that begins
    at a token. Both are IGNORED where no word begins; `tags` is also IGNORED without tags. A word
    without tokens becomes [UNK]. Words that do not fit are dropped.
    """
    special = tokenizer.special
    flat = _encode_all(tokenizer, [word for sentence in sentences for word in sentence])
    pieces, words, labels, truncated, place = [], [], [], 0, 0
    for sentence, tagged in zip(sentences, tags, strict=True):
        ids, begins = [special.cls], [IGNORED]
        for number, part in enumerate(flat[place : place + len(sentence)]):
            part = part or [special.unknown]
            if len(ids) + len(part) >= length:
                truncated += 1
                break
            ids += part
            begins += [number] + [IGNORED] * (len(part) - 1)
        place += len(sentence)
        pieces.append([*ids, special.sep])
        words.append([*begins, IGNORED])
        labels.append([IGNORED if tagged is None or w < 0 else tagged[w] for w in words[-1]])
    columns = {"tags": _pad(labels, IGNORED, length), "words": _pad(words, IGNORED, length)}
    rows = pad_rows(pieces, length, pad=special.pad)
    return Encoded(dataclasses.replace(rows, by_token={**rows.by_token, **columns}), truncated)


def pad_rows(
    pieces: Sequence[Sequence[int]], length: int, *, pad: int, second: Sequence[int] | None = None
) -> Rows:
    """Pads rows of token ids to `length`.

    Args:
      second: start of type 1 in each row (the row's length: no type 1); None: all types are 0.
    """
    lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
    begins = lengths if second is None else np.asarray(second)
    places = np.arange(length)
    types = (places >= begins[:, None]) & (places < lengths[:, None])
    tokens = _pad(pieces, pad, length)
    return Rows(lengths, {"tokens": tokens, "type_ids": types.astype(np.int32)})


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encoded = []
    for start in range(0, len(texts), _AT_ONCE):
        encoded += tokenizer.encode(texts[start : start + _AT_ONCE])
    return encoded


def _fit(parts: Sequence[list[int]], budget: int) -> list[list[int]]:
    """Truncates parts to `budget` tokens in total, the longer one first."""
    if sum(map(len, parts)) <= budget:
        return list(parts)
    if len(parts) == 1:
        return [parts[0][:budget]]
    first, second = parts
    short = min(len(first), len(second))
    if short <= budget // 2:
        kept = (short, budget - short) if len(first) == short else (budget - short, short)
    else:
        kept = (budget - budget // 2, budget // 2)
    return [first[: kept[0]], second[: kept[1]]]


def _pad(pieces: Sequence[Sequence[int]], filler: int, length: int) -> np.ndarray:
    lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
    table = np.full((len(pieces), length), filler, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.concatenate(
        [np.asarray(ids, np.int32) for ids in pieces] or [np.zeros(0, np.int32)]
    )
    return table
