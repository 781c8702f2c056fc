"""Interface of fine-tuning tasks, and the collected outputs of all rows of a split."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from convbert_jax.config import Config, OutputsSection, UserError
from convbert_jax.data.tasks.labelled_text import Rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, count_characters
from convbert_jax.interfaces import Evaluator, Outputs
from convbert_jax.objectives.classification import RowLosses

ROW = "row"  # key of a batch's row numbers [B]; negative for fillers

# name -> [N, ...], or a list of N arrays where their shapes differ
Predicted = Mapping[str, np.ndarray | list[np.ndarray]]


class Collected:
    """Outputs of N rows; rows of batches not yet added are missing."""

    def __init__(self, rows: int):
        self._rows = rows
        self._values: dict[str, list] = {}

    def add(self, outputs: Outputs) -> "Collected":
        """Store a batch's outputs, name -> [B, ...], at the row numbers in `ROW`."""
        places = outputs[ROW]
        for name, values in outputs.items():
            if name == ROW:
                continue
            kept = self._values.setdefault(name, [None] * self._rows)
            for place, value in zip(places, values, strict=True):
                if place >= 0:
                    kept[place] = value
        return self

    def predicted(self) -> Predicted:
        """Return the outputs of all rows."""
        return {name: _stack(values) for name, values in self._values.items()}


def rows_evaluator(
    rows: int,
    names: tuple[str, ...] = (),
    score: Callable[[Predicted], dict[str, float]] = lambda predicted: {},
) -> Evaluator[Collected]:
    """Return an evaluator that collects all `rows` and scores them together, if it has names."""
    return Evaluator(
        names,
        init=lambda: Collected(rows),
        update=Collected.add,
        finish=lambda collected: score(collected.predicted()),
    )


def _stack(values: list[np.ndarray]):
    same = all(value.shape == values[0].shape for value in values)
    return np.stack(values) if same and values else values


CHECKED_TEXTS = 2_000  # texts per split that are checked for unknown characters

Scores = dict[str, float]


class FinetuningError(UserError):
    """A task that cannot be fine-tuned with this model, or a run that failed."""


@dataclasses.dataclass(frozen=True)
class FinetuneTask:
    """An encoded task.

    Attributes:
      name: Name of its folder and of its row in the table.
      outputs: Description of the model's outputs; saved with the model.
      width: Number of compiled logits, at least the number of labels. Tasks with equal width, head,
        `losses` and `predict` share programs, so reuse the same function objects.
      losses: (model, batch, key, dtype=) -> (loss [B], weight [B]) per row. The step multiplies
        both by `weight` of the batch, and divides their sums unless sum_loss is set.
      predict: (model, batch, dtype=) -> {name: [B, ...]}.
      constants: Arrays by name that are added to every batch.
      epochs: Default number of epochs.
      train: Training rows.
      evaluation: Rows to predict by split, with or without labels.
      evaluators: Evaluator of each split. It receives the outputs of `predict` for a batch and
        "row" [B], the row numbers, which are negative for fillers. If it has no names, the split
        has no labels.
      write: (folder, split, evaluator state, pictures=) -> None; writes predictions, and pictures
        of them if requested.
      teacher: Checksum of the teacher that `train` has outputs of, or None.
    """

    name: str
    outputs: OutputsSection
    width: int
    losses: Callable[..., RowLosses]
    predict: Callable[..., dict[str, jax.Array]]
    constants: Mapping[str, np.ndarray]
    epochs: float
    train: Rows
    evaluation: Mapping[str, Rows]
    evaluators: Mapping[str, Evaluator]
    write: Callable[..., None]
    teacher: str | None = None

    @property
    def scored(self) -> tuple[str, ...]:
        """Splits with labels; the first one selects the setting."""
        return tuple(split for split, e in self.evaluators.items() if e.names)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores, or none without labels; the first one selects the setting."""
        return self.evaluators[self.scored[0]].names if self.scored else ()


def warn_of_unknown(texts: Sequence[str], tokenizer: Tokenizer, config: Config, title: str) -> None:
    """Warn if more than config.tokenizer.max_unknown_rate of the characters become [UNK].

    This happens for languages or scripts that the vocabulary does not cover. About
    `CHECKED_TEXTS` of `texts` are checked.
    """
    texts = texts[:: max(1, len(texts) // CHECKED_TEXTS)]
    rate = tokenizer.count_unknown(texts) / max(1, count_characters(texts))
    if rate > config.tokenizer.max_unknown_rate:
        logging.warning(
            "%s: %.1f%% of the characters are not in the vocabulary %s and become [UNK]; use "
            "weights that were trained on such text.",
            title,
            100 * rate,
            tokenizer.path,
        )
