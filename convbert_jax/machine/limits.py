"""Memory and CPUs available to this process, with the limits of its container."""

import os
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/")
_NO_LIMIT = 2**60  # without a limit, cgroups v1 reports a number above this


def free_memory(root: pathlib.Path = _ROOT) -> int:
    """Returns the available memory in bytes, at most the limit of the container."""
    return min(_available_memory(root), cgroup_limits(root)[0] or _NO_LIMIT)


def cgroup_limits(root: pathlib.Path = _ROOT) -> tuple[int | None, float | None]:
    """Returns the cgroup limits (bytes of memory, CPUs) of this process; None without a limit.

    Reads cgroups v1 and v2, including all parent groups.
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


def available_threads() -> int:
    """Returns the number of cores of this process, which is XLA's number of CPU threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of the cgroups of this process and of their parents."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        start = mount / controllers if controllers else mount
        # In a container this may be a path on the host, which is not mounted here.
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
