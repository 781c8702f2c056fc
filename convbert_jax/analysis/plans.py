"""Plans of a step: memory and time by arithmetic, and parts shared with compiled plans.

Arithmetic serves GPUs, whose compiler takes gigabytes to install, and this machine's CPU, whose
speed is measured. `tpu_plan.py` reads compiled steps.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax import machine
from convbert_jax.analysis import flops, overview
from convbert_jax.config import Config, ConfigError
from convbert_jax.machine import free_memory
from convbert_jax.ops import products
from convbert_jax.training.memory import spell_bytes

REMAT = ("none", "dots", "full")  # by increasing recomputation
WHAT_HELPS = (
    "To reduce memory, cheapest first: lower --config.train.batch_size or raise --config.train."
    "accumulation; raise --config.mesh.fsdp if parameters dominate;",
    "set --config.model.remat=dots, then full; use more devices.",
)


class Planned(Protocol):
    """A plan of one config.

    Attributes:
      axes: mesh axis -> size.
      rows: rows of a step over all devices.
      tokens: tokens of a step over all devices.
      fits: whether the step fits into the memory of a device.
      used: bytes per device that the step needs.
      capacity: bytes per device that are available.
      fixed: bytes per device that do not depend on the number of rows.
      growing: bytes per device that grow with it. If the step fits, fixed + growing = used;
        otherwise it is an upper bound.
      seconds: best and worst case of a step that fits.
      rank: sort key of plans that fit; the smallest is the best.
      paid: number of chips or GPUs that are billed.
      assumptions: basis of the seconds, as text.
    """

    config: Config
    axes: Mapping[str, int]
    rows: int
    tokens: int

    @property
    def fits(self) -> bool: ...
    @property
    def used(self) -> float: ...
    @property
    def capacity(self) -> float: ...
    @property
    def fixed(self) -> float: ...
    @property
    def growing(self) -> float: ...
    @property
    def seconds(self) -> tuple[float, float]: ...
    @property
    def rank(self) -> Any: ...
    @property
    def paid(self) -> int: ...
    @property
    def assumptions(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a batch search.

    Attributes:
      plan: plan of the batch.
      predicted: bytes per device extrapolated from earlier trials; None for the first one.
    """

    plan: Planned
    predicted: float | None


@dataclasses.dataclass(frozen=True)
class Largest:
    """Result of a search for the largest batch.

    Attributes:
      plan: largest planned batch that fits, or None.
      trials: all planned batches, in order.
      next_rows: smallest planned batch that does not fit; if all fit, the smallest predicted not to
        fit. The prediction may be too high, because compilers save memory when it is short.
      next_bytes: bytes per device of that batch.
      next_planned: whether that batch was planned, not predicted.
      row_cost: seconds per row of `plan`, divided by the lowest seconds per row of all batches.
      gave_up: whether the search ended because rows became too expensive.
    """

    plan: Planned | None
    trials: tuple[Trial, ...]
    next_rows: int
    next_bytes: float
    next_planned: bool
    row_cost: float
    gave_up: bool

    @property
    def numbers(self) -> dict[str, Any]:
        """The result for JSON; memory in bytes per device."""
        return {
            "trials": [
                {
                    "rows": trial.plan.rows,
                    "predicted": trial.predicted,
                    "used": trial.plan.used,
                    "fits": trial.plan.fits,
                }
                for trial in self.trials
            ],
            "does_not_fit": {
                "rows": self.next_rows,
                "used": self.next_bytes,
                "by": "plan" if self.next_planned else "prediction",
            },
            "seconds_of_a_row_to_the_cheapest": self.row_cost,
            "ended_as_rows_were_dear": self.gave_up,
        }


def price_of_row(plan: Planned) -> float:
    """Returns the sum of best and worst seconds per row of a plan that fits."""
    return sum(plan.seconds) / plan.rows


def describe_search(largest: Largest, did: str) -> list[str]:
    """Formats the trials and the prediction of a batch search.

    Args:
      did: how plans were made, for example "compiled".
    """
    lines = []
    for trial in largest.trials:
        size = spell_bytes(trial.plan.used)
        line = f"  {did}: {trial.plan.rows:,} rows, {size}"
        if trial.predicted is not None:
            line += f"; predicted from earlier trials: {spell_bytes(trial.predicted)}"
        lines.append(line if trial.plan.fits else f"{line}; does not fit")
    if largest.next_planned:
        lines.append(f"  next: {largest.next_rows:,} rows do not fit, {did}")
    else:
        size = spell_bytes(largest.next_bytes)
        lines.append(f"  next: {largest.next_rows:,} rows would need {size}, PREDICTED, not {did}")
    if largest.plan and largest.row_cost >= 1.005:  # two decimals are shown
        cheapest = f"a row costs {largest.row_cost:.2f} times a row of the cheapest batch above"
        lines.append(
            f"  search ended: {cheapest}; use config.train.accumulation instead"
            if largest.gave_up
            else f"  {cheapest}"
        )
    return lines


def outlook(plan: Planned, price: float | None) -> dict[str, Any]:
    """Returns time and price of the run for JSON; pairs are best and worst case.

    Args:
      price: price of a chip-hour, in any currency.
    """
    best, worst = plan.seconds
    hours = [seconds * plan.config.train.steps / 3600 for seconds in (best, worst)]
    paid = [each * plan.paid for each in hours]
    return {
        "seconds_of_a_step": [best, worst],
        "tokens_per_second": [plan.tokens / best, plan.tokens / worst],
        "steps": plan.config.train.steps,
        "hours": hours,
        "chip_hours": paid,
        "price_of_a_chip_hour": price,
        "price": None if price is None else [each * price for each in paid],
        "assumptions": plan.assumptions,
    }


def recommend(plans: Sequence[Planned]) -> Planned | None:
    """Returns the best plan that fits, or None; the first of equal ones."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.rank, default=None)


def flags_of(plan: Planned) -> str:
    """Returns the flags of mesh, rematerialization and accumulation."""
    flags = [f"--config.mesh.{name}={size}" for name, size in plan.axes.items()]
    flags.append(f"--config.model.remat={plan.config.model.remat}")
    if plan.config.train.accumulation > 1:
        flags.append(f"--config.train.accumulation={plan.config.train.accumulation}")
    return " ".join(flags)


def spell_choice(plan: Planned) -> str:
    """Formats a plan as "data=4 fsdp=1 tensor=1 sequence=1 remat=none accumulation=2"."""
    choice = f"{spell_mesh(plan.axes)} remat={plan.config.model.remat}"
    accumulation = plan.config.train.accumulation
    return f"{choice} accumulation={accumulation}" if accumulation > 1 else choice


def spell_mesh(axes: Mapping[str, int]) -> str:
    """Formats a mesh as "data=4 fsdp=1 tensor=1 sequence=1"."""
    return " ".join(f"{name}={size}" for name, size in axes.items())


def numbers_of_all(
    first: Planned,
    largest: Largest | None,
    compared: Sequence[Planned],
    to_json: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """Returns all results for JSON: the fields of `first`, extended by the other plans.

    Args:
      first: plan of the config itself.
      largest: result of the batch search, if any.
      compared: plans of other meshes and settings.
      to_json: converts a plan to JSON.
    """
    best = recommend([first, *compared]) if compared else None
    return to_json(first) | {
        "largest_batch": to_json(largest.plan) if largest and largest.plan else None,
        "search": largest and largest.numbers,
        "compared": [to_json(each) for each in compared],
        "recommended": best
        and {
            "mesh": dict(best.axes),
            "remat": best.config.model.remat,
            "accumulation": best.config.train.accumulation,
            "flags": flags_of(best),
        },
    }


_GIB = 2**30
# (key of flops.PEAK_FLOPS, memory in GB, bandwidth in GB/s), from NVIDIA's data sheets.
_GPUS = {
    "b200": ("B200", 180, 7700),
    "h200": ("H200", 141, 4800),
    "h100": ("H100", 80, 3350),
    "a100": ("A100", 40, 1555),
    "l40s": ("L40S", 48, 864),
    "l4": ("L4", 24, 300),
    "a10g": ("A10G", 24, 600),
    "t4": ("T4", 16, 320),
    "v100": ("V100", 16, 900),
}
# Shares of peak FLOP/s and bandwidth that an H100 reached in a large product and a large copy; and
# the memory traffic of a step as a multiple of the stored activations, for `small` and `base`, with
# unrolled and scanned layers (benchmarks/notes/gpu.md).
_PRODUCTS_REACH, _COPIES_REACH = 0.68, 0.88
MOVED, MOVED_IN_LOOPS = 9, 16
_AT_WORST = 2.5  # times the best case: waiting for the host, products too small for the GPU
# Shares of matrix-product speed that steps of `tiny` and `base` reach on CPUs
# (benchmarks/notes/cpu.md).
_REACHED_BY_CPUS = (0.2, 0.65)
_REACHED_WITH_MATRIX_UNITS = (0.1, 0.55)  # only products are faster
_MOST_ROWS = 4_096  # of the measured product; enough to reach full speed
_FREE = 0.92  # share of memory; driver and fragmentation take the rest


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices of one kind.

    Attributes:
      name: "gpu:h100x8", or "cpu" for this machine.
      platform: "gpu" or "cpu".
      kind: key of `flops.PEAK_FLOPS`, or "cpu".
      count: number of devices.
      bytes: memory of one device.
      peak: FLOP/s of one device.
      reached: lowest and highest share of the peak that a step is expected to reach; for GPUs, the
        share in matrix products.
      bandwidth: memory bandwidth of one device in bytes/s; None if `reached` includes it.
      basis: source of these numbers, as text.
    """

    name: str
    platform: str
    kind: str
    count: int
    bytes: float
    peak: float
    reached: tuple[float, float]
    basis: str
    bandwidth: float | None = None


@dataclasses.dataclass(frozen=True)
class ArithmeticPlan:
    """Memory and time of a step; memory is per device.

    Attributes:
      axes: mesh axis -> size.
      rows: rows of a step over all devices.
      parameters: bytes.
      gradients: bytes.
      moments: bytes of the optimizer state.
      kept: bytes of activations stored for the backward pass, by tracing.
      moved: estimated bytes that a step reads from and writes to GPU memory; None for a CPU.
      tokens: tokens of a step over all devices.
      flops: FLOPs of a step over all devices.
      teacher: bytes of the parameters of config.distillation.teacher; 0 without a teacher.
      teacher_flops: forward FLOPs of the teacher in a step over all devices.
    """

    config: Config
    devices: Devices
    axes: Mapping[str, int]
    rows: int
    parameters: int
    gradients: int
    moments: int
    kept: int
    moved: int | None
    tokens: int
    flops: float
    teacher: int = 0
    teacher_flops: float = 0.0

    @property
    def used(self) -> int:
        return self.parameters + self.gradients + self.moments + self.kept + self.teacher

    @property
    def capacity(self) -> float:
        """Bytes per device that a step may use."""
        return _FREE * self.devices.bytes

    @property
    def fixed(self) -> int:
        return self.used - self.kept

    @property
    def growing(self) -> int:
        return self.kept

    @property
    def fits(self) -> bool:
        return self.used <= self.capacity

    @property
    def seconds(self) -> tuple[float, float]:
        """Best and worst expected seconds of a step, without communication between devices."""
        peak = self.devices.peak * self.devices.count
        work = self.flops + self.teacher_flops
        best, worst = (work / peak / share for share in reversed(self.devices.reached))
        if self.devices.bandwidth is None:
            return best, worst
        best += self.moved / (_COPIES_REACH * self.devices.bandwidth)
        return best, _AT_WORST * best

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Prefers less rematerialization, then less sharding; arithmetic cannot compare times."""
        again = REMAT.index(self.config.model.remat)
        divided = self.axes["tensor"] * self.axes["sequence"]
        return again, divided, self.axes["fsdp"], self.config.train.accumulation

    @property
    def paid(self) -> int:
        return self.devices.count

    @property
    def assumptions(self) -> str:
        return f"step time: {self.takes}; based on {self.devices.basis}"

    @property
    def takes(self) -> str:
        """Explanation of the seconds of a step."""
        devices = self.devices
        (low, high), peak = devices.reached, f"{devices.peak / 1e9:,.0f} GFLOP/s"
        if devices.bandwidth is None:
            return f"at {low:.0%} to {high:.0%} of {peak}"
        return (
            f"1 to {_AT_WORST:g} times the time of products at {high:.0%} of {peak} plus about "
            f"{self.moved / 1e9:,.3g} GB of memory traffic at {_COPIES_REACH:.0%} of "
            f"{devices.bandwidth / 1e9:,.0f} GB/s"
        )

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """Returns all numbers for JSON.

        Args:
          price: price of a device-hour, in any currency.
        """
        names = ("parameters", "gradients", "moments", "kept", "teacher")
        return {
            "topology": self.devices.name,
            "by": "arithmetic",
            "basis": self.devices.basis,
            "peak_flops": self.devices.peak,
            "mesh": dict(self.axes),
            "rows": self.rows,
            "tokens": self.tokens,
            "flops": self.flops,
            "teacher_flops": self.teacher_flops,
            "moved": self.moved,
            "remat": self.config.model.remat,
            "accumulation": self.config.train.accumulation,
            "fits": self.fits,
            "memory": {name: getattr(self, name) for name in names}
            | {"used": self.used, "capacity": self.devices.bytes},
        } | outlook(self, price)


def is_counted(topology: str) -> bool:
    """Returns whether plans for a topology are made by arithmetic."""
    return topology == "cpu" or topology.startswith("gpu:")


def read_gpus(topology: str) -> Devices:
    """Parses a topology like "gpu:h100x8"; the default count is 1.

    Raises:
      ConfigError: the kind of GPU is unknown, or the format is wrong.
    """
    found = re.fullmatch(r"gpu:(\w+?)(?:x(0*[1-9]\d*))?", topology, re.ASCII)
    if not found or found[1] not in _GPUS:
        raise ConfigError(
            f"--topology={topology} does not name known GPUs. Use gpu:KINDxCOUNT, such as "
            f"gpu:h100x8, with one of: {', '.join(_GPUS)}.",
            field="--topology",
            value=topology,
        )
    kind, size, bandwidth = _GPUS[found[1]]
    return Devices(
        topology,
        platform="gpu",
        kind=kind,
        count=int(found[2] or 1),
        bytes=size * 1e9,
        peak=flops.peak_flops(kind),
        reached=(_PRODUCTS_REACH, _PRODUCTS_REACH),
        basis="NVIDIA's data sheets, shares that an H100 reached, and steps compiled by XLA",
        bandwidth=bandwidth * 1e9,
    )


def this_cpu(rows: int, inputs: int, outputs: int, dtype: jnp.dtype = jnp.float32) -> Devices:
    """Measures this machine's CPU for a second; all cores are one device, as in JAX.

    Args:
      rows: rows of the measured product; more than 4,096 count as 4,096.
      inputs: input size of the product, usually of a feed-forward layer.
      outputs: output size of the product.
      dtype: compute dtype.
    """
    rows = min(rows, _MOST_ROWS)
    speed = _measure_products(rows, inputs, outputs, dtype)
    in_matrix_unit = dtype == jnp.bfloat16 and machine.multiplies_bfloat16()
    return Devices(
        "cpu",
        platform="cpu",
        kind="cpu",
        count=1,
        bytes=float(free_memory()),
        peak=speed,
        reached=_REACHED_WITH_MATRIX_UNITS if in_matrix_unit else _REACHED_BY_CPUS,
        basis=f"free memory of this machine, and {speed / 1e9:,.0f} GFLOP/s measured in "
        f"{jnp.dtype(dtype)} products of {rows:,} x {inputs:,} x {outputs:,}",
    )


def _measure_products(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> float:
    """Measures the FLOP/s of a matrix product on the CPU: the best within one second."""
    on_cpu = jax.devices("cpu")[0]
    x, y = (jax.device_put(np.ones(shape, dtype), on_cpu)
            for shape in ((rows, inputs), (inputs, outputs)))  # fmt: skip
    multiply = jax.jit(functools.partial(products.einsum, "ri,io->ro", dtype=dtype))
    jax.block_until_ready(multiply(x, y))
    best, end = math.inf, time.perf_counter() + 1.0
    while time.perf_counter() < end:
        begin = time.perf_counter()
        jax.block_until_ready(multiply(x, y))
        best = min(best, time.perf_counter() - begin)
    return 2 * rows * inputs * outputs / best


def describe(
    plan: ArithmeticPlan,
    price: float | None = None,
    *,
    largest: Largest | None = None,
    compared: Sequence[ArithmeticPlan] = (),
) -> str:
    """Formats a plan as text.

    Args:
      price: price of a device-hour, in any currency.
      largest: result of the batch search, if any.
      compared: plans of other meshes and settings.
    """
    devices = plan.devices
    unit = devices.platform.upper()
    capacity = devices.bytes / _GIB
    state = "fits" if plan.fits else "DOES NOT FIT"
    best, worst = plan.seconds
    steps = plan.config.train.steps
    rows = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        f"moments of {plan.config.optimizer.method}": plan.moments,
        "activations": plan.kept,
    }
    work = f"{overview.spell_number(plan.flops)} FLOPs"
    if plan.teacher:
        rows["teacher's parameters"] = plan.teacher
        work += f", plus {plan.teacher_flops:.3g} of the teacher"
    run = outlook(plan, price)
    cost = "{:,.3g} to {:,.3g}".format(*run["chip_hours"]) + f" {unit}-hours"
    if price is not None:
        cost += ", {:,.2f} to {:,.2f}".format(*run["price"]) + f" at {price:g} each"
    time_taken = [
        f"step time               {_spell(best)} to {_spell(worst)} ms, {plan.takes}",
        f"  tokens per second     {plan.tokens / worst:,.0f} to {plan.tokens / best:,.0f}",
        f"run                     {steps:,} steps: "
        f"{overview.spell_range(best * steps, worst * steps)}, {cost}",
    ]
    if math.isnan(best):
        time_taken = ["step time               unknown: config.model.mixer defines no FLOPs"]
    return "\n".join(
        [
            f"{plan.config.name} on {devices.name}, BY ARITHMETIC: nothing was compiled or run",
            f"based on {devices.basis}",
            "",
            f"mesh                    {spell_mesh(plan.axes)}",
            f"step                    {plan.rows:,} rows, {plan.tokens:,} tokens, {work}",
            "",
            f"{f'memory of a {unit}':<24}{plan.used / _GIB:.2f} of {capacity:.2f} GiB, {state}; "
            "temporary buffers are not included",
            *(f"  {name:<22}{size / _GIB:>8.2f}" for name, size in rows.items()),
            *(() if plan.fits else WHAT_HELPS),
            "",
            *time_taken,
            *(_describe_largest(largest) if largest else ()),
            *(_compare([plan, *compared]) if compared else ()),
        ]
    )


def _describe_largest(largest: Largest) -> list[str]:
    if largest.plan is None:
        return ["", "no batch fits", *describe_search(largest, "counted")]
    return [
        "",
        f"largest batch found: --config.train.batch_size={largest.plan.rows}, "
        f"{largest.plan.used / _GIB:.2f} GiB",
        *describe_search(largest, "counted"),
    ]


def _compare(plans: Sequence[ArithmeticPlan]) -> list[str]:
    names = list(map(spell_choice, plans))
    title = "mesh, rematerialization, accumulation"
    width = max(map(len, (*names, title[2:])))
    lines = ["", f"{title:<{width + 2}}{'memory':>10}"]
    for name, each in zip(names, plans, strict=True):
        used, fits = spell_bytes(each.used), "" if each.fits else "    does not fit"
        lines.append(f"  {name:<{width}}{used:>10}{fits}")
    best = recommend(plans)
    if best is None:
        return [*lines, "no plan fits"]
    return [
        *lines,
        f"least rematerialization and sharding that fits: {flags_of(best)}",
    ]


def _spell(seconds: float) -> str:
    """Formats seconds as milliseconds with three significant digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):,g}"
