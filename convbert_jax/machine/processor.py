"""What the processor can do beyond what every x86-64 or ARM does."""

import functools
import pathlib

_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def multiplies_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Whether it has a matrix unit for bfloat16: Intel's AMX, since Sapphire Rapids (2023).

    Linux alone says so; elsewhere False.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return "amx_bf16" in next(flags, "").split()
