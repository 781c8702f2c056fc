"""Checks the devices that jax finds, with a computation on each."""

import jax
import numpy as np

from convbert_jax.config import Config, ConfigError
from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine import Accelerators
from convbert_jax.training import environment


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
