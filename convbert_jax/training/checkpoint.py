"""Checkpoints of one run: WORKDIR/checkpoints/STEP with the parts `params`, `opt_state` and `data`.

Orbax writes them, on a thread of its own, under a temporary name that is changed when all is on
disk. What it does not see, a bit that flipped later, the checksums find.
"""

import contextlib
import gc
import json
import logging as python_logging
import pathlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from convbert_jax.config import CheckpointSection, UserError
from convbert_jax.training import checksums
from convbert_jax.training.state import TrainState
from convbert_jax.training.task import Params


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""


class Checkpoints:
    """The checkpoints in one directory; all processes call every method."""

    def __init__(self, directory: pathlib.Path, section: CheckpointSection):
        """Opens `directory`, made if absent, and clears what an interrupted save left half done.

        Raises:
          CheckpointError: the directory cannot be read or made.
        """
        self._directory = directory.absolute()
        self._section = section
        for path in sorted(self._directory.glob("*.orbax-checkpoint-tmp*")):
            logging.warning("Checkpoint %s was never finished; it is removed.", path.name)
        for step in list_steps(self._directory):
            _put_away_damaged_metrics(self._directory / str(step) / "metrics" / "metrics")
        try:
            self._checkpointer = ocp.training.Checkpointer(
                self._directory,
                context=_context(),
                preservation_policy=_preservation_policy(section),
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {directory} ({error.strerror or error}); choose a "
                "--workdir that can be written."
            ) from error

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete, in order."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def is_best(self, values: Mapping[str, float]) -> bool:
        """True if `values` beat those of every checkpoint by `config.checkpoint.best_metric`."""
        if not self._section.best_metric:
            return False
        known = [c.metrics for c in self._checkpointer.checkpoints if c.metrics]
        ranks = [_rank(self._section, metrics) for metrics in known]
        return all(_rank(self._section, values) > rank for rank in ranks)

    def save(
        self, state: TrainState, data: Mapping[str, Any], values: Mapping[str, float] | None = None
    ) -> None:
        """Starts to write a checkpoint of `state.step`; waits for the one before first.

        Args:
          data: position of the input, JSON.
          values: evaluation of this step, if there was one; keeps the value of `best_metric`.

        Raises:
          CheckpointError: this one or the one before could not be written.
        """
        step = int(state.step)
        metric = self._section.best_metric
        data = json.loads(json.dumps(data))
        try:
            self._checkpointer.save_checkpointables_async(
                step,
                {"params": state.params, "opt_state": state.opt_state, "data": data},
                metrics={metric: float(values[metric])} if metric and values else None,
                custom_metadata={"checksums": checksums.of_state(state, data)},
                force=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(error, step)

    def wait(self) -> None:
        """Returns when all is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self._checkpointer.wait()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(error, None)

    def close(self) -> None:
        """Waits, then gives up the directory; raises as `wait`."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Newest checkpoint that is whole: (state, position of the input); None if there is none.

        A damaged one is named in a warning and, once an older one is found to be whole, renamed to
        damaged-STEP, so that its step can be saved again.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with the shardings to restore onto, any mesh.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            with _quiet_failures():
                try:
                    restored = self._read(step, abstract)
                except jax.errors.JaxRuntimeError:  # the device's fault, out of memory for one
                    raise
                except Exception as error:  # from any layer below: what it means is the same
                    damaged[step] = _first_line(error)
            if step not in damaged:
                self._set_aside(damaged)
                return restored
            logging.warning(
                "Checkpoint %s is damaged (%s); trying the one before.",
                self._directory / str(step),
                damaged[step],
            )
        if damaged:
            step, reason = next(iter(damaged.items()))
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self._directory} can be read (step "
                f"{step}: {reason}); put a copy back, or start over in another --workdir."
            )
        return None

    def _read(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        parts = self._checkpointer.load_checkpointables(
            step, {"params": abstract.params, "opt_state": abstract.opt_state, "data": None}
        )
        metadata = self._checkpointer.checkpointables_metadata(step).custom_metadata
        state = TrainState(
            jax.device_put(np.int32(step), abstract.step.sharding),
            parts["params"],
            parts["opt_state"],
        )
        found = checksums.of_state(state, parts["data"])
        wrong = [name for name, value in metadata["checksums"].items() if found.get(name) != value]
        if wrong or len(found) != len(metadata["checksums"]):
            raise ValueError(f"wrong checksum of {wrong[:1] or 'its parts'}")
        return state, parts["data"]

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
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints")
        self._checkpointer.reload()

    def _fail(self, error: Exception, step: int | None):
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise error
        whole = list_steps(self._directory)
        rest = f"the one of step {whole[-1]} is whole" if whole else "there is none before it"
        name = "the last checkpoint" if step is None else f"the checkpoint of step {step}"
        raise CheckpointError(
            f"{name} could not be written to {self._directory} ({_first_line(error)}), {rest}; "
            "free some space there and start again."
        ) from error


def list_steps(directory: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in `directory` (WORKDIR/checkpoints), in order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def load_arrays(directory: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every part of a checkpoint by name, on the host, bit for bit, without a model.

    Returns:
      `params/PATH` and `opt_state/PATH` as saved; `data`, the position of the input, as the bytes
      of its JSON with sorted keys.

    Raises:
      CheckpointError: it is not there or cannot be read.
    """
    path = directory.absolute() / str(step)
    try:
        with _context():
            metadata = ocp.checkpointables_metadata(path).metadata
            wanted = {
                name: jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata[name])
                for name in ("params", "opt_state")
            }
            parts = ocp.load_checkpointables(path, {**wanted, "data": None})
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({_first_line(error)}); steps there: "
            f"{list_steps(directory)}."
        ) from error
    position = json.dumps(parts.pop("data"), sort_keys=True).encode()
    arrays = {
        jax.tree_util.keystr(key, simple=True, separator="/"): np.asarray(leaf)
        for key, leaf in jax.tree_util.tree_leaves_with_path(parts)
    }
    return arrays | {"data": np.frombuffer(position, np.uint8)}


def restore_params(directory: pathlib.Path, abstract: Params, step: int | None = None) -> Params:
    """Parameters of a checkpoint, or the part of them that `abstract` names.

    Args:
      directory: WORKDIR/checkpoints.
      abstract: nested dict of `jax.ShapeDtypeStruct`s; those without a sharding go to one device.
      step: default the newest.

    Raises:
      CheckpointError: there is none, or it lacks a parameter of that shape.
    """
    steps = list_steps(directory)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {directory}; train one first.")
    path = directory.absolute() / str(steps[-1] if step is None else step)
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda leaf: leaf if leaf.sharding else leaf.update(sharding=one_device), abstract
    )
    context = _context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            params = ocp.load_checkpointables(path, {"params": abstract})["params"]
        # A name that the checkpoint lacks comes back as it went in, or not at all.
        jax.tree.map(lambda _, leaf: leaf.addressable_shards, abstract, params)
        return params
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not hold the parameters asked for ({_first_line(error)}); "
            f"steps there: {steps}."
        ) from error


def _context() -> ocp.Context:
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="data")
    context.checkpointables.registry = registry
    return context


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


@contextlib.contextmanager
def _quiet_failures() -> Iterator[None]:
    """Keeps unfinished coroutines, which a failed read leaves behind, from printing pages."""
    reader = python_logging.getLogger("asyncio")
    hook, disabled = sys.unraisablehook, reader.disabled
    try:
        sys.unraisablehook, reader.disabled = lambda _: None, True
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            yield
            gc.collect()
    finally:
        sys.unraisablehook, reader.disabled = hook, disabled


def _put_away_damaged_metrics(file: pathlib.Path) -> None:
    """Orbax reads these files when it opens the directory, and gives up at one it cannot parse."""
    try:
        json.loads(file.read_bytes())
    except FileNotFoundError:
        pass
    except ValueError:
        logging.warning("%s is damaged; this checkpoint counts as not evaluated.", file)
        file.rename(file.with_name("damaged"))


def _rank(section: CheckpointSection, values: Mapping[str, float]) -> float:
    """Larger is better; a value that is missing or NaN is the worst."""
    value = values.get(section.best_metric, float("nan"))
    if np.isnan(value):
        return float("-inf")
    return value if section.best_mode == "max" else -value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
