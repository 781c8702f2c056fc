"""How programs are compiled in tests, in this process and in those that tests start."""

import importlib.metadata

# Tests compile much and run little: without LLVM's optimizations they take a third of the time.
ANYWHERE = "--xla_backend_optimization_level=0"
# Of a process with CPUs alone, where workers have the other cores: a module is not cut in parts.
# XLA's code generator for fusions through MLIR takes twice as long as the one before it, which jax
# 0.12 and libtpu have no more; a flag that XLA does not know ends the process without a word.
CHEAPLY = f"{ANYWHERE} --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    CHEAPLY += " --xla_cpu_use_fusion_emitters=false"
# XLA ends a process in which a device waits for another for 40 seconds: on a busy machine that is
# no deadlock.
PATIENTLY = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


def flags(devices: int, how: str = CHEAPLY) -> str:
    """XLA_FLAGS of a process that sees its CPU as so many devices."""
    return f"{how} --xla_force_host_platform_device_count={devices}"


def keep_in(folder: str) -> dict[str, str]:
    """The environment in which jax keeps all programs that it compiles in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
