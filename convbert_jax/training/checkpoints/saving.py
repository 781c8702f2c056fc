"""Checkpoints of a run: WORKDIR/checkpoints/STEP with the parts `params`, `opt_state` and `data`.

Orbax writes them in a background thread under a temporary name and renames them when complete. In a
bucket, which cannot rename, a final object marks completion. Checksums detect bits that flip later.
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

MOST_FAILURES = 3  # consecutive failed saves that end a run
_FAULTS = (OSError, ValueError, RuntimeError)  # raised by Orbax and TensorStore


class Checkpoints:
    """Checkpoints in one directory; all processes call every method."""

    def __init__(self, directory: pathlib.Path, section: CheckpointSection):
        """Opens or creates `directory` and removes unfinished checkpoints.

        Raises:
          CheckpointError: the directory cannot be read or created.
        """
        self._directory = files.absolute(directory)
        self._section = section
        self._under_way: int | None = None  # step of the unfinished save
        self._failures = 0  # consecutive
        for path in sorted(self._directory.glob("*.orbax-checkpoint-tmp*")):
            logging.warning("Removing the unfinished checkpoint %s.", path.name)
        for step in unfinished_steps(self._directory):
            logging.warning("Removing the unfinished checkpoint %d.", step)
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
                f"Cannot save checkpoints in {directory}: {error.strerror or error}. Choose a "
                "writable --workdir.",
                path=directory,
            ) from error

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def newest(self) -> int | None:
        """Newest step, or None without checkpoints."""
        return max(self.steps, default=None)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Returns whether `config.checkpoint.best_metric` is better than in every checkpoint."""
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
        """Waits for the previous save, then starts to save `state` in the background.

        A failed save is logged as a warning, and training continues.

        Args:
          data: input position, JSON.
          values: evaluation metrics of this step if any; the value of `best_metric` is saved.
          last: waits until this save is complete, and retries failures.

        Raises:
          CheckpointError: `MOST_FAILURES` consecutive saves failed; with several processes, one.
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
            with interrupts.deferred():  # an interrupted save leaves threads waiting forever
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
        """Waits for the unfinished save; returns True if there was one and it succeeded.

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
        """Waits for the unfinished save, then closes the directory.

        Raises:
          CheckpointError: the unfinished save failed.
        """
        step, self._under_way = self._under_way, None
        try:
            self._checkpointer.wait()
        except _FAULTS as error:
            with contextlib.suppress(Exception):  # repeats the error of `wait`
                self._checkpointer.close()
            if step is not None:
                raise self._failure(error, step) from error
            return
        self._checkpointer.close()

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores the newest intact checkpoint.

        Damaged checkpoints are logged as warnings. After an older one was read, they are renamed to
        damaged-STEP, so that their steps can be saved again; nothing is deleted.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with the shardings to restore onto, on any mesh.

        Returns:
          The state and the input position; None if there is no checkpoint.

        Raises:
          CheckpointError: no existing checkpoint can be read.
          StorageError: the storage failed, so the newest checkpoint may be intact.
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
        # Other processes would wait forever for this process's part, so the run must restart.
        if self._failures == MOST_FAILURES or jax.process_count() > 1:
            raise failure from error
        logging.warning("%s Training continues; the next checkpoint will be tried.", failure)

    def _failure(self, error: Exception, step: int) -> CheckpointError:
        interrupts.abandon_threads()  # they wait for the rest of this save
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise error
        whole = self.newest
        rest = "none" if whole is None else f"step {whole}"
        return CheckpointError(
            f"Cannot save the checkpoint of step {step} to {self._directory}: {first_line(error)}. "
            f"Newest intact checkpoint: {rest}. Free disk space or fix the error.",
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
    """Removes a damaged metrics file of a checkpoint.

    Orbax reads this file when it opens the directory and fails if it cannot parse it. With a wrong
    value, Orbax would keep the wrong checkpoint as the best.
    """
    file = path / "metrics" / "metrics"
    try:
        found = files.parse_json(file.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        damaged = True
    else:
        damaged = json.dumps(found) != json.dumps(_saved_metrics(path, found))  # NaN equals NaN
    if damaged:
        logging.warning("Removing damaged %s: this checkpoint counts as not evaluated.", file)
        file.unlink(missing_ok=True)  # another process may have removed it


def _saved_metrics(path: pathlib.Path, default):
    try:
        return files.parse_json((path / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"][
            "metrics"
        ]
    except (OSError, ValueError, KeyError, TypeError):  # an older checkpoint, or a damaged one
        return default


def _rank(section: CheckpointSection, values: Mapping[str, float]) -> float:
    """Ranks metrics: larger is better, and a missing value or NaN is the worst."""
    value = values.get(section.best_metric, float("nan"))
    if np.isnan(value):
        return float("-inf")
    return value if section.best_mode == "max" else -value
