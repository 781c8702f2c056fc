"""Memory and CPUs of the machine, within the limits of the container that this process is in."""

import os
import pathlib

from convbert_jax.doctor.finding import Finding, good, warning
from convbert_jax.machine.limits import cgroup_limits, free_memory

_ROOT = pathlib.Path("/")
_LEAST_MEMORY = 4 * 2**30  # bytes: Python, jax and its compiler, without a model
_LEAST_CPUS = 2  # one feeds the device that another one drives


def check_host(parameters: int, workers: int, root: pathlib.Path = _ROOT) -> list[Finding]:
    """Whether memory and CPUs are enough.

    Args:
      parameters: of the model, 0 if unknown. They and the optimizer's moments are on the host when
        a checkpoint is read, and on a CPU always.
      workers: `config.data.workers`.
      root: of the file system.
    """
    limit, cpus = cgroup_limits(root)
    memory = free_memory(root)
    text = f"{memory / 2**30:.1f} GiB free"
    if limit:
        text += f" (the container may have {limit / 2**30:.1f} GiB)"
    need = _LEAST_MEMORY + 3 * 4 * parameters
    if memory < need:
        fix = f"a run wants {need / 2**30:.1f} GiB; end other programs or raise the limit"
        findings = [warning("memory", text, fix)]
    else:
        findings = [good("memory", text)]
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = min(there, cpus or there)
    text = f"{usable:g} may be used"
    if cpus and cpus < there:
        text += f" of {there}: the container's limit"
    if usable < _LEAST_CPUS:
        fix = f"give it {_LEAST_CPUS} or more, or the device waits for batches"
        return [*findings, warning("CPUs", text, fix)]
    if workers > usable:
        fix = "leave config.data.workers=0, which takes one for each"
        return [*findings, warning("CPUs", f"{text}, config.data.workers={workers}", fix)]
    return [*findings, good("CPUs", text)]
