"""What fine-tuning knows of a task: functions and rows. Classification, tagging and answers are
values of it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from convbert_jax.config import Config, OutputsSection, UserError
from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, count_characters
from convbert_jax.interfaces.evaluator import Evaluator
from convbert_jax.objectives.classification import RowLosses

CHECKED_TEXTS = 2_000  # of a split, for unknown characters

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
      train: rows.
      evaluation: split -> rows that are predicted, labelled or not.
      evaluators: split -> evaluator of those rows. It gets what `predict` gives for a batch, and as
        "row" [B] which rows these are, below 0 for fillers. Without names, the split has no labels.
      write: (folder, split, state of its evaluator, pictures=) -> nothing; writes predictions, and
        pictures of them if asked to.
      teacher: checksum of the model that `train` learns from besides its labels.
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
        """Splits that have labels; the first one selects."""
        return tuple(split for split, e in self.evaluators.items() if e.names)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores, the first one selects; none without labels."""
        return self.evaluators[self.scored[0]].names if self.scored else ()


def warn_of_unknown(texts: Sequence[str], tokenizer: Tokenizer, config: Config, title: str) -> None:
    """Warns if more than config.tokenizer.max_unknown_rate of the characters become [UNK], as in
    text of another language or script than the vocabulary. `CHECKED_TEXTS` of `texts` are read.
    """
    texts = texts[:: max(1, len(texts) // CHECKED_TEXTS)]
    rate = tokenizer.count_unknown(texts) / max(1, count_characters(texts))
    if rate > config.tokenizer.max_unknown_rate:
        logging.warning(
            "%s: %.1f%% of the characters are unknown to the vocabulary %s, so that the model "
            "cannot read them; use weights that were trained on such text.",
            title,
            100 * rate,
            tokenizer.path,
        )
