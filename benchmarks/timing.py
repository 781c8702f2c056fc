"""Wall-clock times of alternating functions, so that load on the machine affects all alike."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping


def use(target: str) -> None:
    """Makes JAX run on "cpu" or "gpu"; call it before importing jax. Exits without a GPU."""
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[target]
    import jax

    try:
        found = jax.devices()[0].platform
    except RuntimeError:
        found = "no device"
    if found != target:
        sys.exit(
            f"--target={target}, but jax finds {found}; install jax for a GPU "
            "(pip install 'jax[cuda12]') or choose another target."
        )


def take_threads(count: int) -> None:
    """Limits this process to this number of cores, which sets XLA's number of threads.

    Call it before importing jax. Exits if there are fewer cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        sys.exit(f"--threads={count}, but this process may use only {len(cores)} cores.")
    os.sched_setaffinity(0, cores[:count])


def describe_processor() -> str:
    """Returns the processor's name and the number of threads that this process may run."""
    name = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        found = dict(line.split(":", 1) for line in file if ":" in line)
    fields = {key.strip(): value.strip() for key, value in found.items()}
    if "model name" in fields:
        name = f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"
    count = len(os.sched_getaffinity(0))
    return f"{name}; {count} thread{'s' * (count > 1)}"


def describe_ratios(times: list[float], baseline: list[float]) -> str:
    """Returns baseline / times over the rounds as text: median, minimum and maximum."""
    ratios = sorted(b / a for a, b in zip(times, baseline, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each function in each of `rounds` rounds, after a warm-up round.

    Functions must return only when their work is done.
    """
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def paired_ratio(times: list[float], baseline: list[float]) -> float:
    """Returns the median of baseline / times over rounds; above 1 is faster than the baseline."""
    return statistics.median(b / a for a, b in zip(times, baseline, strict=True))


def copy_bandwidth(size: int, rounds: int = 9) -> float:
    """Measures the bytes per second, read plus written, of copying `size` bytes on JAX's device."""
    import jax
    import jax.numpy as jnp

    source = jax.random.bits(jax.random.key(0), (max(1, size // 4),), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # a plain copy may be elided
    times = alternate({"copy": lambda: jax.block_until_ready(copy(source))}, rounds)["copy"]
    return 2 * source.nbytes / (statistics.median(times) / 1e3)
