"""How numbers of a whole set come from outputs of batches, where sums alone do not do.

On the device a compiled function gives outputs for each batch; an evaluator takes them on the host,
one batch after the other. So it may add (a loss), keep what is needed of every row (an exact area
under the ROC curve, answers out of several windows) or count pieces of text (BLEU).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

State = TypeVar("State")
Outputs = Mapping[str, Any]  # of one batch: name -> numpy arrays


@dataclasses.dataclass(frozen=True)
class Evaluator(Generic[State]):
    """Named numbers of a set of rows, as three functions on the host.

    What the outputs are is between the evaluator and the function that gives them. They are of the
    global batch: on several processes each one sees all rows and comes to the same numbers. Rows
    that only fill up a batch are told apart by the outputs (weight 0, or an index below 0).

    Attributes:
      names: of the numbers, known before anything is evaluated.
      init: () -> state of no rows.
      update: (state, outputs of one batch) -> state with those; may change the one it is given.
      finish: state -> {name: number}, all of `names`; NaN where nothing was counted. The state
        stays as it is, so that more may follow.
    """

    names: tuple[str, ...]
    init: Callable[[], State]
    update: Callable[[State, Outputs], State]
    finish: Callable[[State], dict[str, float]]

    def over(self, batches: Iterable[Outputs]) -> dict[str, float]:
        """The numbers of some batches' outputs."""
        state = self.init()
        for outputs in batches:
            state = self.update(state, outputs)
        return self.finish(state)
