"""TPU slices that are not here, as devices to compile for."""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from convbert_jax.analysis.tpu.chips import CHIPS, Chip, count_chips
from convbert_jax.config import ConfigError

_EXAMPLES = "v4:4x4x4, v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:16x16, tpu7x:4x4x4 or 2xv5e:16x16"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several of a kind.

    Attributes:
      name: as "v5e:4x4", or "2xv5e:4x4" of two slices.
      chip: of each device.
      chips: that are paid for, of all slices.
      devices: that a mesh is made of; of TPU7x two for each chip.
    """

    name: str
    chip: Chip
    chips: int
    devices: Sequence[Any]
    slices: int = 1


def open_topology(name: str) -> Topology:
    """The devices of slices, by their name; needs libtpu and no TPU.

    Raises:
      ConfigError: no such slice, or no compiler for it here.
    """
    count, of_one = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(.*)", name, re.DOTALL).groups()
    kind, _, sides = of_one.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sides):
        raise ConfigError(f"--topology={name} is no TPU slice; name one as {_EXAMPLES}.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which needs no TPU: pip install libtpu."
        )
    slices = int(count or 1)
    try:
        devices = make_devices(of_one, slices)
    except Exception as error:  # of several kinds, in the compiler's own words
        raise ConfigError(
            f"--topology={name} has the name of a TPU slice, but no slice of {kind} is "
            f"{sides}; name one as {_EXAMPLES}."
        ) from error
    return Topology(name, CHIPS[kind], slices * count_chips(of_one), devices, slices)


def make_devices(name: str, slices: int = 1) -> Sequence[Any]:
    """Devices that can be compiled for, of so many slices like "v5e:4x4".

    Raises:
      Exception: of several kinds; the compiler knows no such slice.
    """
    from jax.experimental import topologies

    chosen: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4:"):  # whose two cores are one device, as they are on the machine
        chosen["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **chosen).devices
