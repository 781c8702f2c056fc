"""A TPU slice that is not here, as devices to compile for."""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from convbert_jax.analysis.tpu.chips import CHIPS, Chip, count_chips
from convbert_jax.config import ConfigError

_EXAMPLES = "v4:4x4x4, v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:16x16 or tpu7x:4x4x4"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice.

    Attributes:
      name: as "v5e:4x4".
      chip: of each device.
      chips: that are paid for.
      devices: that a mesh is made of; of v4 and TPU7x two for each chip.
    """

    name: str
    chip: Chip
    chips: int
    devices: Sequence[Any]


def open_topology(name: str) -> Topology:
    """The devices of a slice, by its name; needs libtpu and no TPU.

    Raises:
      ConfigError: no such slice, or no compiler for it here.
    """
    kind, _, sides = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", sides):
        raise ConfigError(f"--topology={name} is no TPU slice; name one as {_EXAMPLES}.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which needs no TPU: pip install libtpu."
        )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # of several kinds, the compiler's own words in all
        first = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"--topology={name} is no slice that the TPU compiler knows ({first}); name one as "
            f"{_EXAMPLES}."
        ) from error
    return Topology(name, CHIPS[kind], count_chips(name), described.devices)
