"""Checkpoints of the run in progress every few minutes, from which it resumes bit-exactly.

WORKDIR/unfinished/   one run, or several seeds that train together: run.json describes it, and
checkpoints/; removed when the run is done
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

AGREE_EVERY = 10  # steps between synchronizations of several processes, which make all wait
# Content of a folder. Another run's state is not resumed: its seeds are now grouped differently.
_NOTHING, _OURS, _ANOTHERS = range(3)


class Unfinished:
    """Saves the state of one run at a time in one folder; all processes must call all methods."""

    def __init__(self, workdir: Workdir, run: Mapping[str, Any], minutes: float):
        """Create the object without reading or writing anything.

        Args:
          run: JSON that identifies this run among all runs of `workdir`.
          minutes: Minutes between checkpoints; 0 saves only when a signal requests a stop.
        """
        self._workdir, self._folder = workdir, workdir.unfinished
        self._run = dict(run)
        self._minutes = minutes
        self._last = time.perf_counter()
        self._checkpoints: Checkpoints | None = None

    def resume(self, abstract: TrainState) -> TrainState | None:
        """Restore the state of this run; return None without a checkpoint.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with shardings.

        Raises:
          CheckpointError: There are checkpoints, but none can be read.
          DamagedFileError: The description of the run is damaged.
        """
        self._last = time.perf_counter()
        found = distributed.broadcast_int(self._look())
        if found == _NOTHING:
            return None
        if found == _OURS:
            found = self._open().restore(abstract)
            if found:
                state, _ = found
                logging.info("Resuming from step %d of the stopped run.", int(state.step))
                return state
        self.remove()
        return None

    def keep_if_due(self, state: TrainState, done: int) -> None:
        """Start to write a checkpoint if the last one is older than `minutes`.

        Args:
          done: Number of steps in `state`, known without waiting for the device.

        Raises:
          CheckpointError: The checkpoint cannot be written.
          OwnershipError: Another run has taken over the folder.
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
        """Start to write a checkpoint; raises as `keep_if_due`."""
        self._workdir.check_owner()
        if self._checkpoints is None:
            if jax.process_index() == 0:
                self._folder.path.mkdir(parents=True, exist_ok=True)
                files.write_json(self._folder.unfinished_run, self._run)
            distributed.barrier("unfinished run named")
        self._open().save(state, self._run)

    def close(self) -> None:
        """Wait until all checkpoints are on disk; raises as `keep_if_due`."""
        if self._checkpoints is not None:
            checkpoints, self._checkpoints = self._checkpoints, None
            checkpoints.close()

    def remove(self) -> None:
        """Delete the checkpoints of the finished run."""
        self.close()
        distributed.barrier("unfinished run closed")
        if jax.process_index() == 0:
            files.remove_tree(self._folder.path)
        distributed.barrier("unfinished run removed")

    def _open(self) -> Checkpoints:
        if self._checkpoints is None:
            section = CheckpointSection(keep=2)  # a kill may damage the newest one
            self._checkpoints = Checkpoints(self._folder.checkpoints, section)
        return self._checkpoints

    def _look(self) -> int:
        """Return the content of the folder as seen by process 0.

        On shared storage, other processes may see changes later.
        """
        if jax.process_index() != 0 or not self._folder.path.is_dir():
            return _NOTHING
        remedy = f"delete {self._folder} to restart that run from the beginning"
        try:
            found = files.read_json(self._folder.unfinished_run, remedy=remedy)
        except FileNotFoundError:  # killed before the first checkpoint
            return _ANOTHERS
        return _OURS if found == self._run else _ANOTHERS
