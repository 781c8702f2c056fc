"""What a step takes of GPUs, by arithmetic alone: for them there is no compiler without one."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from convbert_jax.analysis import flops, overview
from convbert_jax.config import Config, ConfigError

_GIB = 2**30
# Memory in GB, from NVIDIA's data sheets; the name is a key of flops.PEAK_FLOPS.
_GPUS = {
    "b200": ("B200", 180),
    "h200": ("H200", 141),
    "h100": ("H100", 80),
    "a100": ("A100", 40),
    "l40s": ("L40S", 48),
    "l4": ("L4", 24),
    "a10g": ("A10G", 24),
    "t4": ("T4", 16),
    "v100": ("V100", 16),
}
# Shares of the peak between which large runs of such models lie; not measured here.
_REACHED = (0.25, 0.5)
_FREE = 0.92  # of the memory: the rest is the driver's and what the allocator cannot use


@dataclasses.dataclass(frozen=True)
class Gpus:
    """So many of one kind, as "gpu:h100x8"."""

    name: str
    kind: str  # as `flops.peak_flops` knows it
    count: int
    bytes: float  # of one


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """What a step takes of one GPU.

    Attributes:
      axes: of the mesh, name -> size.
      parameters, gradients, moments: bytes.
      kept: bytes of activations that the backward pass asks for, by tracing.
      tokens, flops: of a step, of all GPUs.
    """

    config: Config
    gpus: Gpus
    axes: Mapping[str, int]
    rows: int
    parameters: int
    gradients: int
    moments: int
    kept: int
    tokens: int
    flops: float

    @property
    def used(self) -> int:
        return self.parameters + self.gradients + self.moments + self.kept

    @property
    def fits(self) -> bool:
        return self.used <= _FREE * self.gpus.bytes

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step, if it reached half or a quarter of the peak."""
        peak = flops.peak_flops(self.gpus.kind) * self.gpus.count
        best, worst = (self.flops / peak / share for share in reversed(_REACHED))
        return best, worst

    def to_json(self) -> dict[str, Any]:
        """All numbers, and that they are arithmetic."""
        names = ("parameters", "gradients", "moments", "kept")
        return {
            "topology": self.gpus.name,
            "by": "arithmetic",
            "mesh": dict(self.axes),
            "rows": self.rows,
            "tokens": self.tokens,
            "flops": self.flops,
            "fits": self.fits,
            "memory": {name: getattr(self, name) for name in names}
            | {"used": self.used, "capacity": self.gpus.bytes},
            "seconds_of_a_step": list(self.seconds),
        }


def is_gpu(topology: str) -> bool:
    return topology.startswith("gpu:")


def read_gpus(topology: str) -> Gpus:
    """Reads "gpu:h100x8".

    Raises:
      ConfigError: a kind that is not known, or no number.
    """
    found = re.fullmatch(r"gpu:(\w+?)(?:x(\d+))?", topology)
    if not found or found[1] not in _GPUS or found[2] == "0":
        raise ConfigError(
            f"--topology={topology} names no GPUs; take one of {', '.join(_GPUS)} and how many, as "
            "gpu:h100x8."
        )
    kind, size = _GPUS[found[1]]
    return Gpus(topology, kind, int(found[2] or 1), size * 1e9)


def describe(plan: GpuPlan, price: float | None = None) -> str:
    """A text for a person.

    Args:
      price: of an hour of a GPU, in any currency.
    """
    capacity = plan.gpus.bytes / _GIB
    state = "fits" if plan.fits else "DOES NOT FIT"
    best, worst = plan.seconds
    steps = plan.config.train.steps
    low, high = _REACHED
    rows = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        f"moments of {plan.config.optimizer.method}": plan.moments,
        "activations": plan.kept,
    }
    hours = [seconds * steps * plan.gpus.count / 3600 for seconds in (best, worst)]
    cost = f"{hours[0]:,.1f} to {hours[1]:,.1f} GPU-hours"
    if price is not None:
        cost += f", {hours[0] * price:,.2f} to {hours[1] * price:,.2f} at {price:g} each"
    mesh = " ".join(f"{name}={size}" for name, size in plan.axes.items())
    return "\n".join(
        [
            f"{plan.config.name} on {plan.gpus.name}, BY ARITHMETIC: there is no compiler for GPUs "
            "here, nothing was compiled or run",
            "",
            f"mesh                    {mesh}",
            f"a step                  {plan.rows:,} rows, {plan.tokens:,} tokens, "
            f"{plan.flops:.3g} FLOPs",
            "",
            f"memory of a GPU         {plan.used / _GIB:.2f} of {capacity:.2f} GiB, {state}; what "
            "operations need for themselves comes on top",
            *(f"  {name:<22}{size / _GIB:>8.2f}" for name, size in rows.items()),
            "",
            f"a step takes            {best * 1e3:,.3g} to {worst * 1e3:,.3g} ms, if it reaches "
            f"{low:.0%} to {high:.0%} of the peak, which nobody has measured",
            f"  tokens a second       {plan.tokens / worst:,.0f} to {plan.tokens / best:,.0f}",
            f"the run                 {steps:,} steps: {overview.spell_time(best * steps)} to "
            f"{overview.spell_time(worst * steps)}, {cost}",
        ]
    )
