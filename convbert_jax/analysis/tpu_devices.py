"""TPU chips (rates, memory, links) and compile-only devices of TPU slices.

A device of TPU7x is one of the two cores of a chip. Other devices are whole chips.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any

from convbert_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU device; cycles are those of its clock.

    Rates are from Google Cloud's TPU documentation, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e"
    and "TPU7x". Those of a TPU7x chip are halved, because it is two devices.

    Attributes:
      topology: smallest topology that can be compiled for.
      hbm_bytes: largest program memory that the compiler accepts.
      hbm_bytes_per_second: memory bandwidth.
      flops_per_second: peak bfloat16 FLOP/s.
      link_bytes_per_second: bandwidth of all ports, both directions.
      ports: number of links to other chips.
      flops_per_cycle: matrix units x side^2 x 2 (v5e: a core with 4 of 128 x 128; v4 and v5p: two
        such cores; v6e and TPU7x: a core with 4 of 256 x 256, inferred from the compiler's
        estimates for large products).
      slice_bytes_per_second: data-center bandwidth to other slices: that documented for a pod,
        divided by its 256 chips; None if not documented.
      copied_bytes_per_cycle: bytes per cycle in the compiler's estimate for an elementwise
        operation on a large array; the hardware is two to three times as fast.
    """

    topology: str
    hbm_bytes: float
    hbm_bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    ports: int
    flops_per_cycle: int
    copied_bytes_per_cycle: float
    slice_bytes_per_second: float | None = None

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.flops_per_second / self.flops_per_cycle

    @property
    def memory_pessimism(self) -> float:
        """Factor by which the compiler overestimates the time of a copy."""
        return self.hbm_bytes_per_second / self.clock / self.copied_bytes_per_cycle

    def bandwidth_cycles(self, size: float) -> float:
        """Returns the cycles to move `size` bytes between HBM and core at full bandwidth."""
        return size / self.hbm_bytes_per_second * self.clock


_GIB = 2**30
_SIDE_128, _SIDE_256 = 4 * 128**2 * 2, 4 * 256**2 * 2
CHIPS = {
    "v4": Chip("v4:2x2x1", 30.75 * _GIB, 1228e9, 275e12, 600e9, 6, 2 * _SIDE_128, 452),
    "v5e": Chip("v5e:2x2", 15.75 * _GIB, 819e9, 197e12, 400e9, 4, _SIDE_128, 222, 3.125e9),
    "v5p": Chip("v5p:2x2x1", 95.73 * _GIB, 2765e9, 459e12, 1200e9, 6, 2 * _SIDE_128, 573),
    "v6e": Chip(
        "v6e:1x1", 31.24 * _GIB, 1640e9, 918e12, 800e9, 4, _SIDE_256, 378, 25.6e12 / 8 / 256
    ),
    "tpu7x": Chip("tpu7x:2x2x1", 94.74 * _GIB, 3690e9, 1153.5e12, 600e9, 6, _SIDE_256, 632),
}


def chip(target: str) -> Chip:
    """Returns the chip of a target like "tpu:v5e".

    Raises:
      ValueError: the target is unknown.
    """
    kind, _, name = target.partition(":")
    if kind != "tpu" or name not in CHIPS:
        choices = ", ".join(f"tpu:{name}" for name in CHIPS)
        raise ValueError(f"Unknown target {target!r}; choose one of {choices}.")
    return CHIPS[name]


def count_chips(topology: str) -> int:
    """Counts the chips of a slice like "v5e:4x4"."""
    return math.prod(int(side) for side in topology.partition(":")[2].split("x"))


# Cores per chip of kinds whose slice names count cores; others, as "v5litepod-16", count chips.
_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_BOXES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_SIDES = range(4, 25, 4)  # sides of larger boxes


def list_slices(kind: str) -> dict[str, str]:
    """Lists slices of a kind by Google's names in ascending order: {"v4-8": "v4:2x2x1", …}.

    If several shapes have the same number of chips, the name stands for the most cubic one.
    """
    shapes = list(_FLAT)
    if CHIPS[kind].topology.partition(":")[2].count("x") == 2:
        boxes = [(a, b, c) for a in _SIDES for b in _SIDES for c in _SIDES if a <= b <= c]
        shapes = [*_SMALL_BOXES, *("x".join(map(str, box)) for box in sorted(boxes, key=sum))]
    found: dict[int, str] = {}
    for shape in shapes:
        found.setdefault(count_chips(f"{kind}:{shape}"), f"{kind}:{shape}")
    return {f"{kind}-{_CORES.get(kind, 1) * chips}": found[chips] for chips in sorted(found)}


_EXAMPLES = "v4:4x4x4, v5e:4x4, v5e-16, v5p:4x4x4, v6e:16x16, tpu7x:4x4x4 or 2xv5e:16x16"


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several TPU slices of one kind.

    Attributes:
      name: for example "v5e:4x4", or "2xv5e:4x4" for two slices.
      chip: kind of the devices.
      chips: number of billed chips in all slices.
      devices: devices for a mesh; two per chip for TPU7x.
      slices: number of slices.
    """

    name: str
    chip: Chip
    chips: int
    devices: Sequence[Any]
    slices: int = 1


def open_topology(name: str) -> Topology:
    """Opens a topology by a name as in `expand_name`; needs libtpu, but no TPU.

    Raises:
      ConfigError: the slice does not exist, or libtpu is not installed.
    """
    name = expand_name(name)
    slices, of_one = read_shape(name)
    kind, _, sides = of_one.partition(":")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler (but no TPU). Run pip install libtpu.",
            field="--topology",
            value=name,
        )
    try:
        devices = make_devices(of_one, slices)
    except Exception as error:  # the compiler raises several classes
        raise ConfigError(
            f"--topology={name}: TPU {kind} has no slice of shape {sides}. Use a name such as "
            f"{_EXAMPLES}.",
            field="--topology",
            value=name,
        ) from error
    return Topology(name, CHIPS[kind], slices * count_chips(of_one), devices, slices)


def read_shape(name: str) -> tuple[int, str]:
    """Splits a name like "2xv5e:4x4" into number of slices and name of one slice.

    Does not check that the slice exists.

    Raises:
      ConfigError: the name has another format.
    """
    count, of_one = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(.*)", name, re.DOTALL).groups()
    kind, _, sides = of_one.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sides):
        raise ConfigError(
            f"--topology={name} is not a TPU slice. Use a name such as {_EXAMPLES}.",
            field="--topology",
            value=name,
        )
    return int(count or 1), of_one


def expand_name(name: str) -> str:
    """Expands Google's slice names: "v5e-16" and "v5litepod-16" to "v5e:4x4".

    Names of v4, v5p and tpu7x count cores: "2xv4-8" becomes "2xv4:2x2x1". Other names are returned
    unchanged.

    Raises:
      ConfigError: no slice of that kind has this size.
    """
    found = re.fullmatch(r"((?:[1-9]\d{0,2}x)?)(\w+)-(\d+)", name, re.ASCII)
    if not found:
        return name
    slices, kind, size = found.groups()
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        return name
    known = list_slices(kind)
    if f"{kind}-{size}" not in known:
        raise ConfigError(
            f"--topology={name} does not exist. Choose one of: {', '.join(known)}; or name a "
            f"shape, such as {known[min(known, key=len)]}.",
            field="--topology",
            value=name,
        )
    return slices + known[f"{kind}-{size}"]


def make_devices(name: str, slices: int = 1) -> Sequence[Any]:
    """Makes compile-only devices of slices like "v5e:4x4".

    Raises:
      Exception: the slice does not exist; the compiler raises several classes.
    """
    from jax.experimental import topologies

    chosen: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4:"):  # both cores are one device, as on real machines
        chosen["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **chosen).devices
