"""Checkpoints of one run: WORKDIR/checkpoints/STEP with the parts `params`, `opt_state` and `data`.

Orbax writes them, on a thread of its own, under a temporary name that is changed when all is on
disk; in a bucket, which cannot rename, a last object says that all is there. What it does not see,
a bit that flipped later, the checksums find.
"""

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from convbert_jax import files, interrupts
from convbert_jax.config import CheckpointSection
from convbert_jax.training import distributed
from convbert_jax.training.checkpoints import checksums
from convbert_jax.training.checkpoints.reading import (
    DATA,
    CheckpointError,
    calling_orbax,
    describe_arrays,
    first_line,
    make_context,
    none_whole,
    read_newest,
)
from convbert_jax.training.state import TrainState
from convbert_jax.workdir import list_steps, unfinished_steps

MOST_FAILURES = 3  # saves in a row that fail and end a run
_FAULTS = (OSError, ValueError, RuntimeError)  # what Orbax raises, and TensorStore below it


class Checkpoints:
    """The checkpoints in one directory; all processes call every method."""

    def __init__(self, directory: pathlib.Path, section: CheckpointSection):
        """Opens `directory`, made if absent, and clears what an interrupted save left half done.

        Raises:
          CheckpointError: the directory cannot be read or made.
        """
        self._directory = files.absolute(directory)
        self._section = section
        self._under_way: int | None = None  # step of the save that nobody has waited for
        self._failures = 0  # in a row
        for path in sorted(self._directory.glob("*.orbax-checkpoint-tmp*")):
            logging.warning("Checkpoint %s was never finished; it is removed.", path.name)
        for step in unfinished_steps(self._directory):
            logging.warning("Checkpoint %d was never finished; it is removed.", step)
        for step in list_steps(self._directory):
            _put_away_damaged_metrics(self._directory / str(step))
        try:
            with calling_orbax():
                self._checkpointer = ocp.training.Checkpointer(
                    self._directory,
                    context=make_context(),
                    preservation_policy=_preservation_policy(section),
                    cleanup_tmp_directories=True,
                )
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {directory} ({error.strerror or error}); choose a "
                "--workdir that can be written.",
                path=directory,
            ) from error

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete, in order."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def newest(self) -> int | None:
        """The last of `steps`, None if there is none."""
        return max(self.steps, default=None)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """True if `values` beat those of every checkpoint by `config.checkpoint.best_metric`."""
        if not self._section.best_metric:
            return False
        known = [c.metrics for c in self._checkpointer.checkpoints if c.metrics]
        ranks = [_rank(self._section, metrics) for metrics in known]
        return all(_rank(self._section, values) > rank for rank in ranks)

    def save(
        self,
        state: TrainState,
        data: Mapping[str, Any],
        values: Mapping[str, float] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Starts to write a checkpoint of `state.step`; waits for the one before first.

        One that cannot be written is named in a warning, and the next one is tried.

        Args:
          data: position of the input, JSON.
          values: evaluation of this step, if there was one; keeps the value of `best_metric`.
          last: no other one follows: waits until it is whole, and tries again by itself.

        Raises:
          CheckpointError: `MOST_FAILURES` in a row could not be written; of several processes, one.
        """
        self.settle()
        self._begin(state, data, values)
        while last and not self.settle():
            self._begin(state, data, values)

    def _begin(self, state, data, values) -> None:
        step = int(state.step)
        metric = self._section.best_metric
        metrics = {metric: float(values[metric])} if metric and values else None
        arrays = {"params": state.params, "opt_state": state.opt_state}
        parts = {**arrays, DATA: json.loads(json.dumps(data))}
        try:
            with interrupts.deferred():  # an interrupted one leaves threads that wait for the rest
                self._checkpointer.save_checkpointables_async(
                    step,
                    parts,
                    metrics=metrics,
                    custom_metadata={
                        "checksums": checksums.of_parts(parts),
                        "arrays": describe_arrays(arrays),
                        "metrics": metrics,
                    },
                    force=True,
                )
        except _FAULTS as error:
            self._count_failure(error, step)
        else:
            self._under_way = step

    def settle(self) -> bool:
        """Waits for the save that is under way; whether there was one, and it is whole now.

        Raises:
          CheckpointError: as `save`.
        """
        step, self._under_way = self._under_way, None
        if step is None:
            return False
        try:
            self._checkpointer.wait()
        except _FAULTS as error:
            self._count_failure(error, step)
            return False
        self._failures = 0
        return True

    def close(self) -> None:
        """Waits until all is on disk, then gives up the directory.

        Raises:
          CheckpointError: what was under way could not be written.
        """
        step, self._under_way = self._under_way, None
        try:
            self._checkpointer.wait()
        except _FAULTS as error:
            with contextlib.suppress(Exception):  # it tells again, on its way out, what `wait` told
                self._checkpointer.close()
            if step is not None:
                raise self._failure(error, step) from error
            return
        self._checkpointer.close()

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores the newest intact checkpoint.

        A damaged checkpoint is named in a warning. Once an older one was read, the damaged one is
        renamed to damaged-STEP, so that its step can be saved again; nothing of it is deleted.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with the shardings to restore onto, any mesh.

        Returns:
          The state and the position of the input; None if there is no checkpoint.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
          StorageError: the storage fails, so the newest checkpoint may be intact.
        """
        targets = {"params": abstract.params, "opt_state": abstract.opt_state, DATA: None}
        steps = list_steps(self._directory)
        step, parts, damaged = read_newest(self._directory, steps, targets)
        if step is None:
            if damaged:
                raise none_whole(self._directory, damaged)
            return None
        self._set_aside(damaged)
        done = jax.device_put(np.int32(step), abstract.step.sharding)
        return TrainState(done, parts["params"], parts["opt_state"]), parts[DATA]

    def _set_aside(self, steps: Mapping[int, str]) -> None:
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self._directory / f"damaged-{step}"
                tries = 1
                while target.exists():
                    tries += 1
                    target = self._directory / f"damaged-{step}-{tries}"
                (self._directory / str(step)).rename(target)
        distributed.barrier("damaged checkpoints")
        with calling_orbax():
            self._checkpointer.reload()

    def _count_failure(self, error: Exception, step: int) -> None:
        failure = self._failure(error, step)
        self._failures += 1
        # Others would wait in vain for what this process did not write: then all start again.
        if self._failures == MOST_FAILURES or jax.process_count() > 1:
            raise failure from error
        logging.warning("%s Going on, and trying again with the next one.", failure)

    def _failure(self, error: Exception, step: int) -> CheckpointError:
        interrupts.abandon_threads()  # that wait for the rest of this save
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise error
        whole = self.newest
        rest = "there is none before it" if whole is None else f"the one of step {whole} is whole"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._directory} "
            f"({first_line(error)}), {rest}; free some space there, or mend what fails, and start "
            "again.",
            path=self._directory,
        )


def _preservation_policy(section: CheckpointSection):
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(section.keep)]
    if section.keep_every:
        kept.append(policies.EveryNSteps(section.keep_every))
    if section.best_metric:
        kept.append(
            policies.BestN(
                get_metric_fn=lambda metrics: _rank(section, metrics),
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(kept)


def _put_away_damaged_metrics(path: pathlib.Path) -> None:
    """Orbax reads this file when it opens the directory, and gives up at one it cannot parse; with
    another value than was saved it would keep the wrong checkpoint as the best.
    """
    file = path / "metrics" / "metrics"
    try:
        found = files.parse_json(file.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        damaged = True
    else:
        damaged = json.dumps(found) != json.dumps(_saved_metrics(path, found))  # NaN is NaN
    if damaged:
        logging.warning("%s is damaged; this checkpoint counts as not evaluated.", file)
        file.unlink(missing_ok=True)  # another process of this run may have been faster


def _saved_metrics(path: pathlib.Path, default):
    try:
        return files.parse_json((path / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"][
            "metrics"
        ]
    except (OSError, ValueError, KeyError, TypeError):  # an older one, or damaged as a whole
        return default


def _rank(section: CheckpointSection, values: Mapping[str, float]) -> float:
    """Larger is better; a value that is missing or NaN is the worst."""
    value = values.get(section.best_metric, float("nan"))
    if np.isnan(value):
        return float("-inf")
    return value if section.best_mode == "max" else -value
