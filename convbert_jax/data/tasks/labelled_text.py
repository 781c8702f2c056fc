"""Labelled text: what an example and a task are, and how one file of either becomes examples.

A task is data: the table of GLUE is in `glue.py`, tasks of the user's own come from a section of
the config in `own_task.py`. Splits are named "train", "validation" (or "validation_…") and "test"
(or "test_…").
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convbert_jax.data.errors import DataError, shorten

KINDS = ("classification", "regression", "tagging")
# What is reported for each kind where a task names nothing else; the first one selects.
DEFAULT_METRICS = {
    "classification": ("accuracy", "macro_f1"),
    "regression": ("spearman", "pearson"),
    "tagging": ("span_f1", "accuracy"),
}


@dataclasses.dataclass(frozen=True)
class Example:
    """One labelled text or pair of texts.

    `label` is an index into the task's labels, a number for regression, an index for each word for
    tagging (the words of `texts[0]`, joined by single blanks), or None where it is not known.
    """

    id: str  # unique in its split; the index that the GLUE server expects
    texts: tuple[str, ...]
    label: int | float | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LabelledTask:
    """A task and where its examples are."""

    name: str
    kind: str  # one of KINDS
    texts: int  # texts of an example, 1 or 2
    labels: tuple[str, ...]  # names in the order of the model's outputs; () for regression
    metrics: tuple[str, ...]  # keys of finetuning/scores/scoring.py; the first selects
    splits: tuple[str, ...]  # all that the task has
    reader: Callable[[str], list[Example]]
    # How files spell `labels`, where they do it otherwise (the "0" and "1" of GLUE)
    spellings: tuple[str, ...] = ()
    # Splits that are not on this machine, and the sentence that says what is missing
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # What its files call the texts; (): nothing
    columns: tuple[str, ...] = ()
    # Regression: the network learns the labels divided by this (release: 5 for STS-B)
    scale: float = 1.0
    # The two texts have no order: the release doubles the training set with the texts swapped
    swap_pairs: bool = False

    def read(self, split: str) -> list[Example]:
        """All examples of a split, in the order of the file.

        Raises:
          DataError: the split is absent, or its file cannot be used.
        """
        if split in self.absent:
            raise DataError(self.absent[split])
        if split not in self.splits:
            raise DataError(
                f"{self.name} has no split '{split}'; it has: {', '.join(self.splits)}.",
                value=split,
            )
        return self.reader(split)

    def has(self, *splits: str) -> bool:
        """All of these splits are on this machine."""
        return all(split in self.splits and split not in self.absent for split in splits)

    @property
    def validation_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self.splits if split.startswith("validation"))

    @property
    def test_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self.splits if split.startswith("test"))


def swap_texts(examples: Sequence[Example]) -> list[Example]:
    """The examples, then each again with its texts exchanged (release: double_unordered)."""
    swapped = [
        dataclasses.replace(example, id=f"{example.id}-swapped", texts=example.texts[::-1])
        for example in examples
    ]
    return [*examples, *swapped]


def require_labels(task: LabelledTask, split: str, examples: Sequence[Example]) -> None:
    """Raises DataError unless every example can be scored."""
    missing = sum(example.label is None for example in examples)
    if missing:
        count = "no labels" if missing == len(examples) else f"{missing} rows without a label"
        raise DataError(
            f"The {split} split of {task.name} has {count}, so it cannot be scored; predict it, or "
            "name a file with labels.",
            value=split,
        )


class LabelReader:
    """Turns what stands in a file's label column into an example's label."""

    def __init__(self, kind: str, spellings: Sequence[str]):
        self._kind = kind
        self._index = {spelling: index for index, spelling in enumerate(spellings)}

    def read(self, value: Any) -> int | float | tuple[int, ...]:
        """Raises ValueError with the problem, ready to follow "FILE line N"."""
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
    """A label as text: JSON's true is "true", 1 is "1"."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def is_unlabelled(value: Any) -> bool:
    """Nothing stands where a label could; NaN is what pandas writes for that."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())
