"""How a process takes memory."""

import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource, sys
from convbert_jax.machine import allocator
if "keep" in sys.argv:
    assert allocator.keep_memory()
libc, size = ctypes.CDLL(None), 200 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
use()
print(use())
"""


def faults_of_second_use(*arguments: str) -> int:
    command = [sys.executable, "-c", _FAULTS, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_memory_that_was_freed_is_used_again_without_asking_the_system():
    # Huge pages, where they are always on, make few faults of many: then there is nothing to keep.
    anew = faults_of_second_use()
    if anew < 1_000:
        pytest.skip(f"200 MB are {anew} page faults here")
    assert faults_of_second_use("keep") < anew / 100
