"""All checks, in an order in which an earlier one explains a later one."""

import contextlib
import functools
from collections.abc import Collection, Iterator

from etils import epath

from convbert_jax.config import Config
from convbert_jax.doctor import accelerators, disk, finding, host, versions
from convbert_jax.doctor.finding import Finding
from convbert_jax.machine.accelerators import find_accelerators

# Seconds for a check: one that hangs still leaves it below a minute. All of them take one or two
# where nothing is wrong, but devices: a TPU may take half a minute.
_QUICK, _STORAGE, _FILES, _DEVICES = 10.0, 15.0, 20.0, 40.0


def examine(
    config: Config | None, workdir: epath.Path | None, given: Collection[str] = ()
) -> Iterator[Finding]:
    """Findings on this machine, as they come, and of several processes on all of them.

    Of several processes the first one gives its own and what concerns all; the others give only
    the latter, in which the first one tells what they found.

    Args:
      config: None checks only what needs none.
      workdir: None checks no folder of a run.
      given: as `recipes.start.read_start` takes it.
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
        # The first one makes the folder and is the last to need it: on storage that all share the
        # others then neither make nor remove it.
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
    """What one process can tell by itself."""
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
    """Of versions and accelerators; jax is not loaded."""
    of_versions = functools.partial(versions.check_versions, tpu_here=bool(there.chips))
    yield from finding.run("versions", of_versions, limit=_QUICK)
    yield from finding.run("accelerators", lambda: accelerators.check(there), limit=_QUICK)
