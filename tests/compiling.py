"""XLA settings for tests and for the processes that they start."""

import importlib.metadata

# Compilation dominates the tests; without LLVM's optimizations they take a third of the time.
ANYWHERE = "--xla_backend_optimization_level=0"
# For CPU-only processes: modules are not split, because other workers use the other cores. XLA's
# MLIR fusion emitter takes twice as long as the previous one. jax 0.12 and libtpu have removed that
# flag, and XLA silently exits on unknown flags.
CHEAPLY = f"{ANYWHERE} --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    CHEAPLY += " --xla_cpu_use_fusion_emitters=false"
# XLA aborts if a device waits for another for 40 seconds, which happens on a busy machine.
PATIENTLY = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


def flags(devices: int, how: str = CHEAPLY) -> str:
    """Returns XLA_FLAGS for this number of simulated CPU devices."""
    return f"{how} --xla_force_host_platform_device_count={devices}"


def keep_in(folder: str) -> dict[str, str]:
    """Returns environment variables with which JAX caches all compiled programs in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
