"""What jax finds, and whether it computes."""

import jax
import numpy as np

from convbert_jax.config import Config, ConfigError
from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine.accelerators import Accelerators
from convbert_jax.training.environment import devices


def check_devices(config: Config | None, there: Accelerators) -> list[Finding]:
    """The devices of this process, each with a computation.

    Args:
      there: what the system has, which jax should have found.
    """
    found = devices.look_for_devices()
    own = jax.local_devices()
    text = f"{len(own)} x {own[0].device_kind} ({own[0].platform})"
    if len(found) > len(own):
        text += f", {len(found)} of all processes"
    if memory := _memory(own[0]):
        text += f", {memory / 2**30:.1f} GiB each"
    for device in own:
        sums = jax.jit(lambda x: (x * x).sum())(jax.device_put(np.arange(8.0), device))
        if float(sums) != 140.0:
            fix = "take the device out of use: it computes wrong numbers"
            return [wrong("devices", f"{text}; {device} says 0 + 1 + … + 49 = {float(sums)}", fix)]
    findings = [good("devices", f"{text}; each computes")]
    platform = own[0].platform
    if there.chips and platform != "tpu":
        fix = "look at the lines on the TPU and on jax"
        findings.append(wrong("TPU", f"it is here, and jax computes on {platform}", fix))
    elif there.driver and platform not in ("gpu", "cuda"):
        fix = "look at the lines on NVIDIA and on jax"
        findings.append(warning("NVIDIA", f"its driver is here, jax computes on {platform}", fix))
    if config:
        try:
            devices.check_devices(config, own[0])
        except ConfigError as error:
            return [*findings, Finding("platform", "wrong", str(error).rstrip("."))]
        findings.append(good("platform", f"config.platform='{config.platform}' is fulfilled"))
    return findings


def _memory(device: jax.Device) -> int | None:
    """Bytes, where the backend tells."""
    return (device.memory_stats() or {}).get("bytes_limit")
