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
      devices: that a mesh is made of; of v4 and TPU7x two for each chip.
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
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", sides):
        raise ConfigError(f"--topology={name} is no TPU slice; name one as {_EXAMPLES}.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which needs no TPU: pip install libtpu."
        )
    from jax.experimental import topologies

    try:
        several = {"num_slices": int(count)} if count else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=of_one, **several)
    except Exception as error:  # of several kinds, the compiler's own words in all
        first = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"--topology={name} is no slice that the TPU compiler knows ({first}); name one as "
            f"{_EXAMPLES}."
        ) from error
    slices = int(count or 1)
    return Topology(name, CHIPS[kind], slices * count_chips(of_one), described.devices, slices)
