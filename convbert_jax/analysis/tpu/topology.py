"""TPU slices that are not here, as devices to compile for."""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from convbert_jax.analysis.tpu.chips import CHIPS, Chip, count_chips, list_slices
from convbert_jax.config import ConfigError

_EXAMPLES = "v4:4x4x4, v5e:4x4, v5e-16, v5p:4x4x4, v6e:16x16, tpu7x:4x4x4 or 2xv5e:16x16"


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
    """The devices of slices, by a name as `expand_name` takes it; needs libtpu and no TPU.

    Raises:
      ConfigError: no such slice, or no compiler for it here.
    """
    name = expand_name(name)
    slices, of_one = read_shape(name)
    kind, _, sides = of_one.partition(":")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which needs no TPU: pip install libtpu.",
            field="--topology",
            value=name,
        )
    try:
        devices = make_devices(of_one, slices)
    except Exception as error:  # of several kinds, in the compiler's own words
        raise ConfigError(
            f"--topology={name} has the name of a TPU slice, but no slice of {kind} is "
            f"{sides}; name one as {_EXAMPLES}.",
            field="--topology",
            value=name,
        ) from error
    return Topology(name, CHIPS[kind], slices * count_chips(of_one), devices, slices)


def read_shape(name: str) -> tuple[int, str]:
    """(number of slices, name of one) of a name with its shape, like "2xv5e:4x4".

    Raises:
      ConfigError: it is not one; whether the slice exists is not checked.
    """
    count, of_one = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(.*)", name, re.DOTALL).groups()
    kind, _, sides = of_one.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sides):
        raise ConfigError(
            f"--topology={name} is not a TPU slice. Name one as {_EXAMPLES}.",
            field="--topology",
            value=name,
        )
    return int(count or 1), of_one


def expand_name(name: str) -> str:
    """The name with its shape: "v5e:4x4" of "v5e-16" or "v5litepod-16", "2xv4:2x2x1" of "2xv4-8",
    where v4, v5p and tpu7x count cores, as Google's names do; any other name is returned unchanged.

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
    """Devices that can be compiled for, of so many slices like "v5e:4x4".

    Raises:
      Exception: of several kinds; the compiler knows no such slice.
    """
    from jax.experimental import topologies

    chosen: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4:"):  # whose two cores are one device, as they are on the machine
        chosen["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **chosen).devices
