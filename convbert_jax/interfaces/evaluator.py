"""Streaming metrics (init, update, finish), including metrics that are not means.

A compiled function computes outputs of each batch on the device; an evaluator updates its state on
the host, batch by batch. It can sum (loss), keep values of every row (exact AUC, answers from
several windows) or count n-grams (BLEU).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

State = TypeVar("State")
Outputs = Mapping[str, Any]  # name -> numpy arrays, of one batch


@dataclasses.dataclass(frozen=True)
class Evaluator(Generic[State]):
    """Metrics of a set of rows, as three host functions.

    The evaluator and the function that computes the outputs agree on their names. Outputs contain
    the global batch, so all processes compute the same metrics. Rows that pad a batch are marked in
    the outputs (weight 0 or a negative index).

    Attributes:
      names: names of the metrics.
      init: () -> initial state.
      update: (state, outputs of one batch) -> new state; may modify its argument.
      finish: state -> {name: value} for all `names`; NaN if nothing was counted. Does not modify
        the state, so that updates may follow.
    """

    names: tuple[str, ...]
    init: Callable[[], State]
    update: Callable[[State, Outputs], State]
    finish: Callable[[State], dict[str, float]]

    def over(self, batches: Iterable[Outputs]) -> dict[str, float]:
        """Computes the metrics of the outputs of some batches."""
        state = self.init()
        for outputs in batches:
            state = self.update(state, outputs)
        return self.finish(state)
