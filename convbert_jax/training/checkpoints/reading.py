"""Reading checkpoints: the one place that does, and nothing leaves it unverified.

What Orbax does not see, a bit that flipped on the disk, the checksums find that were taken when the
checkpoint was made. A part can be read without the others and is verified by itself.
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
DATA = "data"  # the part that is JSON
_ORBAX = "orbax"  # folder of its source files


# What TensorStore and the system say of storage that fails or refuses, whatever lies there.
_OF_STORAGE = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    os.strerror(errno.EIO),
)


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""


class StorageError(CheckpointError):
    """The storage fails: whether the checkpoint is whole cannot be told."""


def load_params(
    directory: pathlib.Path, abstract: Params, step: int | None = None
) -> tuple[int, Params]:
    """(step, parameters on the host) of a checkpoint.

    Args:
      directory: WORKDIR/checkpoints.
      abstract: what they must be, as a nested dict of `jax.ShapeDtypeStruct`s.
      step: default the newest that is whole; damaged ones are named in warnings.

    Raises:
      CheckpointError: there is none, the one of `step` is damaged, or it is of another model.
    """
    found, parts = _load(directory, ["params"], step)
    wanted, there = (_describe_tree(tree) for tree in (abstract, parts["params"]))
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise CheckpointError(
                f"checkpoint {directory / str(found)} does not hold the parameters of this config: "
                f"{name} is {there.get(name, 'absent')} there and {wanted.get(name, 'absent')} "
                "here; give the run its own config.json back.",
                path=directory / str(found),
            )
    return found, parts["params"]


def load_arrays(
    directory: pathlib.Path, step: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
    """(step, every array of a checkpoint by name), on the host, bit for bit, without a model.

    Arguments and errors as `load_params`.

    Returns:
      `params/PATH` and `opt_state/PATH` as saved; `data`, the position of the input, as the bytes
      of its JSON with sorted keys.
    """
    found, parts = _load(directory, [*ARRAYS, DATA], step)
    position = json.dumps(parts.pop(DATA), sort_keys=True).encode()
    arrays = checksums.by_name(parts)
    return found, arrays | {DATA: np.frombuffer(position, np.uint8)}


def read_newest(
    directory: pathlib.Path, steps: Sequence[int], targets: Mapping[str, Any]
) -> tuple[int | None, dict[str, Any], dict[int, str]]:
    """The newest of some checkpoints that is whole; each damaged one is named in a warning.

    Args:
      steps: in order; those there are.
      targets: as `read_parts`.

    Raises:
      StorageError: one may be whole and cannot be read now.

    Returns:
      its step, None if no one is whole; its parts; what is wrong with the newer ones, by step.
    """
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        try:
            return step, read_parts(directory / str(step), targets), damaged
        except StorageError as error:
            raise StorageError(
                f"checkpoint {directory / str(step)} is out of reach ({error}); it is left as it "
                "is: start again when the storage answers."
            ) from error
        except CheckpointError as error:
            damaged[step] = str(error)
            older = "; trying the one before" if step != steps[0] else ""
            logging.warning("Checkpoint %s is damaged (%s)%s.", directory / str(step), error, older)
    return None, {}, damaged


def read_parts(path: pathlib.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads parts of one checkpoint and verifies their checksums.

    A failed read is repeated once, so a fault that passes does not count as damage.

    Args:
      path: folder of the checkpoint.
      targets: part -> `jax.ShapeDtypeStruct`s with the shardings to restore onto; None: on the
        host, with the shapes that were saved.

    Raises:
      CheckpointError: both reads failed; the message is the reason in a few words. StorageError if
        the storage failed and the checkpoint may be intact.
      KeyboardInterrupt: a signal arrived while reading, whether or not the read failed.
    """
    for _ in range(2):
        with calling_orbax():
            try:
                return _read(path, targets)
            except jax.errors.JaxRuntimeError:  # the device's fault, out of memory for one
                raise
            except Exception as error:  # from any layer below: what it means is the same
                kind = StorageError if _is_of_storage(error) else CheckpointError
                problem = first_line(error)
            gc.collect()
    raise kind(problem)


def make_context() -> ocp.Context:
    """Orbax's settings for all checkpoints of ours."""
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=DATA)
    context.checkpointables.registry = registry
    return context


@contextlib.contextmanager
def calling_orbax() -> Iterator[None]:
    """Context for calls into Orbax.

    Delays signals to the end of the block, and silences Orbax's warnings and unfinished coroutines,
    which would print pages for a damaged checkpoint.
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
    """Dtype and shape of every array by name, as `float32[2,3]`: checksums see neither."""
    return {
        name: f"{array.dtype}{list(array.shape)}".replace(" ", "")
        for name, array in checksums.by_name(parts).items()
    }


def first_line(error: BaseException) -> str:
    """The beginning of a message, to stand in brackets."""
    # Of what Orbax says about a part that it cannot load, the rest are its classes, for pages.
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
            f"there is no checkpoint in {directory}; train one first.", path=directory
        )
    targets = dict.fromkeys(names)
    if step is not None:
        try:
            return step, read_parts(directory / str(step), targets)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {directory / str(step)} cannot be read ({error}); steps there: "
                f"{steps}; name another one, or none for the newest that is whole.",
                path=directory / str(step),
            ) from None
    found, parts, damaged = read_newest(directory, steps, targets)
    if found is None:
        raise none_whole(directory, damaged)
    return found, parts


def none_whole(directory: pathlib.Path, damaged: Mapping[int, str]) -> CheckpointError:
    """The one sentence for checkpoints of which none can be read."""
    step, reason = next(iter(damaged.items()))
    return CheckpointError(
        f"none of the {len(damaged)} checkpoints in {directory} can be read (step {step}: "
        f"{reason}); put a copy back, or start over in another --workdir.",
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
        _check_arrays(wanted, kept)  # before memory is taken for them
        parts = ocp.load_checkpointables(path, wanted)
    _check_arrays(parts, kept)
    _compare(checksums.of_parts(parts), kept["checksums"], parts, "checksum")
    return parts


def _on_host(metadata, name: str):
    if metadata is None:
        raise ValueError(f"its {name} cannot be read")
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), metadata)


def _check_arrays(parts: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    if "arrays" in kept:  # older checkpoints do not say
        arrays = {name: part for name, part in parts.items() if name != DATA}
        _compare(describe_arrays(arrays), kept["arrays"], arrays, "shape or type")


def _compare(found: Mapping, kept: Mapping, parts: Mapping[str, Any], what: str) -> None:
    """Every name that belongs to one of `parts` has the same value in both."""
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
