"""Memory and CPUs of the machine, within the limits of the container that this process is in."""

import os
import pathlib
from collections.abc import Iterator

from convbert_jax.doctor.finding import Finding, good, warning

_ROOT = pathlib.Path("/")
_LEAST_MEMORY = 4 * 2**30  # bytes: Python, jax and its compiler, without a model
_LEAST_CPUS = 2  # one feeds the device that another one drives
_NO_LIMIT = 2**60  # what version 1 of cgroups writes in place of none, and more


def check_host(parameters: int, workers: int, root: pathlib.Path = _ROOT) -> list[Finding]:
    """Whether memory and CPUs are enough.

    Args:
      parameters: of the model, 0 if unknown. They and the optimizer's moments are on the host when
        a checkpoint is read, and on a CPU always.
      workers: `config.data.workers`.
      root: of the file system.
    """
    limit, cpus = cgroup_limits(root)
    memory = min(_available_memory(root), limit or _NO_LIMIT)
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


def cgroup_limits(root: pathlib.Path = _ROOT) -> tuple[int | None, float | None]:
    """(bytes of memory, CPUs) that the control groups of this process allow; None without a limit.

    Both versions of cgroups, and every group above this one.
    """
    memory: list[int] = []
    cpus: list[float] = []
    for folder in _groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                memory.append(int(text))
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not period:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cpus.append(int(quota) / int(period))
    return min(memory, default=None), min(cpus, default=None)


def _groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of the groups of this process, and of all above them."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        start = mount / controllers if controllers else mount
        # In a container the path may be that of the host, which is not mounted here.
        for part in (pathlib.PurePosixPath(path), *pathlib.PurePosixPath(path).parents):
            yield start / part.relative_to("/")


def _available_memory(root: pathlib.Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
