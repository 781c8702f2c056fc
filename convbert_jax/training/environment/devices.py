"""The devices that a run finds, and what follows from them."""

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
    """What must be settled before jax looks for devices, once: `config.platform=cpu`, and silence
    about an absent TPU.

    libtpu, where it is installed, looks for the type and the hosts of its TPU and prints ten lines
    where nobody tells it, to fail all the same; told, it fails in silence, and jax goes on with
    what it finds or, asked for a TPU by name, says what is wrong.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # jax sets this on import where no TPU is on the PCI bus
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def look_for_devices() -> list[jax.Device]:
    """All devices of all processes, or ConfigError if jax finds none."""
    try:
        return jax.devices()
    except RuntimeError as error:
        raise ConfigError(
            f"jax finds no device: {str(error).splitlines()[0]} Install jax for this machine "
            "(pip install 'jax[tpu]' or 'jax[cuda12]'), or stop the process that holds it."
        ) from error


def check_devices(config: Config, found: jax.Device) -> None:
    """Raises ConfigError if devices as `found` are not what the config asks for, by
    `config.platform` or by an implementation that is named, or cannot do what it asks for.
    """
    wanted = {"gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}.get(config.platform)
    if wanted and found.platform not in wanted:
        raise ConfigError(
            f"config.platform='{config.platform}', but jax finds only {found.platform} "
            f"({found.device_kind}); install jax for it (pip install 'jax[tpu]' or 'jax[cuda12]'), "
            "free the device if another process holds it, or set --config.platform=any.",
            field="config.platform",
            value=config.platform,
        )
    here = {"cuda": "gpu"}.get(found.platform, found.platform)
    for field, platforms in (("attention", ATTENTIONS), ("convolution", CONVOLUTIONS)):
        name = getattr(config.model, field)
        if platforms.get(name, "") not in ("", here):
            raise ConfigError(
                f"config.model.{field}='{name}' does not run on {found.platform} "
                f"({found.device_kind}); set config.model.{field}=auto.",
                field=f"config.model.{field}",
                value=name,
            )
    if config.train.profile_start and (fault := fault_of_profiler()):
        raise ConfigError(
            f"config.train.profile_start={config.train.profile_start}: the profiler would end the "
            f"program, as {fault}; pip install 'jax[tpu]=={jax.__version__}', set "
            "config.platform=cpu where there is no TPU, or set config.train.profile_start=0.",
            field="config.train.profile_start",
            value=config.train.profile_start,
        )


def fault_of_profiler() -> str:
    """Why a trace would end this program without a word, "" if it would not.

    The profiler of jax calls that of libtpu, which reads past the end of what an older jaxlib hands
    it; jax loads libtpu, TPU or not, unless told to look for nothing else than a CPU or a GPU.
    """
    asked = jax.config.jax_platforms
    if installed("libtpu") is None or (asked and "tpu" not in asked.split(",")):
        return ""
    of_libtpu = [r for r in importlib.metadata.requires("jax") or () if r.startswith("libtpu")]
    for wanted, found in unmet(of_libtpu, "tpu"):
        return f"jax {jax.__version__} asks for {wanted}, and {found} is installed"
    return ""


def find_devices(config: Config) -> list[jax.Device]:
    """All devices, or ConfigError if they are not what `config` asks for."""
    devices = look_for_devices()
    found = devices[0]
    check_devices(config, found)
    return devices


def advise_dtype(config: Config, found: jax.Device) -> None:
    """Says what a run that trains could make use of."""
    choice = found.platform == "cpu" and config.compute_dtype == "auto"
    if choice and processor.multiplies_bfloat16():
        logging.info(
            "This processor has a matrix unit for bfloat16 (AMX), of which float32 makes no use; "
            "--config.compute_dtype=bfloat16 trains 1.6 to 2.6 times as fast."
        )


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """As "8 x TPU v5e (tpu)"."""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def random_numbers(devices: Sequence[jax.Device]) -> contextlib.AbstractContextManager[None]:
    """Context in which `jax.random.key` makes keys of the generator that suits the devices."""
    if devices[0].platform == "tpu":  # threefry spends several percent of a step on dropout there
        return jax.default_prng_impl("rbg")
    return contextlib.nullcontext()


def compute_dtype(config: Config, device: jax.Device) -> jnp.dtype:
    """What `config.compute_dtype` stands for on a device."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)
