"""Memory and time of a step by arithmetic, without compiling.

For GPUs, whose compiler takes gigabytes to install, and for this machine's CPU, whose speed is
measured.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax.analysis import flops, overview, planned
from convbert_jax.config import Config, ConfigError
from convbert_jax.machine import processor
from convbert_jax.machine.limits import free_memory
from convbert_jax.ops import products
from convbert_jax.training.memory import spell_bytes

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
# unrolled and scanned layers (benchmarks/RESULTS.md, section 9).
_PRODUCTS_REACH, _COPIES_REACH = 0.68, 0.88
MOVED, MOVED_IN_LOOPS = 9, 16
_AT_WORST = 2.5  # times the best case: waiting for the host, products too small for the GPU
# Shares of matrix-product speed that steps of `tiny` and `base` reach on CPUs
# (benchmarks/RESULTS.md).
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
        again = planned.REMAT.index(self.config.model.remat)
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
        } | planned.outlook(self, price)


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
    in_matrix_unit = dtype == jnp.bfloat16 and processor.multiplies_bfloat16()
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
    largest: planned.Largest | None = None,
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
    run = planned.outlook(plan, price)
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
            f"mesh                    {planned.spell_mesh(plan.axes)}",
            f"step                    {plan.rows:,} rows, {plan.tokens:,} tokens, {work}",
            "",
            f"{f'memory of a {unit}':<24}{plan.used / _GIB:.2f} of {capacity:.2f} GiB, {state}; "
            "temporary buffers are not included",
            *(f"  {name:<22}{size / _GIB:>8.2f}" for name, size in rows.items()),
            *(() if plan.fits else planned.WHAT_HELPS),
            "",
            *time_taken,
            *(_describe_largest(largest) if largest else ()),
            *(_compare([plan, *compared]) if compared else ()),
        ]
    )


def _describe_largest(largest: planned.Largest) -> list[str]:
    if largest.plan is None:
        return ["", "no batch fits", *planned.describe_search(largest, "counted")]
    return [
        "",
        f"largest batch found: --config.train.batch_size={largest.plan.rows}, "
        f"{largest.plan.used / _GIB:.2f} GiB",
        *planned.describe_search(largest, "counted"),
    ]


def _compare(plans: Sequence[ArithmeticPlan]) -> list[str]:
    names = list(map(planned.spell_choice, plans))
    title = "mesh, rematerialization, accumulation"
    width = max(map(len, (*names, title[2:])))
    lines = ["", f"{title:<{width + 2}}{'memory':>10}"]
    for name, each in zip(names, plans, strict=True):
        used, fits = spell_bytes(each.used), "" if each.fits else "    does not fit"
        lines.append(f"  {name:<{width}}{used:>10}{fits}")
    best = planned.recommend(plans)
    if best is None:
        return [*lines, "no plan fits"]
    return [
        *lines,
        f"least rematerialization and sharding that fits: {planned.flags_of(best)}",
    ]


def _spell(seconds: float) -> str:
    """Formats seconds as milliseconds with three significant digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):,g}"
