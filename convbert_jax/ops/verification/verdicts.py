"""Runs kernel checks on first use, and caches their results.

`dispatch.choose` calls `find_fault` while a program is traced. The check then runs in a separate
thread, where JAX has neither the trace nor the mesh of that program. Checking all ops of a config
before tracing instead would need a list of ops that must match the models. All processes trace the
same programs, so they check the same kernels in the same order and can combine their results.
"""

import concurrent.futures
import functools
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convbert_jax import files
from convbert_jax.config import UserError
from convbert_jax.machine import packages
from convbert_jax.ops.verification import compare

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
) -> str:
    """Checks a kernel, once per kind of call, and logs the result.

    The check is skipped if this process has no device of the kind that the program is compiled for,
    since the program then does not run here.

    Args:
      op, name: names of the op and of the kernel, for messages.
      platform: the platform that the kernel requires.
      function, definition, arguments, options: as in `compare.largest_error`, before `shrink`.

    Returns:
      The reason why the kernel is disabled in this run, or "".
    """
    device = _find_device(platform)
    if device is None or (op, name) in _faults:
        return _faults.get((op, name), "")
    arguments = compare.shrink(arguments)
    call = compare.describe(arguments, options)
    client = device.client.platform_version
    jaxlib = packages.installed("jaxlib")
    versions = f"jax {jax.__version__}, jaxlib {jaxlib}, {' '.join(client.split())}"
    key = f"{op} {name} {_hash_sources()}: {call}; {device.device_kind}, {versions}"
    if key in _passed:
        return ""
    short = arguments[0].dtype.itemsize == 2
    tolerance = compare.TOLERANCE_16_BITS if short else compare.TOLERANCE_32_BITS

    def check():
        error, where = _read_verdicts().get(key), "checked before"
        if error is None:
            try:
                with jax.default_device(device):
                    error, where = compare.largest_error(function, definition, arguments, options)
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
    folder = pathlib.Path(__file__).parents[1]
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _path() -> os.PathLike | None:
    folder = jax.config.jax_compilation_cache_dir
    return files.to_path(folder) / FILE if folder else None


def _read_verdicts() -> dict[str, float]:
    """Returns the results of this and earlier runs; none if the file cannot be read."""
    try:
        kept = files.read_json(_path(), remedy="remove it") if _path() else {}
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
        files.write_json(_path(), kept | {key: error})
    except (OSError, UserError) as failure:
        log.info("Cannot write %s (%s); the next run checks the kernels again.", _path(), failure)
