"""How this process takes memory from the system."""

import ctypes
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> bool:
    """Lets this process keep the memory that it frees, and says whether the C library could be told
    so. To be called before any thread has begun.

    glibc asks the system for each large buffer and gives it back when it is freed. XLA:CPU has all
    intermediate values of a step in one such buffer, so that each step began with pages which the
    kernel had to clear: 56,000 faults in a step of `tiny`. Kept in one heap they are cleared once.
    The process stays as large as it was at its largest.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One heap, the one that grows without end: those of other threads have 64 MB.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
