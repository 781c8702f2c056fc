"""Properties of this machine, as reported by the operating system; does not import jax.

Accelerators are found without jax, which may wait forever for one.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement

_CHIPS = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")  # v2 to v4; v5 and newer

_GOOGLE = "0x1ae0"  # PCI vendor id; the device ids of its TPUs:
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

_NVIDIA_DRIVER = "proc/driver/nvidia/version"


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """Device files of TPU chips, and the version of the NVIDIA driver ("" without one)."""

    chips: tuple[pathlib.Path, ...]
    driver: str


def find_accelerators(root: pathlib.Path = pathlib.Path("/")) -> Accelerators:
    accel, vfio = (tuple(sorted(root.glob(pattern))) for pattern in _CHIPS)
    chips = accel or (vfio if _has_tpu(root) else ())  # vfio also exposes other devices
    try:
        said = re.search(r"\b\d{3,}(\.\d+)+\b", (root / _NVIDIA_DRIVER).read_text())
    except OSError:
        said = None
    return Accelerators(chips, said.group() if said else "")


def _has_tpu(root: pathlib.Path) -> bool:
    for folder in root.glob("sys/bus/pci/devices/*"):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and device in _TPUS:
            return True
    return False


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
            text = _read_or_empty(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                memory.append(int(text))
        quota, _, period = _read_or_empty(folder / "cpu.max").partition(" ")
        if not period:
            quota, period = (
                _read_or_empty(folder / "cpu.cfs_quota_us"),
                _read_or_empty(folder / "cpu.cfs_period_us"),
            )
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
    for line in _read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        start = mount / controllers if controllers else mount
        # In a container this may be a path on the host, which is not mounted here.
        for part in (pathlib.PurePosixPath(path), *pathlib.PurePosixPath(path).parents):
            yield start / part.relative_to("/")


def _available_memory(root: pathlib.Path) -> int:
    for line in _read_or_empty(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_or_empty(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], extra: str) -> list[tuple[str, str]]:
    """Returns (requirement, installed version or "none") of each requirement that is not met.

    Args:
      requirements: requirements in the form of package metadata.
      extra: extra whose requirements are included; markers that do not apply are ignored.
    """
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append((f"{requirement.name}{requirement.specifier}", found or "none"))
    return missing


# Parameter numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> bool:
    """Makes this process keep freed memory; returns whether the C library supports it.

    Must be called before any thread is started. By default, glibc requests each large buffer from
    the kernel and returns it when it is freed. XLA:CPU keeps all intermediate values of a step in
    one such buffer, so each step would start with page faults on cleared pages. In a single heap
    the pages are cleared once. The process does not shrink below its peak memory.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # A single heap, because it can grow without limit; the heaps of other threads have 64 MB.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])


_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def multiplies_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Returns whether the CPU has a matrix unit for bfloat16 (Intel AMX, Sapphire Rapids or newer).

    Only Linux reports it; False on other systems.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return "amx_bf16" in next(flags, "").split()
