"""Reading and verification of checkpoints.

All reads go through this module. It compares checksums taken when the checkpoint was saved, because
Orbax does not detect bits that flip on disk. Each part can be read and verified separately.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from convbert_jax import files, interrupts
from convbert_jax.config import UserError
from convbert_jax.training.checkpoints import checksums
from convbert_jax.training.task import Params
from convbert_jax.workdir import list_steps

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
    arrays = checksums.by_name(parts)
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
        for name, array in checksums.by_name(parts).items()
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
    directory = files.absolute(directory)
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
        if "checksums" not in kept:
            raise ValueError("it has no checksums")
        wanted = {
            name: _on_host(metadata.metadata.get(name), name)
            if target is None and name != DATA
            else target
            for name, target in targets.items()
        }
        _check_arrays(wanted, kept)  # before memory is allocated
        parts = ocp.load_checkpointables(path, wanted)
    _check_arrays(parts, kept)
    _compare(checksums.of_parts(parts), kept["checksums"], parts, "checksum")
    return parts


def _on_host(metadata, name: str):
    if metadata is None:
        raise ValueError(f"its {name} cannot be read")
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata)


def _check_arrays(parts: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    if "arrays" in kept:  # missing in older checkpoints
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
