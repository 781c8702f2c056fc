"""The run that is under way, kept every few minutes: a killed one goes on where it was, to the bit.

WORKDIR/unfinished/   one run, or the seeds that train together: run.json says which, and
checkpoints/; gone when it is done
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from convbert_jax import files
from convbert_jax.config import CheckpointSection
from convbert_jax.training import distributed
from convbert_jax.training.checkpoints.saving import Checkpoints
from convbert_jax.training.state import TrainState
from convbert_jax.workdir import Workdir

AGREE_EVERY = 10  # steps after which several processes ask each other: it makes all wait
# What a folder holds. Nobody goes on with another's: its seeds are grouped in another way now.
_NOTHING, _OURS, _ANOTHERS = range(3)


class Unfinished:
    """Keeps the state of one run at a time in one folder; all processes call every method."""

    def __init__(self, workdir: Workdir, run: Mapping[str, Any], minutes: float):
        """Nothing is read or written before the methods are called.

        Args:
          run: JSON, tells this run from all others of `workdir`.
          minutes: from one checkpoint to the next; 0 keeps none but where a signal asks for a stop.
        """
        self._workdir, self._folder = workdir, workdir.unfinished
        self._run = dict(run)
        self._minutes = minutes
        self._last = time.perf_counter()
        self._checkpoints: Checkpoints | None = None

    def resume(self, abstract: TrainState) -> TrainState | None:
        """The state of this run if some of it is here.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with their places on the devices.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
          DamagedFileError: nothing tells which run they are of.
        """
        self._last = time.perf_counter()
        found = distributed.broadcast_int(self._look())
        if found == _NOTHING:
            return None
        if found == _OURS:
            found = self._open().restore(abstract)
            if found:
                state, _ = found
                logging.info("Going on from step %d of the run that was stopped.", int(state.step))
                return state
        self.remove()
        return None

    def keep_if_due(self, state: TrainState, done: int) -> None:
        """Starts to write a checkpoint if the last one is long ago.

        Args:
          done: steps of `state`, for those who must not wait for it.

        Raises:
          CheckpointError: it cannot be written.
          OwnershipError: another run has taken over the folder.
        """
        due = bool(self._minutes) and time.perf_counter() - self._last > 60 * self._minutes
        if jax.process_count() > 1:
            if not self._minutes or done % AGREE_EVERY:
                return
            due = bool(distributed.broadcast_int(due))
        if due:
            self.keep(state)
            self._last = time.perf_counter()

    def keep(self, state: TrainState) -> None:
        """Starts to write a checkpoint; raises as `keep_if_due`."""
        self._workdir.check_owner()
        if self._checkpoints is None:
            if jax.process_index() == 0:
                self._folder.path.mkdir(parents=True, exist_ok=True)
                files.write_json(self._folder.unfinished_run, self._run)
            distributed.barrier("unfinished run named")
        self._open().save(state, self._run)

    def close(self) -> None:
        """Waits until all is on disk; raises as `keep_if_due`."""
        if self._checkpoints is not None:
            checkpoints, self._checkpoints = self._checkpoints, None
            checkpoints.close()

    def remove(self) -> None:
        """The run is done: nothing of it is kept here."""
        self.close()
        distributed.barrier("unfinished run closed")
        if jax.process_index() == 0:
            files.remove_tree(self._folder.path)
        distributed.barrier("unfinished run removed")

    def _open(self) -> Checkpoints:
        if self._checkpoints is None:
            section = CheckpointSection(keep=2)  # one may be damaged by the kill
            self._checkpoints = Checkpoints(self._folder.checkpoints, section)
        return self._checkpoints

    def _look(self) -> int:
        """What the folder holds, as the first process sees it: a shared one may change later for
        the others.
        """
        if jax.process_index() != 0 or not self._folder.path.is_dir():
            return _NOTHING
        remedy = f"delete {self._folder} to train that run from its beginning"
        try:
            found = files.read_json(self._folder.unfinished_run, remedy=remedy)
        except FileNotFoundError:  # killed before anything was kept
            return _ANOTHERS
        return _OURS if found == self._run else _ANOTHERS
