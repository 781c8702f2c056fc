"""Checks memory and CPUs, with the limits of the container."""

import os
import pathlib

from convbert_jax.doctor.finding import Finding, good, warning
from convbert_jax.machine import cgroup_limits, free_memory

_ROOT = pathlib.Path("/")
_LEAST_MEMORY = 4 * 2**30  # bytes for Python, jax and the compiler, without a model
_LEAST_CPUS = 2  # one prepares batches while the other dispatches steps


def check_host(parameters: int, workers: int, root: pathlib.Path = _ROOT) -> list[Finding]:
    """Checks that memory and CPUs are sufficient.

    Args:
      parameters: number of parameters of the model, 0 if unknown. Parameters and moments are in
        host memory while a checkpoint is read, and permanently on a CPU.
      workers: `config.data.workers`.
      root: root of the file system.
    """
    limit, cpus = cgroup_limits(root)
    memory = free_memory(root)
    text = f"{memory / 2**30:.1f} GiB free"
    if limit:
        text += f" (container limit: {limit / 2**30:.1f} GiB)"
    need = _LEAST_MEMORY + 3 * 4 * parameters
    if memory < need:
        fix = f"a run needs {need / 2**30:.1f} GiB; stop other programs or increase the limit"
        findings = [warning("memory", text, fix)]
    else:
        findings = [good("memory", text)]
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = min(there, cpus or there)
    text = f"{usable:g} available"
    if cpus and cpus < there:
        text += f" of {there} (container limit)"
    if usable < _LEAST_CPUS:
        fix = f"provide {_LEAST_CPUS} or more, or the device waits for batches"
        return [*findings, warning("CPUs", text, fix)]
    if workers > usable:
        fix = "set config.data.workers=0, which uses one per CPU"
        return [*findings, warning("CPUs", f"{text}, config.data.workers={workers}", fix)]
    return [*findings, good("CPUs", text)]
