"""Wall-clock times of functions that take turns, so that a busy machine slows all of them alike."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping


def use(target: str) -> None:
    """Makes JAX run on "cpu" or "gpu"; to be called before jax is imported. Exits without a GPU."""
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[target]
    import jax

    try:
        found = jax.devices()[0].platform
    except RuntimeError:
        found = "no device"
    if found != target:
        sys.exit(
            f"--target={target}, but jax finds {found}; install jax for a GPU "
            "(pip install 'jax[cuda12]') or take another target."
        )


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each function in each of `rounds` rounds; one more round warms up.

    Each function must return only when its work is done.
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
    """Median over the rounds of baseline / times: above 1 is faster than the baseline."""
    return statistics.median(b / a for a, b in zip(times, baseline, strict=True))


def copy_bandwidth(size: int, rounds: int = 9) -> float:
    """Bytes per second, read and written, of copying `size` bytes on JAX's default device."""
    import jax
    import jax.numpy as jnp

    source = jax.random.bits(jax.random.key(0), (max(1, size // 4),), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # a plain copy may be elided
    times = alternate({"copy": lambda: jax.block_until_ready(copy(source))}, rounds)["copy"]
    return 2 * source.nbytes / (statistics.median(times) / 1e3)
