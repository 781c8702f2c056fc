"""Checks that need jax: devices, vocabulary, weights and data, and all processes of a run."""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from convbert_jax import recipes, storage
from convbert_jax.config import Config, ConfigError
from convbert_jax.doctor.checks import Finding, good, warning, wrong
from convbert_jax.interop.networks import abstract_params
from convbert_jax.machine import Accelerators
from convbert_jax.training import consistency, distributed, environment, partitioning
from convbert_jax.workdir import Workdir


def check_devices(config: Config | None, there: Accelerators) -> list[Finding]:
    """Runs a computation on each device of this process.

    Args:
      config: config whose platform is checked; None: skip this check.
      there: accelerators known to the operating system, which jax should have found.
    """
    found = environment.look_for_devices()
    own = jax.local_devices()
    text = f"{len(own)} x {own[0].device_kind} ({own[0].platform})"
    if len(found) > len(own):
        text += f", {len(found)} on all processes"
    if memory := _memory(own[0]):
        text += f", {memory / 2**30:.1f} GiB each"
    for device in own:
        sums = jax.jit(lambda x: (x * x).sum())(jax.device_put(np.arange(8.0), device))
        if float(sums) != 140.0:
            fix = "stop using this device: its results are wrong"
            return [wrong("devices", f"{text}; {device}: 0 + 1 + 4 + … + 49 = {float(sums)}", fix)]
    findings = [good("devices", f"{text}; a test computation succeeded on each")]
    platform = own[0].platform
    if there.chips and platform != "tpu":
        fix = "see the findings for TPU and jax"
        findings.append(wrong("TPU", f"chips found, but jax uses {platform}", fix))
    elif there.driver and platform not in ("gpu", "cuda"):
        fix = "see the findings for NVIDIA and jax"
        findings.append(warning("NVIDIA", f"driver found, but jax uses {platform}", fix))
    if config:
        try:
            environment.check_devices(config, own[0])
        except ConfigError as error:
            return [*findings, Finding("platform", "wrong", str(error).rstrip("."))]
        findings.append(good("platform", f"config.platform='{config.platform}' is available"))
    return findings


def _memory(device: jax.Device) -> int | None:
    """Returns the memory of a device in bytes; None if the backend does not report it."""
    return (device.memory_stats() or {}).get("bytes_limit")


def check_start(config: Config) -> tuple[int, list[Finding]]:
    """Returns the number of parameters of a completed config, and the finding on its files."""
    parameters = partitioning.count_params(abstract_params(config))
    named = {
        "config.tokenizer.path": config.tokenizer.path,
        "config.init_from": config.init_from,
        "config.distillation.teacher": config.distillation.teacher,
    }
    read = [f"{field}={value} is readable" for field, value in named.items() if value]
    return parameters, [good("start", ", ".join([f"{parameters:,} parameters", *read]))]


def check_data(config: Config, workdir: epath.Path) -> list[Finding]:
    """Checks that the data exists, without reading all of it; raises UserError otherwise."""
    return [good("data", recipes.check_sources(config, Workdir(workdir).data(config)))]


LIMIT = 60.0  # seconds for all processes to finish their own checks

_VISIBLE = 5.0  # seconds until a new file on a network disk is visible to other hosts


def compare_processes(
    own: Sequence[Finding], config: Config | None, workdir: epath.Path | None
) -> list[Finding]:
    """Returns the problems of the other processes and of all processes, the same on each process.

    All processes must call it while `workdir` exists on process 0.

    Args:
      own: findings of this process.

    Raises:
      SilentProcessError: process 0 does not answer.
    """
    record: dict[str, Any] = {
        "findings": [dataclasses.asdict(f) for f in own if f.state != "good"],
        "versions": consistency.versions(),
        "command": consistency.fields(config) if config else {},
        "workdir": _reads_same(workdir),
    }
    judge = functools.partial(_compare_records, workdir=str(workdir))
    return [Finding(**each) for each in distributed.decide(record, judge, LIMIT)]


def _reads_same(workdir: epath.Path | None) -> bool | None:
    """Returns whether this process can read a file that process 0 writes to `workdir`.

    None if process 0 cannot write the file or has no workdir.
    """
    first = distributed.place()[0] == 0
    path, word, same = workdir and workdir / ".doctor-of-all", "", False
    try:
        if first and path:
            word = secrets.token_hex(16)
            try:
                storage.write_text(path, word)
            except Exception:  # bucket libraries raise errors of any type
                word = ""
        word = distributed.broadcast(word, LIMIT)
        ends = time.monotonic() + _VISIBLE
        while path and word and not (same := _has(path, word)) and time.monotonic() < ends:
            time.sleep(0.2)
        distributed.broadcast("", LIMIT)  # wait until all processes have read the file
    finally:
        if first and path:
            with contextlib.suppress(Exception):
                path.unlink(missing_ok=True)
    return same if word else None


def _has(path: epath.Path, word: str) -> bool:
    try:
        return path.read_text() == word
    except Exception:
        return False


def _compare_records(
    records: Sequence[Mapping[str, Any] | None], *, workdir: str
) -> list[dict[str, str]]:
    """Returns the findings on all processes, as dicts."""
    findings = []
    by_text: dict[tuple[str, ...], list[int]] = {}
    for index, record in enumerate(records):
        for each in record["findings"] if record and index else ():
            by_text.setdefault(tuple(each.values()), []).append(index)
    for (name, *rest), who in by_text.items():
        findings.append(Finding(f"{name} of {distributed.name_processes(who)}", *rest))
    compared = [r and {name: r[name] for name in ("versions", "command")} for r in records]
    if difference := consistency.find_difference(compared, LIMIT):
        findings.append(Finding("processes", "wrong", difference["message"].rstrip(".")))
    else:
        config = ", same config" if records[0]["command"] else ""
        findings.append(good("processes", f"all {len(records)} answered, same versions{config}"))
    if apart := [i for i, record in enumerate(records) if record and record["workdir"] is False]:
        who = distributed.name_processes(apart)
        text = f"{who} cannot read a file that process 0 wrote to {workdir}"
        fix = "use the same --workdir for all processes, on shared storage"
        findings.append(wrong("workdir", text, fix))
    elif all(record and record["workdir"] for record in records):
        findings.append(good("workdir", f"{workdir} is shared by all processes"))
    return [dataclasses.asdict(each) for each in findings]
