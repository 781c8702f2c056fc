"""Settings of the memory allocator of this process."""

import ctypes
import sys

# Parameter numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> bool:
    """Makes this process keep freed memory; returns whether the C library supports it.

    Must be called before any thread is started. By default, glibc requests each large buffer from
    the kernel and returns it when it is freed. XLA:CPU keeps all intermediate values of a step in
    one such buffer, so each step would start with page faults on cleared pages. In a single heap
    the pages are cleared once. The process does not shrink below its peak memory.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # A single heap, because it can grow without limit; the heaps of other threads have 64 MB.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
