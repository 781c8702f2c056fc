"""The run that is under way, kept every few minutes: a killed one goes on where it was, to the bit.

WORKDIR/unfinished/   one run, or the seeds that train together: run.json says which, and
checkpoints/; gone when it is done
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax import files
from convbert_jax.config import CheckpointSection
from convbert_jax.training.checkpoint import Checkpoints
from convbert_jax.training.state import TrainState

FOLDER = "unfinished"  # in WORKDIR
RUN = "run.json"  # in it: which run this is


class Unfinished:
    """Keeps (parameters, optimizer state) of one run at a time in one folder."""

    def __init__(self, workdir: Path, run: Mapping[str, Any], minutes: float):
        """Nothing is read or written before the methods are called.

        Args:
          run: JSON, tells this run from all others of `workdir`.
          minutes: from one checkpoint to the next; 0 keeps none but where a signal asks for a stop.
        """
        self._folder = workdir / FOLDER
        self._run = dict(run)
        self._minutes = minutes
        self._last = time.perf_counter()
        self._checkpoints: Checkpoints | None = None

    def resume(self, state) -> tuple[Any, int]:
        """(state, steps done) of this run if some of it is here, else `state` and 0.

        Args:
          state: as before the first step; tells shapes and places on the devices.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
          DamagedFileError: nothing tells which run they are of.
        """
        self._last = time.perf_counter()
        if not self._folder.is_dir():
            return state, 0
        params, opt_state = jax.tree.map(_abstract, state)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        step = jax.ShapeDtypeStruct((), np.int32, sharding=device)
        if self._is_of_this_run():
            found = self._open().restore(TrainState(step, params, opt_state))
            if found:
                kept, _ = found
                logging.info("Going on from step %d of the run that was stopped.", int(kept.step))
                return (kept.params, kept.opt_state), int(kept.step)
        self.remove()
        return state, 0

    def keep_if_due(self, state, done: int) -> None:
        """Starts to write a checkpoint if the last one is long ago.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self._minutes and time.perf_counter() - self._last > 60 * self._minutes:
            self.keep(state, done)
            self._last = time.perf_counter()

    def keep(self, state, done: int) -> None:
        """Starts to write a checkpoint; raises as `keep_if_due`."""
        params, opt_state = state
        if self._checkpoints is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_json(self._folder / RUN, self._run)
        self._open().save(TrainState(np.asarray(done, np.int32), params, opt_state), self._run)

    def close(self) -> None:
        """Waits until all is on disk; raises as `keep_if_due`."""
        if self._checkpoints is not None:
            checkpoints, self._checkpoints = self._checkpoints, None
            checkpoints.close()

    def remove(self) -> None:
        """The run is done: nothing of it is kept here."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> Checkpoints:
        if self._checkpoints is None:
            section = CheckpointSection(keep=2)  # one may be damaged by the kill
            self._checkpoints = Checkpoints(self._folder / "checkpoints", section)
        return self._checkpoints

    def _is_of_this_run(self) -> bool:
        """False for one that nobody goes on with, as its seeds are grouped in another way now."""
        remedy = f"delete {self._folder} to train that run from its beginning"
        try:
            return files.read_json(self._folder / RUN, remedy=remedy) == self._run
        except FileNotFoundError:  # killed before anything was kept
            return False


def _abstract(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
