"""Checkpoints of a run: WORKDIR/checkpoints/STEP with the parts `params`, `opt_state` and `data`.

Orbax writes them in a background thread under a temporary name and renames them when complete. In a
bucket, which cannot rename, a final object marks completion. Reading compares checksums taken when
the checkpoint was saved, because Orbax does not detect bits that flip on disk. Each part can be
read and verified separately.
"""

import contextlib
import errno
import gc
import json
import logging as python_logging
import os
import pathlib
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from convbert_jax import interrupts, storage
from convbert_jax.config import CheckpointSection, UserError
from convbert_jax.training import distributed
from convbert_jax.training.partitioning import Params
from convbert_jax.training.train_step import TrainState
from convbert_jax.workdir import list_steps, unfinished_steps

_CHECKSUM_BLOCK = 2**20  # values per block on the host


def checksum_parts(parts: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 32-bit checksum by name for every array, and for the JSON part `data` if any."""
    arrays = by_name({name: part for name, part in parts.items() if name != "data"})
    here = {name: a for name, a in arrays.items() if not isinstance(a, jax.Array)}
    sums = jax.device_get(_sum_all({n: a for n, a in arrays.items() if n not in here}))
    found = {
        name: sum_host_bits(np.asarray(here[name])) if name in here else int(sums[name])
        for name in arrays
    }
    if "data" in parts:
        found["data"] = zlib.crc32(json.dumps(parts["data"], sort_keys=True).encode())
    return found


def by_name(tree) -> dict[str, Any]:
    """Returns path -> leaf, with paths like `params/stages/0/kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def sum_bits(array: jax.Array) -> jax.Array:
    """Sums the values' bits as integers, weighted by 2 * position + 1, modulo 2**32.

    The weights are odd, so changing one value always changes the sum. They differ, so swapping two
    values almost always does.

    Returns:
      A uint32 scalar.
    """
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):  # flattening would gather a sharded array
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        position = position * jnp.uint32(size) + along
    return (bits.astype(jnp.uint32) * (2 * position + 1)).sum(dtype=jnp.uint32)


def sum_host_bits(array: np.ndarray) -> int:
    """Computes `sum_bits` in numpy."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    total = 0
    for start in range(0, bits.size, _CHECKSUM_BLOCK):
        block = bits[start : start + _CHECKSUM_BLOCK].astype(np.uint32)
        weights = np.arange(2 * start + 1, 2 * (start + block.size), 2, np.uint64)
        total += int((block * weights.astype(np.uint32)).sum(dtype=np.uint32))
    return total % 2**32


@jax.jit
def _sum_all(arrays):
    return jax.tree.map(sum_bits, arrays)


ARRAYS = ("params", "opt_state")  # parts that are trees of arrays

DATA = "data"  # part that is JSON
_ORBAX = "orbax"  # folder of its source files
# Error texts of TensorStore and the system when the storage, not the checkpoint, is at fault.
_OF_STORAGE = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    os.strerror(errno.EIO),
)


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""


class StorageError(CheckpointError):
    """The storage failed, so the checkpoint may be intact."""


def load_params(
    directory: pathlib.Path, abstract: Params, step: int | None = None
) -> tuple[int, Params]:
    """Loads the parameters of a checkpoint to the host.

    Args:
      directory: WORKDIR/checkpoints.
      abstract: expected parameters, a nested dict of `jax.ShapeDtypeStruct`s.
      step: step of the checkpoint. None: the newest intact one; damaged ones are logged.

    Returns:
      The step and the parameters.

    Raises:
      CheckpointError: there is no checkpoint, the one of `step` is damaged, or its parameters do
        not match `abstract`.
    """
    found, parts = _load(directory, ["params"], step)
    wanted, there = (_describe_tree(tree) for tree in (abstract, parts["params"]))
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise CheckpointError(
                f"Checkpoint {directory / str(found)} does not match the config: {name} is "
                f"{there.get(name, 'absent')} there and {wanted.get(name, 'absent')} in the model. "
                "Restore the config.json of the run.",
                path=directory / str(found),
            )
    return found, parts["params"]


def load_arrays(
    directory: pathlib.Path, step: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
    """Loads all arrays of a checkpoint to the host, bit by bit, without a model.

    Args and Raises are those of `load_params`.

    Returns:
      The step; and name -> array, with names `params/PATH` and `opt_state/PATH`, and `data`: the
      input position as the bytes of JSON with sorted keys.
    """
    found, parts = _load(directory, [*ARRAYS, DATA], step)
    position = json.dumps(parts.pop(DATA), sort_keys=True).encode()
    arrays = by_name(parts)
    return found, arrays | {DATA: np.frombuffer(position, np.uint8)}


def read_newest(
    directory: pathlib.Path, steps: Sequence[int], targets: Mapping[str, Any]
) -> tuple[int | None, dict[str, Any], dict[int, str]]:
    """Reads the newest intact checkpoint and logs a warning for each damaged one.

    Args:
      directory: folder of the checkpoints.
      steps: steps of the existing checkpoints, ascending.
      targets: as in `read_parts`.

    Returns:
      The step, or None if no checkpoint is intact; its parts; step -> problem of damaged ones.

    Raises:
      StorageError: the storage failed, so a checkpoint may be intact.
    """
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        try:
            return step, read_parts(directory / str(step), targets), damaged
        except StorageError as error:
            raise StorageError(
                f"Cannot read checkpoint {directory / str(step)}: {error}. It was not changed; "
                "restart when the storage is available."
            ) from error
        except CheckpointError as error:
            damaged[step] = str(error)
            older = "; trying the previous one" if step != steps[0] else ""
            logging.warning("Checkpoint %s is damaged: %s%s.", directory / str(step), error, older)
    return None, {}, damaged


def read_parts(path: pathlib.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads parts of one checkpoint and verifies their checksums.

    A failed read is repeated once, so that a transient fault does not count as damage.

    Args:
      path: folder of the checkpoint.
      targets: part -> `jax.ShapeDtypeStruct`s with the shardings to restore onto; None: load to
        the host with the saved shapes.

    Raises:
      CheckpointError: both reads failed; the message is a short reason. It is a StorageError if
        the storage failed and the checkpoint may be intact.
      KeyboardInterrupt: a signal arrived during the read.
    """
    for _ in range(2):
        with calling_orbax():
            try:
                return _read(path, targets)
            except jax.errors.JaxRuntimeError:  # a device error, such as out of memory
                raise
            except Exception as error:  # from any layer of Orbax
                kind = StorageError if _is_of_storage(error) else CheckpointError
                problem = first_line(error)
            gc.collect()
    raise kind(problem)


def make_context() -> ocp.Context:
    """Makes the Orbax context for all checkpoints."""
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=DATA)
    context.checkpointables.registry = registry
    return context


@contextlib.contextmanager
def calling_orbax() -> Iterator[None]:
    """Context for calls into Orbax.

    Delays signals to the end of the block. Hides Orbax's warnings and the errors of its unfinished
    coroutines, which fill pages for a damaged checkpoint.
    """
    reader, orbax = python_logging.getLogger("asyncio"), logging.get_absl_logger()
    hook, disabled = sys.unraisablehook, reader.disabled
    try:
        sys.unraisablehook, reader.disabled = lambda _: None, True
        orbax.addFilter(_is_not_of_orbax)
        ignored = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
        with ignored, interrupts.deferred():
            yield
    finally:
        orbax.removeFilter(_is_not_of_orbax)
        sys.unraisablehook, reader.disabled = hook, disabled


def describe_arrays(parts: Mapping[str, Any]) -> dict[str, str]:
    """Formats dtype and shape of every array as `float32[2,3]`; checksums cover neither."""
    return {
        name: f"{array.dtype}{list(array.shape)}".replace(" ", "")
        for name, array in by_name(parts).items()
    }


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, at most 200 characters, without a final period."""
    # Orbax appends pages of class names.
    lines = str(error).strip(" \n\"'").partition(" due to incompatible handler")[0].splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


def _is_of_storage(error: BaseException | None) -> bool:
    while error:
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, TimeoutError | ConnectionError) or library in ("gcsfs", "aiohttp"):
            return True
        if any(word in str(error) for word in _OF_STORAGE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _load(
    directory: pathlib.Path, names: Sequence[str], step: int | None
) -> tuple[int, dict[str, Any]]:
    directory = storage.absolute(directory)
    steps = list_steps(directory)
    if not steps:
        raise CheckpointError(
            f"There is no checkpoint in {directory}. Train a model first.", path=directory
        )
    targets = dict.fromkeys(names)
    if step is not None:
        try:
            return step, read_parts(directory / str(step), targets)
        except CheckpointError as error:
            raise CheckpointError(
                f"Cannot read checkpoint {directory / str(step)}: {error}. Existing steps: "
                f"{steps}. Choose another step, or none for the newest intact one.",
                path=directory / str(step),
            ) from None
    found, parts, damaged = read_newest(directory, steps, targets)
    if found is None:
        raise none_whole(directory, damaged)
    return found, parts


def none_whole(directory: pathlib.Path, damaged: Mapping[int, str]) -> CheckpointError:
    """Returns the error for a directory without a readable checkpoint."""
    step, reason = next(iter(damaged.items()))
    return CheckpointError(
        f"None of the {len(damaged)} checkpoints in {directory} can be read (step {step}: "
        f"{reason}). Restore a copy, or start over with a new --workdir.",
        path=directory,
    )


def _read(path: pathlib.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    with make_context():
        metadata = ocp.checkpointables_metadata(path)
        kept = metadata.custom_metadata or {}
        if not {"checksums", "arrays"} <= kept.keys():
            raise ValueError("it has no checksums or no shapes")
        wanted = {
            name: _on_host(metadata.metadata.get(name), name)
            if target is None and name != DATA
            else target
            for name, target in targets.items()
        }
        _check_arrays(wanted, kept)  # before memory is allocated
        parts = ocp.load_checkpointables(path, wanted)
    _check_arrays(parts, kept)
    _compare(checksum_parts(parts), kept["checksums"], parts, "checksum")
    return parts


def _on_host(metadata, name: str):
    if metadata is None:
        raise ValueError(f"its {name} cannot be read")
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata)


def _check_arrays(parts: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    arrays = {name: part for name, part in parts.items() if name != DATA}
    _compare(describe_arrays(arrays), kept["arrays"], arrays, "shape or type")


def _compare(found: Mapping, kept: Mapping, parts: Mapping[str, Any], what: str) -> None:
    """Raises ValueError if a name that belongs to one of `parts` differs."""
    kept = {name: value for name, value in kept.items() if name.partition("/")[0] in parts}
    for name in sorted(found.keys() | kept.keys()):
        if found.get(name) != kept.get(name):
            raise ValueError(f"wrong {what} of {name}")


def _describe_tree(tree) -> dict[str, str]:
    return {
        name.partition("/")[2]: text for name, text in describe_arrays({"params": tree}).items()
    }


def _is_not_of_orbax(record: python_logging.LogRecord) -> bool:
    return _ORBAX not in pathlib.Path(record.pathname).parts


MOST_FAILURES = 3  # consecutive failed saves that end a run
_FAULTS = (OSError, ValueError, RuntimeError)  # raised by Orbax and TensorStore


class Checkpoints:
    """Checkpoints in one directory; all processes call every method."""

    def __init__(
        self, directory: pathlib.Path, section: CheckpointSection, *, always: Sequence[int] = ()
    ):
        """Opens or creates `directory` and removes unfinished checkpoints.

        Args:
          always: steps of checkpoints that are never deleted.

        Raises:
          CheckpointError: the directory cannot be read or created.
        """
        self._directory = storage.absolute(directory)
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
                    preservation_policy=_preservation_policy(section, always),
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
                        "checksums": checksum_parts(parts),
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


def _preservation_policy(section: CheckpointSection, always: Sequence[int]):
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(section.keep)]
    if always:
        kept.append(policies.CustomSteps(always))
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
        found = storage.parse_json(file.read_bytes())
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
        return storage.parse_json((path / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"][
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
