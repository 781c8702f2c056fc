"""Checks the libraries for the accelerators of this machine, and which processes use them."""

import contextlib
import os
import pathlib
from collections.abc import Collection

from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine import Accelerators, installed

LIBTPU_LOCK = "tmp/libtpu_lockfile"
_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}  # requirements of CUDA 12, 13


def check(found: Accelerators, root: pathlib.Path = pathlib.Path("/")) -> list[Finding]:
    """Checks that jax can use the accelerators and that no other process uses a TPU."""
    findings = []
    if found.chips:
        findings.append(_check_tpu(found.chips, root))
    if found.driver:
        findings.append(_check_driver(found.driver))
    return findings or [good("accelerators", "no TPU and no NVIDIA driver on this machine")]


def holders(paths: Collection[pathlib.Path], root: pathlib.Path) -> dict[int, str]:
    """Returns {pid: name} of the other processes that have one of these files open.

    Only processes that this user may inspect are found.
    """
    wanted, found = {str(path) for path in paths}, {}
    for folder in root.glob("proc/[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and _opened(folder / "fd") & wanted:
            with contextlib.suppress(OSError):  # the process has exited
                found[pid] = (folder / "comm").read_text().strip()
    return found


def _opened(folder: pathlib.Path) -> set[str]:
    """Returns the open files of a process; empty if it has exited or belongs to another user."""
    opened = set()
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                opened.add(os.readlink(link))
    return opened


def _check_tpu(chips: Collection[pathlib.Path], root: pathlib.Path) -> Finding:
    lock = root / LIBTPU_LOCK
    text = f"{len(chips)} chips"
    if held := holders((*chips, lock), root):
        who = " and ".join(f"process {pid} ({name})" for pid, name in sorted(held.items()))
        pids = " ".join(map(str, sorted(held)))
        return wrong("TPU", f"{text}, in use by {who}", f"wait, or stop it: kill {pids}")
    if installed("libtpu") is None:
        return wrong("TPU", f"{text}, but libtpu is not installed", "pip install '.[tpu]'")
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        owner = lock.stat().st_uid
        fix = f"sudo rm {lock}, when no process of that user uses the TPU"
        return wrong("TPU", f"{text}; {lock} belongs to user {owner} and cannot be opened", fix)
    return good("TPU", f"{text}, not in use by any visible process")


def _check_driver(driver: str) -> Finding:
    plugins = {name: installed(name) for name in _LEAST_DRIVER}
    if not any(plugins.values()):
        extra = "cuda13" if int(driver.partition(".")[0]) >= 580 else "cuda12"
        text = f"driver {driver}, but no CUDA plugin of jax is installed, so jax uses the CPU"
        return warning("NVIDIA", text, f"pip install '.[{extra}]'")
    for name, version in plugins.items():
        least = _LEAST_DRIVER[name]
        if version and int(driver.partition(".")[0]) < least:
            text = f"driver {driver} is too old for {name} {version}, which needs {least}"
            older = ", or use '.[cuda12]'" if least > 525 else ""
            return wrong("NVIDIA", text, f"install a newer driver{older}")
    have = ", ".join(f"{name} {version}" for name, version in plugins.items() if version)
    return good("NVIDIA", f"driver {driver}, {have}")
