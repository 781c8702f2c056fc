"""Features of the CPU beyond the x86-64 and ARM baselines."""

import functools
import pathlib

_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def multiplies_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Returns whether the CPU has a matrix unit for bfloat16 (Intel AMX, Sapphire Rapids or newer).

    Only Linux reports it; False on other systems.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return "amx_bf16" in next(flags, "").split()
