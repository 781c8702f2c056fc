"""Whether jax has what the accelerators of this machine need, and who holds them."""

import contextlib
import os
import pathlib
from collections.abc import Collection

from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine.accelerators import Accelerators
from convbert_jax.machine.packages import installed

LIBTPU_LOCK = "tmp/libtpu_lockfile"
_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}  # what CUDA 12 and 13 ask for


def check(found: Accelerators, root: pathlib.Path = pathlib.Path("/")) -> list[Finding]:
    """Whether jax has what it needs for them, and nobody else holds a TPU."""
    findings = []
    if found.chips:
        findings.append(_check_tpu(found.chips, root))
    if found.driver:
        findings.append(_check_driver(found.driver))
    return findings or [good("accelerators", "no TPU and no NVIDIA driver on this machine")]


def holders(paths: Collection[pathlib.Path], root: pathlib.Path) -> dict[int, str]:
    """pid -> name of every other process that has one of these files open, as far as this user may
    see.
    """
    wanted, found = {str(path) for path in paths}, {}
    for folder in root.glob("proc/[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and _opened(folder / "fd") & wanted:
            with contextlib.suppress(OSError):  # it has ended
                found[pid] = (folder / "comm").read_text().strip()
    return found


def _opened(folder: pathlib.Path) -> set[str]:
    """The files of a process; none where it has ended, or is another user's."""
    opened = set()
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                opened.add(os.readlink(link))
    return opened


def _check_tpu(chips: Collection[pathlib.Path], root: pathlib.Path) -> Finding:
    lock = root / LIBTPU_LOCK
    text = f"{len(chips)} chips"
    if held := holders((*chips, lock), root):
        who = " and ".join(f"process {pid} ({name})" for pid, name in sorted(held.items()))
        pids = " ".join(map(str, sorted(held)))
        return wrong("TPU", f"{text}, held by {who}", f"let it end, or end it: kill {pids}")
    if installed("libtpu") is None:
        return wrong("TPU", f"{text}, and no libtpu", "pip install '.[tpu]'")
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        owner = lock.stat().st_uid
        fix = f"sudo rm {lock}, once no process of that user has the TPU"
        return wrong("TPU", f"{text}; {lock} belongs to user {owner} and cannot be opened", fix)
    return good("TPU", f"{text}, held by no process that can be seen")


def _check_driver(driver: str) -> Finding:
    plugins = {name: installed(name) for name in _LEAST_DRIVER}
    if not any(plugins.values()):
        extra = "cuda13" if int(driver.partition(".")[0]) >= 580 else "cuda12"
        text = f"driver {driver}, and no plugin of jax for it"
        return warning("NVIDIA", text, f"pip install '.[{extra}]', or jax computes on the CPU")
    for name, version in plugins.items():
        least = _LEAST_DRIVER[name]
        if version and int(driver.partition(".")[0]) < least:
            text = f"driver {driver} is too old for {name} {version}, which needs {least}"
            older = ", or take '.[cuda12]'" if least > 525 else ""
            return wrong("NVIDIA", text, f"install a newer driver{older}")
    have = ", ".join(f"{name} {version}" for name, version in plugins.items() if version)
    return good("NVIDIA", f"driver {driver}, {have}")
