"""Devices, compilation cache, and all uses of JAX's private APIs in the package.

JAX has no public API for three functions:

- `detect_cluster`: `jax.distributed.initialize` detects the cluster and connects in one call, which
  aborts if a process is missing. `distributed.connect` has to know the processes before that.
- `hide_xla_alarms`: XLA's alarms about slow compilation have level ERROR and no switch.
- `count_compiled`: JAX exports no number of compiled versions of a function.
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax._src import clusters
from jax._src.lib import utils
from jax.experimental.compilation_cache import compilation_cache

from convbert_jax import console, machine, storage
from convbert_jax.config import Config, ConfigError
from convbert_jax.config.model import ATTENTIONS, CONVOLUTIONS
from convbert_jax.machine import installed, unmet

_FATAL = 3  # absl's log level in C++


def detect_cluster() -> tuple[str | None, int | None, int | None]:
    """Returns (coordinator, number of processes, number of this process); None: not detected.

    Detects TPU slices, Slurm and Open MPI.

    Raises:
      ValueError, RuntimeError, OSError: from JAX's detection.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, 300
    )[:3]


@contextlib.contextmanager
def hide_xla_alarms() -> Iterator[None]:
    """Hides log lines of XLA within the block. Failures of XLA are Python exceptions."""
    utils.absl_set_min_log_level(_FATAL)
    try:
        yield
    finally:
        utils.absl_set_min_log_level(int(os.environ["TF_CPP_MIN_LOG_LEVEL"]))  # JAX sets it


def count_compiled(function: Callable[..., Any]) -> int:
    """Returns how many versions of a function made by `jax.jit` are compiled."""
    return function._cache_size()


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
    if choice and machine.multiplies_bfloat16():
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


# Counts of the run. JAX's event "cache_misses" counts programs written, by process 0 only.
_events = {"cache_hits": 0, "compile_requests_use_cache": 0}

_folder: str | None = None  # cache folder set by this module


def enable_compile_cache(path: str) -> None:
    """Sets the folder of JAX's persistent compilation cache; "" disables the cache.

    Call it at the start of a run: it resets the counts of `describe_compile_cache`. A folder that
    is already set, for example by JAX_COMPILATION_CACHE_DIR, takes precedence. If the folder cannot
    be created, logs a warning and disables the cache; JAX would warn for every program.

    Args:
      path: folder; several hosts need a path that all can read.

    Raises:
      UserError: as `files.to_path`.
    """
    global _folder
    _events.update(dict.fromkeys(_events, 0))
    if jax.config.jax_compilation_cache_dir != _folder:
        return
    wanted = _make_folder(path) if path else None
    if wanted == _folder:
        return
    _folder = wanted
    jax.config.update("jax_compilation_cache_dir", wanted)
    # The defaults skip programs that are small or compile in less than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX reads the folder only at its first compilation.
    compilation_cache.reset_cache()


def _make_folder(path: str) -> str | None:
    """Creates the cache folder; returns its path for JAX, or None if it cannot be created."""
    folder = storage.to_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.warning(
            "config.train.compile_cache=%s cannot be created: %s. The next start will compile all "
            "programs again. Set a writable folder.",
            path,
            error.strerror or error,
        )
        return None
    return str(folder)


def describe_compile_cache() -> str:
    """Describes cache hits and misses of the run in this process, or "compile cache off"."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return "compile cache off"
    found, asked = _events["cache_hits"], _events["compile_requests_use_cache"]
    return f"compile cache {folder}: {found} programs found, {asked - found} compiled"


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Logs `what` and the seconds so far while a program compiles in this block.

    Hides XLA's alarms ("Very slow compile?", "Constant folding an instruction is taking > 1s"),
    which have level ERROR and no switch. Failures of XLA are Python exceptions.
    """
    with hide_xla_alarms(), console.log_seconds(what):
        yield


class RecompileWatch:
    """Monitor that warns if a function is compiled for more than `shapes` input shapes."""

    def __init__(self, function, name: str, shapes: int = 1):
        self._function = function
        self._name = name
        self._known = shapes

    def check(self, step: int) -> None:
        compiled = count_compiled(self._function)
        if compiled > self._known:
            logging.warning(
                "The %s was recompiled by step %d (%d versions): the shapes or dtypes of its input "
                "change, and the run stops for each compilation.",
                self._name,
                step,
                compiled,
            )
            self._known = compiled


def _count_event(event: str, **_) -> None:
    name = event.removeprefix("/jax/compilation_cache/")
    if name in _events:
        _events[name] += 1


jax.monitoring.register_event_listener(_count_event)  # once per process
