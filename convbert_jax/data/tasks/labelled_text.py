"""Examples and tasks of labeled text.

GLUE tasks are defined in `glue.py`, user-defined tasks by a config section in `own_task.py`.
Splits are named "train", "validation" (or "validation_…") and "test" (or "test_…").
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convbert_jax.data.errors import DataError, shorten

KINDS = ("classification", "regression", "tagging")
# Default metrics of each kind; the first one selects the best checkpoint.
DEFAULT_METRICS = {
    "classification": ("accuracy", "macro_f1"),
    "regression": ("spearman", "pearson"),
    "tagging": ("span_f1", "accuracy"),
}


@dataclasses.dataclass(frozen=True)
class Example:
    """A labeled text or pair of texts.

    `label` is an index into the task's labels (classification), a number (regression), an index for
    each word of `texts[0]`, which are joined by single spaces (tagging), or None if unknown.
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


def spell(value: Any) -> str:
    """Returns a label as text: JSON's true becomes "true", 1 becomes "1"."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def is_unlabelled(value: Any) -> bool:
    """Returns whether a label is missing: null, blank or NaN (as written by pandas)."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())
