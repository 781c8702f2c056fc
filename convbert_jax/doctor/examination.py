"""Runs all checks, ordered so that earlier findings explain later ones."""

import contextlib
import functools
from collections.abc import Collection, Iterator

from etils import epath

from convbert_jax.config import Config
from convbert_jax.doctor import accelerators, disk, finding, host, versions
from convbert_jax.doctor.finding import Finding
from convbert_jax.machine import find_accelerators

# Time limits in seconds, which keep the total below a minute if one check hangs. Without problems,
# all checks take one or two seconds, except for devices: a TPU may take half a minute.
_QUICK, _STORAGE, _FILES, _DEVICES = 10.0, 15.0, 20.0, 40.0


def examine(
    config: Config | None, workdir: epath.Path | None, given: Collection[str] = ()
) -> Iterator[Finding]:
    """Yields the findings on this machine one by one, then the findings on all processes.

    With several processes, process 0 yields both; the others yield only the findings on all
    processes, which include the problems that each process found.

    Args:
      config: config of the run; None: skip the checks that need one.
      workdir: folder of the run; None: skip its checks.
      given: as in `recipes.start.read_start`.
    """
    if fault := versions.fault_of_jax():
        yield from _check_machine(find_accelerators())
        yield from finding.run("host", lambda: host.check_host(0, 0), limit=_QUICK)
        yield fault
        return
    from convbert_jax.training import distributed

    index, count = distributed.place()
    if count == 1:
        yield from _check_all(config, workdir, given)
        return
    from convbert_jax.doctor import processes

    with contextlib.ExitStack() as stack:
        # Process 0 creates and removes the folder, so that on shared storage no other process
        # does.
        if workdir is not None and index == 0:
            stack.enter_context(disk.made(workdir))
        distributed.broadcast("", processes.LIMIT)
        own = []
        for found in _check_all(config, workdir, given):
            own.append(found)
            if index == 0:
                yield found
        yield from processes.compare(own, config, workdir)


def _check_all(
    config: Config | None, workdir: epath.Path | None, given: Collection[str]
) -> Iterator[Finding]:
    """Yields the findings of one process."""
    from convbert_jax.doctor import devices

    there = find_accelerators()
    yield from _check_machine(there)
    yield from finding.run("devices", lambda: devices.check_devices(config, there), limit=_DEVICES)
    parameters, workers = 0, 0
    if config:
        from convbert_jax.doctor.start import Start

        start = Start(config, workdir, given)
        yield from finding.run("start", start.check, limit=_FILES)
        yield from finding.run("data", start.check_data, limit=_FILES, late="warning")
        parameters, workers = start.parameters, config.data.workers
    yield from finding.run("host", lambda: host.check_host(parameters, workers), limit=_QUICK)
    if workdir is not None:
        yield from finding.run("workdir", lambda: disk.check_workdir(workdir), limit=_STORAGE)
    if parameters:
        space = functools.partial(disk.check_space, workdir, config, parameters)
        yield from finding.run("space", space, limit=_STORAGE)
    if config:
        cache = functools.partial(disk.check_compile_cache, config.train.compile_cache)
        yield from finding.run("compile cache", cache, limit=_STORAGE, late="warning")


def _check_machine(there: accelerators.Accelerators) -> Iterator[Finding]:
    """Yields the findings on versions and accelerators, without importing jax."""
    of_versions = functools.partial(versions.check_versions, tpu_here=bool(there.chips))
    yield from finding.run("versions", of_versions, limit=_QUICK)
    yield from finding.run("accelerators", lambda: accelerators.check(there), limit=_QUICK)
