"""What a step takes by arithmetic alone: of GPUs, whose compiler is gigabytes to install, and of
this machine's CPU, whose speed is measured.
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
# Memory in GB and its bandwidth in GB/s, from NVIDIA's data sheets; the name is a key of
# flops.PEAK_FLOPS.
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
# What an H100 reached of both in a large product and a large copy, and what a step moves: so many
# times the activations that it keeps, as XLA compiles `small` and `base` for one, with layers in a
# loop and without (benchmarks/RESULTS.md, section 9).
_PRODUCTS_REACH, _COPIES_REACH = 0.68, 0.88
MOVED, MOVED_IN_LOOPS = 9, 16
_AT_WORST = 2.5  # times that: programs that wait for the host, products that fill no GPU
# Shares of the speed of its matrix products that steps of `tiny` and `base` reach on a CPU
# (benchmarks/RESULTS.md).
_REACHED_BY_CPUS = (0.2, 0.65)
_REACHED_WITH_MATRIX_UNITS = (0.1, 0.55)  # where products are bfloat16 and the rest is as slow
_MOST_ROWS = 4_096  # of a product that is measured: enough for its speed, and little memory
_FREE = 0.92  # of the memory: the rest is the driver's and what the allocator cannot use


@dataclasses.dataclass(frozen=True)
class Devices:
    """So many of one kind.

    Attributes:
      name: "gpu:h100x8", or "cpu" for this machine.
      platform: "gpu" or "cpu".
      kind: as jax calls it.
      bytes: memory of one.
      peak: FLOP/s of one.
      reached: least and largest share of the peak that a step is expected to reach; of a GPU that
        of its products.
      bandwidth: of the memory of one, in bytes a second; None where `reached` has it all.
      basis: what these numbers rest on, for a person.
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
    """What a step takes of one device.

    Attributes:
      axes: of the mesh, name -> size.
      parameters, gradients, moments: bytes.
      kept: bytes of activations that the backward pass asks for, by tracing.
      moved: bytes that a step reads and writes of the memory of a GPU, roughly; None of a CPU.
      tokens, flops: of a step, of all devices.
      teacher: bytes of the parameters of config.distillation.teacher; 0 without one.
      teacher_flops: of its forward passes in a step, of all devices.
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
        """Bytes of a device that a step may take."""
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
        """Of a step, as is expected at best and at worst; nothing is sent between devices."""
        peak = self.devices.peak * self.devices.count
        work = self.flops + self.teacher_flops
        best, worst = (work / peak / share for share in reversed(self.devices.reached))
        if self.devices.bandwidth is None:
            return best, worst
        best += self.moved / (_COPIES_REACH * self.devices.bandwidth)
        return best, _AT_WORST * best

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Times differ by nothing that arithmetic sees: the best computes least again, and then
        divides least.
        """
        again = planned.REMAT.index(self.config.model.remat)
        divided = self.axes["tensor"] * self.axes["sequence"]
        return again, divided, self.axes["fsdp"], self.config.train.accumulation

    @property
    def paid(self) -> int:
        return self.devices.count

    @property
    def assumptions(self) -> str:
        return f"a step takes {self.takes}; from {self.devices.basis}"

    @property
    def takes(self) -> str:
        """What the seconds of a step are made of, the rest of a sentence."""
        devices = self.devices
        (low, high), peak = devices.reached, f"{devices.peak / 1e9:,.0f} GFLOP/s"
        if devices.bandwidth is None:
            return f"as it reaches {low:.0%} to {high:.0%} of {peak}"
        return (
            f"once to {_AT_WORST:g} times what its products do at {high:.0%} of {peak} and some "
            f"{self.moved / 1e9:,.3g} GB at {_COPIES_REACH:.0%} of "
            f"{devices.bandwidth / 1e9:,.0f} GB/s"
        )

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """All numbers, and that they are arithmetic.

        Args:
          price: of an hour of a device, in any currency.
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
    """Whether a plan for it is arithmetic."""
    return topology == "cpu" or topology.startswith("gpu:")


def read_gpus(topology: str) -> Devices:
    """Reads "gpu:h100x8".

    Raises:
      ConfigError: a kind that is not known, or no number.
    """
    found = re.fullmatch(r"gpu:(\w+?)(?:x(0*[1-9]\d*))?", topology, re.ASCII)
    if not found or found[1] not in _GPUS:
        raise ConfigError(
            f"--topology={topology} names no GPUs; take one of {', '.join(_GPUS)} and how many, as "
            "gpu:h100x8.",
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
        basis="NVIDIA's data sheets, what one H100 reached of them, and what XLA makes of a step",
        bandwidth=bandwidth * 1e9,
    )


def this_cpu(rows: int, inputs: int, outputs: int, dtype: jnp.dtype = jnp.float32) -> Devices:
    """The CPU of this machine, all of its cores one device as jax has it; multiplies for a second.

    Args:
      rows, inputs, outputs: of the matrices that are multiplied, those of a feed-forward layer;
        of rows at most 4,096.
      dtype: of the computation.
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
        basis=f"the memory that is free here, and {speed / 1e9:,.0f} GFLOP/s that this machine "
        f"reached just now in {jnp.dtype(dtype)} products of {rows:,} x {inputs:,} x {outputs:,}",
    )


def _measure_products(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> float:
    """FLOP/s of a model's products on the CPU, the best of those of a second."""
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
    """A text for a person.

    Args:
      price: of an hour of a device, in any currency.
      largest: if it was searched for.
      compared: other meshes and the like.
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
        work += f", and {plan.teacher_flops:.3g} of the teacher"
    run = planned.outlook(plan, price)
    cost = "{:,.3g} to {:,.3g}".format(*run["chip_hours"]) + f" {unit}-hours"
    if price is not None:
        cost += ", {:,.2f} to {:,.2f}".format(*run["price"]) + f" at {price:g} each"
    time_taken = [
        f"a step takes            {_spell(best)} to {_spell(worst)} ms, {plan.takes}",
        f"  tokens a second       {plan.tokens / worst:,.0f} to {plan.tokens / best:,.0f}",
        f"the run                 {steps:,} steps: "
        f"{overview.spell_range(best * steps, worst * steps)}, {cost}",
    ]
    if math.isnan(best):
        time_taken = ["a step takes            unknown, as the FLOPs of config.model.mixer are"]
    return "\n".join(
        [
            f"{plan.config.name} on {devices.name}, BY ARITHMETIC: nothing was compiled or run",
            f"from {devices.basis}",
            "",
            f"mesh                    {planned.spell_mesh(plan.axes)}",
            f"a step                  {plan.rows:,} rows, {plan.tokens:,} tokens, {work}",
            "",
            f"{f'memory of a {unit}':<24}{plan.used / _GIB:.2f} of {capacity:.2f} GiB, {state}; "
            "what operations need for themselves comes on top",
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
        return ["", "no batch was found that fits", *planned.describe_search(largest, "counted")]
    return [
        "",
        f"the largest batch found: --config.train.batch_size={largest.plan.rows}, "
        f"{largest.plan.used / _GIB:.2f} GiB",
        *planned.describe_search(largest, "counted"),
    ]


def _compare(plans: Sequence[ArithmeticPlan]) -> list[str]:
    names = list(map(planned.spell_choice, plans))
    title = "mesh, what is computed again, microbatches"
    width = max(map(len, (*names, title[2:])))
    lines = ["", f"{title:<{width + 2}}{'memory':>10}"]
    for name, each in zip(names, plans, strict=True):
        used, fits = spell_bytes(each.used), "" if each.fits else "    does not fit"
        lines.append(f"  {name:<{width}}{used:>10}{fits}")
    best = planned.recommend(plans)
    if best is None:
        return [*lines, "none of them fits"]
    return [
        *lines,
        f"computes least again and divides least, of those that fit: {planned.flags_of(best)}",
    ]


def _spell(seconds: float) -> str:
    """Milliseconds, of which three digits count."""
    return f"{float(f'{seconds * 1e3:.3g}'):,g}"
