"""Costs of functions on a CPU, a GPU or by the TPU compiler's model, and how they are printed.

Functions take turns, so that load on the machine affects all alike.
"""

import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from convbert_jax.analysis import tpu_devices, tpu_pricing

TARGETS = (*(f"tpu:{name}" for name in tpu_devices.CHIPS), "cpu", "gpu", "tpu")
UNITS = {"cpu": "ms", "gpu": "ms", "tpu": "ms"}  # compile-only targets: thousand cycles


def use(target: str) -> None:
    """Makes JAX compile for `target`; call it before importing jax. Exits without the device."""
    if target.startswith("tpu:"):
        tpu_pricing.use_compile_only_tpu()
        return
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(target, "cpu")
    import jax

    try:
        found = jax.devices()[0].platform
    except RuntimeError:
        found = "no device"
    if found != target:
        sys.exit(
            f"--target={target}, but jax finds {found}; install jax for it (pip install "
            "'jax[cuda12]' or 'jax[tpu]') or choose another target."
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


# --- Times ---


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    least: float = 0.0,
    rest: float = 0.0,
    alone: bool = True,
) -> dict[str, list[float]]:
    """Returns the milliseconds of each function in each of `rounds` rounds, after a warm-up round.

    Functions must return only when their work is done. A process with one thread that works `alone`
    is timed by its CPU time, which other programs hardly change.

    Args:
      alone: whether this process does all of the work.
      least: minimum milliseconds of a turn, by repetition.
      rest: seconds of sleep before each turn, in which threads of the last function stop spinning.
    """
    one_thread = len(os.sched_getaffinity(0)) == 1
    clock = time.process_time if one_thread and alone else time.perf_counter

    def turn(run, repeats=1):
        start = clock()
        for _ in range(repeats):
            run()
        return 1e3 * (clock() - start) / repeats

    repeats = dict.fromkeys(runs, 1)
    for name, run in runs.items():
        run()
        if least:
            repeats[name] = max(1, int(least / (turn(run) + 1e-6)))
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(rest)
            times[name].append(turn(run, repeats[name]))
    return times


def ratio(times: list[float], baseline: list[float]) -> float:
    """Returns the median of baseline / times over rounds; above 1 is faster than the baseline."""
    return statistics.median(b / a for a, b in zip(times, baseline, strict=True))


def describe_ratios(times: list[float], baseline: list[float]) -> str:
    """Returns baseline / times over the rounds as text: median, minimum and maximum."""
    ratios = [b / a for a, b in zip(times, baseline, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def copy_bandwidth(size: int, rounds: int = 9) -> float:
    """Measures the bytes per second, read plus written, of copying `size` bytes on JAX's device."""
    import jax
    import jax.numpy as jnp

    source = jax.random.bits(jax.random.key(0), (max(1, size // 4),), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # a plain copy may be elided
    times = alternate({"copy": lambda: jax.block_until_ready(copy(source))}, rounds)["copy"]
    return 2 * source.nbytes / (statistics.median(times) / 1e3)


# --- Costs on any target ---


@dataclasses.dataclass
class Cost:
    """Cost of a program.

    Attributes:
      value: thousand cycles or median milliseconds; None if not supported there.
      megabytes: temporaries of the compiled program.
      note: details, or the reason why it is not supported.
      times: milliseconds of all rounds.
      operations: the costliest operations of a TPU program: (name, thousand cycles, source).
    """

    value: float | None = None
    megabytes: float | None = None
    note: str = ""
    times: list[float] = dataclasses.field(default_factory=list)
    operations: list[tuple[str, float, str]] = dataclasses.field(default_factory=list)


def measure(
    programs: Mapping[Any, tuple[Callable, tuple]], target: str, rounds: int = 9, **others: Callable
) -> dict[Any, Cost]:
    """Returns the cost of each program.

    Args:
      programs: name -> (function, trees of jax.ShapeDtypeStruct). On a device the shapes are filled
        by `fill`.
      others: further functions without arguments, timed in the same rounds.
    """
    if target.startswith("tpu:"):
        return {name: _price(function, shapes, target) for name, (function, shapes) in
                programs.items()}  # fmt: skip
    import jax

    costs, runs = {}, dict(others)
    for name, (function, shapes) in programs.items():
        arguments = fill(shapes)
        try:
            compiled = jax.jit(function).lower(*arguments).compile()
        except (ValueError, NotImplementedError) as error:
            costs[name] = Cost(note=_first_line(error))
            continue
        costs[name] = Cost(megabytes=compiled.memory_analysis().temp_size_in_bytes / 1e6)
        runs[name] = lambda run=compiled, given=arguments: jax.block_until_ready(run(*given))
    for name, times in alternate(runs, rounds).items():
        cost = costs.setdefault(name, Cost())
        cost.times, cost.value = times, statistics.median(times)
    return costs


def _price(function, shapes, target: str) -> Cost:
    try:
        found = tpu_pricing.price(function, *shapes, target=target)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return Cost(note=_first_line(error))
    note = f"{found.bytes_accessed / 1e6:.0f} MB accessed"
    if found.kernels:
        profile = sum(k.times * k.profile_cycles for k in found.kernels) / 1e3
        traffic = sum(k.times * k.bandwidth_cycles for k in found.kernels) / 1e3
        note += (
            f"; kernels {found.kernel_cycles / 1e3:.1f}, of them {profile:.1f} by profile and "
            f"{traffic:.1f} by bandwidth; XLA {found.xla_cycles / 1e3:.1f}"
        )
    if found.unpriced:
        note += f"; without estimate: {', '.join(found.unpriced)}"
    operations = [(name, cycles / 1e3, source) for name, cycles, source in found.operations]
    operations += [(k.name, k.times * k.cycles / 1e3, "kernel") for k in found.kernels]
    operations.sort(key=lambda row: -row[1])
    return Cost(found.cycles / 1e3, found.temporary_bytes / 1e6, note, [], operations)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def fill(shapes):
    """Draws normal values for a tree of shapes, matrices with variance 1 / inputs.

    Integers are the ids of four documents in each row.
    """
    import jax
    import jax.numpy as jnp

    def draw(number, struct):
        if jnp.issubdtype(struct.dtype, jnp.integer):
            length = struct.shape[-1]
            ids = jnp.broadcast_to(1 + jnp.arange(length) * 4 // length, struct.shape)
            return ids.astype(struct.dtype)
        scale = struct.shape[0] ** -0.5 if len(struct.shape) == 2 else 1
        return (scale * jax.random.normal(jax.random.key(number), struct.shape)).astype(
            struct.dtype
        )

    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [draw(*each) for each in enumerate(leaves)])


# --- Tables ---


class Table:
    """Prints a Markdown table, row by row."""

    def __init__(self, *columns: str):
        print(f"| {' | '.join(columns)} |\n|---{'|---:' * (len(columns) - 1)}|", flush=True)

    def add(self, *cells: Any) -> None:
        """Prints a row. Numbers get four digits; None is an empty cell."""
        print(f"| {' | '.join(map(_show, cells))} |", flush=True)


def _show(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1_000 else f"{cell:.4g}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)
