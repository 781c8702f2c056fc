"""Checks a kernel against XLA on the device before the first program uses it.

`dispatch.choose` calls `find_fault` while a program is traced. The check then runs in a separate
thread, where JAX has neither the trace nor the mesh of that program. Checking all ops of a config
before tracing instead would need a list of ops that must match the models. All processes trace the
same programs, so they check the same kernels in the same order and can combine their results.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from convbert_jax import machine, storage
from convbert_jax.config import UserError

log = logging.getLogger(__name__)

FILE = "kernel_checks.json"  # in the compile cache folder: check -> largest error
_passed: set[str] = set()  # keys of checks that passed in this process
_faults: dict[tuple[str, str], str] = {}  # (op, implementation) -> why it is disabled


class KernelError(UserError):
    """A kernel that was requested by name computes wrong results on this device."""


def find_fault(
    op: str,
    name: str,
    platform: str,
    function: Callable,
    definition: Callable,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    length: int,
) -> str:
    """Checks a kernel, once per kind of call, and logs the result.

    The check is skipped if this process has no device of the kind that the program is compiled for,
    since the program then does not run here.

    Args:
      op, name: names of the op and of the kernel, for messages.
      platform: the platform that the kernel requires.
      function, definition, arguments, options: as in `largest_error`, before `shrink`.
      length: of the rows of the check.

    Returns:
      The reason why the kernel is disabled in this run, or "".
    """
    device = _find_device(platform)
    if device is None or (op, name) in _faults:
        return _faults.get((op, name), "")
    arguments = shrink(arguments, length)
    call = describe(arguments, options)
    client = device.client.platform_version
    jaxlib = machine.installed("jaxlib")
    versions = f"jax {jax.__version__}, jaxlib {jaxlib}, {' '.join(client.split())}"
    key = f"{op} {name} {_hash_sources()}: {call}; {device.device_kind}, {versions}"
    if key in _passed:
        return ""
    short = arguments[0].dtype.itemsize == 2
    tolerance = TOLERANCE_16_BITS if short else TOLERANCE_32_BITS

    def check():
        error, where = _read_verdicts().get(key), "checked before"
        if error is None:
            try:
                with jax.default_device(device):
                    error, where = largest_error(function, definition, arguments, options)
            except Exception as failure:
                lines = str(failure).strip().splitlines() or [""]
                error, where = math.inf, f"{type(failure).__name__}: {lines[0][:300]}"
        error = float(np.float32(error))
        return error, _combine(error), where

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        own, worst, where = thread.submit(check).result()
    if math.isfinite(own):
        _keep_verdict(key, own)
    if worst > own:
        where = "in another process"
    found = f"{op}: {name} against XLA on {device.device_kind}, {call}: largest relative error"
    found += f" {worst:.2g} ({where}), tolerance {tolerance}"
    if worst <= tolerance:
        log.info("%s.", found)
        _passed.add(key)
        return ""
    log.warning(
        "%s. This kernel is disabled for this run; please report this line with %s.",
        found,
        versions,
    )
    reason = f"relative error against XLA is {worst:.2g} ({where}), tolerance {tolerance}"
    return _faults.setdefault((op, name), reason)


def _find_device(platform: str) -> jax.Device | None:
    """Returns a local device of the kind that the program is compiled for, or None."""
    wanted = jax.sharding.get_abstract_mesh().abstract_device
    local = jax.local_devices()[0]
    of_kind = wanted is None or wanted.device_kind == local.device_kind
    return local if of_kind and local.platform == platform else None


def _combine(error: float) -> float:
    """Returns the largest error of all processes."""
    if jax.process_count() == 1:
        return error
    return float(np.max(multihost_utils.process_allgather(np.float32(error))))


@functools.cache
def _hash_sources() -> str:
    """Hashes the source files of all ops, including these checks."""
    folder = pathlib.Path(__file__).parent
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _path() -> os.PathLike | None:
    folder = jax.config.jax_compilation_cache_dir
    return storage.to_path(folder) / FILE if folder else None


def _read_verdicts() -> dict[str, float]:
    """Returns the results of this and earlier runs; none if the file cannot be read."""
    try:
        kept = storage.read_json(_path(), remedy="remove it") if _path() else {}
    except (OSError, UserError):
        return {}
    kept = kept if isinstance(kept, dict) else {}
    return {key: error for key, error in kept.items() if isinstance(error, float)}


def _keep_verdict(key: str, error: float) -> None:
    """Saves a result. Concurrent writers may lose one; that check then runs again."""
    kept = _read_verdicts()
    if not _path() or kept.get(key) == error:
        return
    try:
        storage.write_json(_path(), kept | {key: error})
    except (OSError, UserError) as failure:
        log.info("Cannot write %s (%s); the next run checks the kernels again.", _path(), failure)


# --- Comparison of outputs, gradients and dropout masks on small random inputs ---


ROWS, LENGTH, KEYS = 2, 256, 384  # KEYS: number of keys in cross-attention
# Maximum error relative to the largest expected number. Rounding errors stay far below; a wrong
# block, gradient or dropout mask is far above. The float32 bound allows products in bfloat16
# passes, as in JAX's splash attention on TPUs.
TOLERANCE_16_BITS, TOLERANCE_32_BITS = 0.05, 0.02


def shrink(arguments: Sequence[Any], length: int = LENGTH) -> list[Any]:
    """Replaces the arrays of a call by `ShapeDtypeStruct`s with few rows, of `length` positions.

    Integer arrays (segment ids) and arrays of three or more axes start with rows and positions;
    other arrays are parameters and keep their shape. An array that occurs twice stays one object.
    """
    whole, made = arguments[0].shape[1], {}

    def shrink_array(x):
        shape = x.shape
        if len(shape) > 2 or _is_integer(x):
            shape = (ROWS, length if shape[1] == whole else KEYS, *shape[2:])
        return made.setdefault(id(x), jax.ShapeDtypeStruct(shape, x.dtype))

    return [shrink_array(x) if hasattr(x, "shape") else x for x in arguments]


def describe(arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Formats a call with `shrink`ed arguments; the text identifies what is compiled."""
    parts = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else str(x) for x in arguments]
    parts += [f"{name}={getattr(x, 'kept', x)}" for name, x in options.items()]
    return " ".join(parts)


def largest_error(
    function: Callable, definition: Callable, arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[float, str]:
    """Returns the largest error of `measure_errors` and the name of its array."""
    errors = measure_errors(function, definition, arguments, options)
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def measure_errors(
    function: Callable,
    definition: Callable,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    exact: Any = jnp.float32,
) -> dict[str, float]:
    """Compares outputs and gradients of two functions, with padding and several segments.

    Attention dropout masks are compared as well: with queries of 0 and the identity as values, the
    output is the mask divided by the number of visible keys, so a single wrong entry is an error
    of 1. The mean of the mask is compared with the rate.

    Args:
      function: the kernel, called with `arguments` and `options`.
      definition: the same function in XLA; must drop the same weights.
      arguments: arguments of a call, with `ShapeDtypeStruct`s instead of arrays.
      options: keyword arguments of the call.
      seed: seed of the random inputs.
      exact: the dtype in which the definition computes; float64 runs on the CPU.

    Returns:
      array name -> largest error, relative to the largest expected number; infinity for NaN.
    """
    dtype, rng = arguments[0].dtype, np.random.default_rng(seed)
    places, run = make_program(arguments, options)
    kernel = jax.jit(lambda *arrays: run(function, arrays))
    defined = jax.jit(lambda *arrays: run(definition, arrays))
    errors = {}

    def measure(arrays, what):
        actual = kernel(*arrays)
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision("highest"))
            if exact == np.float64:
                stack.enter_context(jax.enable_x64(True))
                stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
            expected = defined(*(np.asarray(x).astype(exact) for x in arrays))
        names = ["the output", *(f"the gradient of argument {place}" for place in places)]
        for name, one, other in zip(names, actual, expected, strict=True):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            error = np.abs(one - other).max() / (np.abs(other).max() or 1.0)
            errors[f"{name}{what}"] = np.inf if np.isnan(error) else float(error)
        return np.asarray(actual[0], np.float64)

    def draw(shape):
        scale = shape[0] ** -0.5 if len(shape) < 3 else 1.0  # parameters have one or two axes
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    arrays = [draw(arguments[place].shape) for place in places]
    measure(arrays, "")
    if options.get("drop") is not None:
        query, key, value = arrays
        positions, width = value.shape[1], value.shape[3]
        total = 0.0
        for first in range(0, positions, width):
            mask = jnp.eye(positions, width, -first, dtype)[None, :, None]
            probe = [0 * query, key, jnp.broadcast_to(mask, value.shape)]
            total = total + measure(probe, f" with dropout at keys {first} to {first + width - 1}")
        share = options["drop"].kept / 256
        errors["the dropout rate"] = float(abs(total.sum(-1).mean() * share - share))
    return errors


def make_program(
    arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[int], Callable[..., tuple[jax.Array, ...]]]:
    """Returns the indices of the floating point arguments and a function that evaluates a kernel.

    run(function, arrays), with arrays for these indices, returns the output of `function` and the
    gradients for a fixed random cotangent.
    """
    dtype = arguments[0].dtype
    places = [place for place, x in enumerate(arguments) if _is_floating(x)]
    ids = {id(x): _segment_ids(x.shape) for x in arguments if _is_integer(x)}
    if options.get("drop") is not None:
        options = {**options, "drop": dataclasses.replace(options["drop"], key=jax.random.key(0))}

    def run(function, arrays):
        constants = {place: jnp.asarray(x) for place, x in ids.items()}  # traced indices need jnp

        def call(*arrays):
            given = dict(zip(places, arrays, strict=True))
            filled = (given.get(i, constants.get(id(x), x)) for i, x in enumerate(arguments))
            return function(*filled, **options)

        out, back = jax.vjp(call, *arrays)
        cotangent = jax.random.normal(jax.random.key(1), out.shape, jnp.float32).astype(dtype)
        return out, *back(cotangent.astype(out.dtype))

    return places, run


def _is_floating(x: Any) -> bool:
    return hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)


def _is_integer(x: Any) -> bool:
    return hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.integer)


def _segment_ids(shape: tuple[int, ...]) -> np.ndarray:
    """Returns four segments per row; in the first row padding replaces the last segment."""
    ids = np.tile(1 + 4 * np.arange(shape[1], dtype=np.int32) // shape[1], (shape[0], 1))
    ids[0][ids[0] == 4] = 0
    return ids
