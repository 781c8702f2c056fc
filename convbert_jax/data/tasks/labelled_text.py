"""Examples and tasks of labeled text, and their encoding as rows of token ids.

Splits are named "train", "validation" (or "validation_…") and "test" (or "test_…"). A row is
[CLS] text [SEP], or [CLS] first [SEP] second [SEP] with type 1 from the second text on (BERT §3.2).
`samplers` selects the rows of each batch.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces import FinetuneBatch

KINDS = ("classification", "multilabel", "regression", "tagging")
# Default metrics of each kind; the first one selects the best checkpoint.
DEFAULT_METRICS = {
    "classification": ("accuracy", "macro_f1"),
    "multilabel": ("micro_f1", "macro_f1"),
    "regression": ("spearman", "pearson"),
    "tagging": ("span_f1", "accuracy"),
}


@dataclasses.dataclass(frozen=True)
class Example:
    """A labeled text or pair of texts.

    `label` is an index into the task's labels (classification), sorted indices (multilabel), a
    number (regression), an index for each word of `texts[0]`, which are joined by single spaces
    (tagging), or None if unknown.
    """

    id: str  # unique in its split; the index that the GLUE server expects
    texts: tuple[str, ...]
    label: int | float | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LabelledTask:
    """A task and the reader of its examples."""

    name: str
    kind: str  # one of KINDS
    texts: int  # number of texts of an example, 1 or 2
    labels: tuple[str, ...]  # names in the order of the model's outputs; () for regression
    metrics: tuple[str, ...]  # keys of finetuning/scoring.py; the first selects
    splits: tuple[str, ...]  # all splits of the task
    reader: Callable[[str], list[Example]]
    # Labels in the files, if they differ from `labels` ("0" and "1" in GLUE)
    spellings: tuple[str, ...] = ()
    # Splits that are missing on this machine -> error message
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Names of the text columns in the files; (): unnamed
    columns: tuple[str, ...] = ()
    # Regression: the model is trained on labels divided by this (official code: 5 for STS-B)
    scale: float = 1.0
    # The texts are unordered: the official code adds each training pair with its texts swapped
    swap_pairs: bool = False

    def read(self, split: str) -> list[Example]:
        """Returns all examples of a split in the order of the file.

        Raises:
          DataError: the split is missing, or its file is not usable.
        """
        if split in self.absent:
            raise DataError(self.absent[split])
        if split not in self.splits:
            raise DataError(
                f"{self.name} has no split '{split}'. Choose one of: {', '.join(self.splits)}.",
                value=split,
            )
        return self.reader(split)

    def has(self, *splits: str) -> bool:
        """Returns whether all these splits are on this machine."""
        return all(split in self.splits and split not in self.absent for split in splits)

    @property
    def validation_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self.splits if split.startswith("validation"))

    @property
    def test_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self.splits if split.startswith("test"))


def swap_texts(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples and copies with swapped texts (official code: double_unordered)."""
    swapped = [
        dataclasses.replace(example, id=f"{example.id}-swapped", texts=example.texts[::-1])
        for example in examples
    ]
    return [*examples, *swapped]


def require_labels(task: LabelledTask, split: str, examples: Sequence[Example]) -> None:
    """Raises DataError unless all examples have labels."""
    missing = sum(example.label is None for example in examples)
    if missing:
        count = "no labels" if missing == len(examples) else f"{missing} rows without a label"
        raise DataError(
            f"The {split} split of {task.name} cannot be scored: it has {count}. Only predict it, "
            "or use a file with labels.",
            value=split,
        )


class LabelReader:
    """Converts values of a label column into labels of examples."""

    def __init__(self, kind: str, spellings: Sequence[str]):
        self._kind = kind
        self._index = {spelling: index for index, spelling in enumerate(spellings)}

    def read(self, value: Any) -> int | float | tuple[int, ...]:
        """Converts `value`; raises ValueError with a predicate for "FILE line N"."""
        if self._kind == "tagging":
            return tuple(self._lookup(tag) for tag in value)
        if self._kind == "multilabel":
            return tuple(sorted({self._lookup(label) for label in split_labels(value)}))
        if self._kind == "classification":
            return self._lookup(value)
        try:
            number = float(value)
        except (TypeError, ValueError):
            label = shorten(repr(value))
            raise ValueError(f"has the label {label}, which is not a number") from None
        if not math.isfinite(number):
            raise ValueError(f"has the label {value!r}, which is not a finite number")
        return number

    def _lookup(self, value: Any) -> int:
        index = self._index.get(spell(value))
        if index is None:
            known = list(self._index)
            shown = ", ".join(known[:10]) + (f", … ({len(known)} in all)" if known[10:] else "")
            label = shorten(spell(value))
            raise ValueError(f"has the label {label!r}, which is not one of: {shown}")
        return index


def split_labels(value: Any) -> list[Any]:
    """Returns the labels of a multilabel row: a list, or a text with labels separated by |."""
    if isinstance(value, list):
        return value
    return [label for label in spell(value).split("|") if label.strip()]


def spell(value: Any) -> str:
    """Returns a label as text: JSON's true becomes "true", 1 becomes "1"."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def is_unlabelled(value: Any) -> bool:
    """Returns whether a label is missing: null, blank or NaN (as written by pandas)."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


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
    space = " " if tokenizer.keeps_spaces else ""
    flat = _encode_all(
        tokenizer,
        [(space if i else "") + word for sentence in sentences for i, word in enumerate(sentence)],
    )
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
