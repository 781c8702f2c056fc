"""Who does what, among runners that share a folder: a study of Optuna, kept in a journal file.

A trial of it is one try of a cell. What Optuna gives is that no two runners take one trial, on a
disk of one machine or of several (`JournalStorage`). Whether a cell is done, and whether its runner
lives, says the folder (`folder.py`): the journal may be deleted at any time, at no loss.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.table import SweepError

_STUDY = "cells"
_CELL, _WHY = "cell", "why"  # attributes of a trial


@dataclasses.dataclass(frozen=True)
class Taken:
    """A cell that is this runner's to do; `trial` is Optuna's."""

    cell: str
    trial: Any


class Queue:
    """Cells to be done; all methods see what the other runners did."""

    def __init__(self, folder: Folder):
        """Opens the journal, or begins it.

        Raises:
          SweepError: Optuna is not installed, or the journal is damaged.
        """
        try:
            import optuna
        except ImportError:
            raise SweepError(
                "sweeps need Optuna, which deals the cells to their runners: pip install optuna."
            ) from None
        from optuna.storages import journal

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        folder.path.mkdir(parents=True, exist_ok=True)
        # absolute: the lock is a link with this name, and is never broken if it leads nowhere
        self._path = folder.journal.absolute()
        self._states = optuna.trial.TrialState
        lock = journal.JournalFileSymlinkLock(str(self._path))
        with self._explain():
            self._mend(lock)
            backend = journal.JournalFileBackend(str(self._path), lock_obj=lock)
            storage = optuna.storages.JournalStorage(backend)
            self._study = optuna.create_study(
                storage=storage, study_name=_STUDY, load_if_exists=True
            )
            self._first = len(self._study.get_trials(deepcopy=False))  # trial of this session

    def offer(self, cells: Iterable[str], is_held: Callable[[str], bool]) -> None:
        """Puts those of `cells` into the queue that wait for nobody there and that nobody runs.

        Args:
          is_held: whether a living process runs a cell; a trial that runs without one is given up.
        """
        states = self._states
        with self._explain():
            trials = self._study.get_trials(deepcopy=False, states=(states.WAITING, states.RUNNING))
            waiting = {t.user_attrs.get(_CELL) for t in trials if t.state == states.WAITING}
            for cell in cells:
                if cell in waiting or is_held(cell):
                    continue
                for trial in trials:
                    if trial.state == states.RUNNING and trial.user_attrs.get(_CELL) == cell:
                        self._end(trial.number, states.FAIL)
                self._study.enqueue_trial({}, user_attrs={_CELL: cell})

    def take(self) -> Taken | None:
        """A cell that waits, for this runner alone; None if none does."""
        states = self._states
        with self._explain():
            while self._study.get_trials(deepcopy=False, states=(states.WAITING,)):
                trial = self._study.ask()
                if _CELL in trial.user_attrs:
                    return Taken(trial.user_attrs[_CELL], trial)
                # the last one was taken in between, and Optuna made up another
                self._end(trial, states.PRUNED)
        return None

    def failed(self) -> set[str]:
        """The cells that failed, whoever ran them, since this runner began."""
        with self._explain():
            trials = self._study.get_trials(deepcopy=False, states=(self._states.FAIL,))
        return {
            t.user_attrs[_CELL] for t in trials if _WHY in t.user_attrs and t.number >= self._first
        }

    def finish(self, taken: Taken, seconds: float) -> None:
        """The cell is done."""
        with self._explain():
            self._end(taken.trial, self._states.COMPLETE, seconds)

    def fail(self, taken: Taken, why: str) -> None:
        """The cell cannot be done now; no runner of today tries it again."""
        with self._explain():
            with contextlib.suppress(RuntimeError):
                taken.trial.set_user_attr(_WHY, why)
            self._end(taken.trial, self._states.FAIL)

    def let_go(self, taken: Taken) -> None:
        """The cell is done or held by somebody else, or this runner stops."""
        with self._explain():
            self._end(taken.trial, self._states.PRUNED)

    def _end(self, trial: Any, state: Any, value: float | None = None) -> None:
        """Ends a trial, unless another runner was sooner: it may have given it up for dead."""
        with contextlib.suppress(RuntimeError):  # Optuna's UpdateFinishedTrialError
            self._study.tell(trial, value, state=state, skip_if_finished=True)

    def _mend(self, lock) -> None:
        """Takes away a last line that a full disk cut off; the next one would be spoiled by it."""
        if not self._path.exists() or self._path.read_bytes()[-1:] in (b"\n", b""):
            return
        lock.acquire()
        try:
            content = self._path.read_bytes()
            if content[-1:] not in (b"\n", b""):
                with self._path.open("r+b") as file:
                    file.truncate(content.rfind(b"\n") + 1)
        finally:
            lock.release()

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AssertionError) as error:
            raise SweepError(
                f"{self._path} is damaged ({type(error).__name__}); delete it and start again: "
                "what is finished is kept in the folders of the cells."
            ) from error
