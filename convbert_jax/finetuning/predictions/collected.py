"""What a model says of every row of a set, in the order of the rows, as batches bring it."""

from collections.abc import Callable, Mapping

import numpy as np

from convbert_jax.interfaces.evaluator import Evaluator, Outputs

ROW = "row"  # of a batch's outputs: [B], number of each row in its set; below 0 it only fills up

# name -> [N, ...], or a list of N arrays where their shapes differ
Predicted = Mapping[str, np.ndarray | list[np.ndarray]]


class Collected:
    """Outputs of N rows; those that no batch has brought yet are missing."""

    def __init__(self, rows: int):
        self._rows = rows
        self._values: dict[str, list] = {}

    def add(self, outputs: Outputs) -> "Collected":
        """Puts a batch's outputs, name -> [B, ...], in the places that `ROW` says."""
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
        """Outputs of all rows."""
        return {name: _stack(values) for name, values in self._values.items()}


def rows_evaluator(
    rows: int,
    names: tuple[str, ...] = (),
    score: Callable[[Predicted], dict[str, float]] = lambda predicted: {},
) -> Evaluator[Collected]:
    """Keeps the outputs of all `rows`, and scores them together; without names nothing is."""
    return Evaluator(
        names,
        init=lambda: Collected(rows),
        update=Collected.add,
        finish=lambda collected: score(collected.predicted()),
    )


def _stack(values: list[np.ndarray]):
    same = all(value.shape == values[0].shape for value in values)
    return np.stack(values) if same and values else values
