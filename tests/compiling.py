"""How programs are compiled in tests, in this process and in those that tests start."""

import importlib.metadata

# Tests compile much and run little: without LLVM's optimizations they take a third of the time.
_FLAGS = ["--xla_backend_optimization_level=0"]
# XLA's code generator for fusions through MLIR takes twice as long as the one that it came after,
# which jax 0.12 has no more; a flag that XLA does not know ends the process.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
CHEAPLY = " ".join(_FLAGS)  # for XLA_FLAGS


def flags(devices: int) -> str:
    """XLA_FLAGS of a process that sees its CPU as so many devices."""
    return f"{CHEAPLY} --xla_force_host_platform_device_count={devices}"


def keep_in(folder: str) -> dict[str, str]:
    """The environment in which jax keeps all programs that it compiles in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
