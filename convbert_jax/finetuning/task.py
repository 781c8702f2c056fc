"""What fine-tuning knows of a task: functions and rows. Classification, tagging and answers are
values of it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.data.encoding import Rows

# name -> [N, ...], or a list of N arrays where their shapes differ
Outputs = Mapping[str, np.ndarray | list[np.ndarray]]
Scores = dict[str, float]


class FinetuningError(UserError):
    """A task that cannot be fine-tuned with this model, or a run that failed."""


@dataclasses.dataclass(frozen=True)
class FinetuneTask:
    """A task, encoded and ready.

    Attributes:
      name: of its folder and its row in the table.
      outputs: what the outputs of its model mean; becomes part of the saved model.
      width: logits of the head as it is compiled, at least the labels: tasks of equal width, head,
        `losses` and `predict` share programs, so give the same function objects.
      losses: (model, batch, key, dtype=) -> (loss [B], weight [B]) of each row. The step multiplies
        both by `weight` of the batch, and divides their sums or, with sum_loss, does not.
      predict: (model, batch, dtype=) -> {name: [B, ...]}.
      constants: name -> array that all batches have beside their rows.
      epochs: the usual number.
      metrics: names, the first one selects.
      train: rows.
      evaluation: split -> rows that are predicted, labelled or not.
      scored: splits of `evaluation` that `score` takes; the first one selects.
      score: (split, outputs of all its rows) -> {metric: value}.
      write: (folder, split, outputs, pictures=) -> nothing; writes predictions, and pictures of
        them if asked to.
    """

    name: str
    outputs: OutputsSection
    width: int
    losses: Callable[..., Any]
    predict: Callable[..., Any]
    constants: Mapping[str, np.ndarray]
    epochs: float
    metrics: tuple[str, ...]
    train: Rows
    evaluation: Mapping[str, Rows]
    scored: tuple[str, ...]
    score: Callable[[str, Outputs], Scores]
    write: Callable[..., None]
