"""Accelerators known to the operating system; found without jax, which may wait forever for one."""

import dataclasses
import pathlib
import re

_CHIPS = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")  # v2 to v4; v5 and newer
_GOOGLE = "0x1ae0"  # PCI vendor id; the device ids of its TPUs:
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_DRIVER = "proc/driver/nvidia/version"


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """Device files of TPU chips, and the version of the NVIDIA driver ("" without one)."""

    chips: tuple[pathlib.Path, ...]
    driver: str


def find_accelerators(root: pathlib.Path = pathlib.Path("/")) -> Accelerators:
    accel, vfio = (tuple(sorted(root.glob(pattern))) for pattern in _CHIPS)
    chips = accel or (vfio if _has_tpu(root) else ())  # vfio also exposes other devices
    try:
        said = re.search(r"\b\d{3,}(\.\d+)+\b", (root / _DRIVER).read_text())
    except OSError:
        said = None
    return Accelerators(chips, said.group() if said else "")


def _has_tpu(root: pathlib.Path) -> bool:
    for folder in root.glob("sys/bus/pci/devices/*"):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and device in _TPUS:
            return True
    return False
