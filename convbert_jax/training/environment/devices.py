"""Device selection, checks of the config against the devices, and defaults by device."""

import contextlib
import importlib.metadata
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import logging

from convbert_jax.config import Config, ConfigError
from convbert_jax.config.implementations import ATTENTIONS, CONVOLUTIONS
from convbert_jax.machine import processor
from convbert_jax.machine.packages import installed, unmet


def prepare_platform(platform: str) -> None:
    """Configures JAX before it initializes its backends.

    Selects the CPU if `platform` is "cpu". On a machine without a TPU, sets the variables of libtpu
    that otherwise make it query a metadata server and print ten lines before it fails. JAX still
    reports an error if a TPU was requested explicitly.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # JAX sets this on import if no TPU is on the PCI bus.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def look_for_devices() -> list[jax.Device]:
    """Returns all devices of all processes; raises ConfigError if JAX finds none."""
    try:
        return jax.devices()
    except RuntimeError as error:
        raise ConfigError(
            f"JAX found no device: {str(error).splitlines()[0]} Install JAX for this machine "
            "(pip install 'jax[tpu]' or 'jax[cuda12]'), or stop the process that uses the device."
        ) from error


def check_devices(config: Config, found: jax.Device) -> None:
    """Raises ConfigError if the config needs a platform or a profiler that is not available.

    Args:
      found: one of the run's devices, which are all of one kind.
    """
    wanted = {"gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}.get(config.platform)
    if wanted and found.platform not in wanted:
        raise ConfigError(
            f"config.platform='{config.platform}', but JAX found only {found.platform} "
            f"({found.device_kind}). Install JAX for it (pip install 'jax[tpu]' or 'jax[cuda12]'), "
            "stop any process that uses the device, or set --config.platform=any.",
            field="config.platform",
            value=config.platform,
        )
    here = {"cuda": "gpu"}.get(found.platform, found.platform)
    for field, platforms in (("attention", ATTENTIONS), ("convolution", CONVOLUTIONS)):
        name = getattr(config.model, field)
        if platforms.get(name, "") not in ("", here):
            raise ConfigError(
                f"config.model.{field}='{name}' does not run on {found.platform} "
                f"({found.device_kind}). Set config.model.{field}=auto.",
                field=f"config.model.{field}",
                value=name,
            )
    if config.train.profile_start and (fault := fault_of_profiler()):
        raise ConfigError(
            f"config.train.profile_start={config.train.profile_start}: the profiler would crash "
            f"because {fault}. Run pip install 'jax[tpu]=={jax.__version__}', set "
            "config.platform=cpu without a TPU, or set config.train.profile_start=0.",
            field="config.train.profile_start",
            value=config.train.profile_start,
        )


def fault_of_profiler() -> str:
    """Returns why the profiler would crash this process without a message, or "".

    JAX's profiler calls libtpu's, which reads out of bounds with an older jaxlib. JAX loads libtpu
    even without a TPU, unless jax_platforms excludes it.
    """
    asked = jax.config.jax_platforms
    if installed("libtpu") is None or (asked and "tpu" not in asked.split(",")):
        return ""
    of_libtpu = [r for r in importlib.metadata.requires("jax") or () if r.startswith("libtpu")]
    for wanted, found in unmet(of_libtpu, "tpu"):
        return f"jax {jax.__version__} requires {wanted}, but {found} is installed"
    return ""


def find_devices(config: Config) -> list[jax.Device]:
    """Returns all devices; raises ConfigError if they do not match `config`."""
    devices = look_for_devices()
    found = devices[0]
    check_devices(config, found)
    return devices


def advise_dtype(config: Config, found: jax.Device) -> None:
    """Logs a recommendation to train in bfloat16 if the CPU has a matrix unit for it."""
    choice = found.platform == "cpu" and config.compute_dtype == "auto"
    if choice and processor.multiplies_bfloat16():
        logging.info(
            "This CPU supports AMX; --config.compute_dtype=bfloat16 trains 1.6 to 2.6 times faster."
        )


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """Formats devices as "8 x TPU v5e (tpu)"."""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def random_numbers(devices: Sequence[jax.Device]) -> contextlib.AbstractContextManager[None]:
    """Returns a context with the default PRNG for the devices: rbg on TPUs, else threefry."""
    if devices[0].platform == "tpu":  # threefry takes several percent of a step for dropout
        return jax.default_prng_impl("rbg")
    return contextlib.nullcontext()


def compute_dtype(config: Config, device: jax.Device) -> jnp.dtype:
    """Resolves `config.compute_dtype`; "auto" is float32 on CPUs, else bfloat16."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)
