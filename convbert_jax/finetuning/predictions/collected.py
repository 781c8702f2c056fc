"""Collects a model's outputs for all rows of a set, in the order of the rows."""

from collections.abc import Callable, Mapping

import numpy as np

from convbert_jax.interfaces.evaluator import Evaluator, Outputs

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
