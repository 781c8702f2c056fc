"""Compile-only devices of TPU slices."""

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
