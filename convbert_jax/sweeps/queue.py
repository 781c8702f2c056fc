"""Who does what, among runners that share a folder: a study of Optuna, kept in its journal.

A trial of it is one try of a cell. What Optuna gives is that no two runners take one trial, on a
disk of one machine or of several. Whether a cell is done, and whether its runner lives, says the
folder (`folder.py`): the journal may be deleted at any time, at no loss; runners at work then end
with a sentence, and are started again.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

from convbert_jax.sweeps import journal
from convbert_jax.sweeps.folder import Folder

_STUDY = "cells"
_CELL, _WHY = "cell", "why"  # attributes of a trial


@dataclasses.dataclass(frozen=True)
class Taken:
    """A cell that is this runner's to do; `trial` is Optuna's."""

    cell: str
    trial: Any


class Queue:
    """Cells to be done; all methods see what the other runners did, and raise SweepError where the
    journal is damaged or gone.
    """

    def __init__(self, folder: Folder):
        """Opens the journal, or begins it; raises as `journal.open_study`."""
        self._folder = folder
        self._study = journal.open_study(folder, _STUDY)
        self._before = {trial.number for trial in self._trials("FAIL")}  # of earlier sessions

    def _trials(self, *states: str) -> list[Any]:
        from optuna.trial import TrialState

        wanted = tuple(TrialState[name] for name in states) or None
        with journal.explain(self._folder):
            return self._study.get_trials(deepcopy=False, states=wanted)

    def _end(self, trial: Any, state: str, value: float | None = None) -> None:
        with journal.explain(self._folder):
            journal.end(self._study, trial, state, value)

    def offer(self, cells: Iterable[str], is_held: Callable[[str], bool]) -> None:
        """Puts those of `cells` into the queue that wait for nobody there and that nobody runs.

        Args:
          is_held: whether a living process runs a cell; a trial that runs without one is given up.
        """
        waiting = {trial.user_attrs.get(_CELL) for trial in self._trials("WAITING")}
        running = self._trials("RUNNING")
        for cell in cells:
            if cell in waiting or is_held(cell):
                continue
            for trial in running:
                if trial.user_attrs.get(_CELL) == cell:
                    self._end(trial.number, "FAIL")
            with journal.explain(self._folder):
                self._study.enqueue_trial({}, user_attrs={_CELL: cell})

    def take(self, first: Collection[str] = ()) -> Taken | None:
        """A cell that waits, for this runner alone; None if none does.

        Args:
          first: cells that are taken before all others. Optuna deals in the order of the queue, and
            those that stand before them there are put out of it, until they are offered again.
        """
        while waiting := self._trials("WAITING"):
            wanted = {trial.user_attrs.get(_CELL) for trial in waiting} & set(first)
            with journal.explain(self._folder):
                trial = self._study.ask()
            cell = trial.user_attrs.get(_CELL)
            if cell is not None and (not wanted or cell in wanted):
                return Taken(cell, trial)
            # not among the first, or made up by Optuna, as the last one was taken in between
            self._end(trial, "PRUNED")
        return None

    def failed(self) -> set[str]:
        """The cells that failed, whoever ran them, since this runner began."""
        return {
            trial.user_attrs[_CELL]
            for trial in self._trials("FAIL")
            if _WHY in trial.user_attrs and trial.number not in self._before
        }

    def finish(self, taken: Taken, seconds: float) -> None:
        """The cell is done."""
        self._end(taken.trial, "COMPLETE", seconds)

    def fail(self, taken: Taken, why: str) -> None:
        """The cell cannot be done now; no runner of today tries it again."""
        with journal.explain(self._folder), contextlib.suppress(RuntimeError):  # as journal.end
            taken.trial.set_user_attr(_WHY, why)
        self._end(taken.trial, "FAIL")

    def let_go(self, taken: Taken) -> None:
        """The cell is done or held by somebody else, or this runner stops."""
        self._end(taken.trial, "PRUNED")
