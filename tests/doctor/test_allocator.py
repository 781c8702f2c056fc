"""Memory allocation of a process."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

_USE = """
import ctypes, resource
libc, size = ctypes.CDLL(None), 200 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
_FAULTS = f"""
import sys
from convbert_jax import machine
if "keep" in sys.argv:
    assert machine.keep_memory()
{_USE}
use()
print(use())
"""


def faults_of_second_use(*arguments: str) -> int:
    command = [sys.executable, "-c", _FAULTS, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_memory_that_was_freed_is_used_again_without_asking_the_system():
    # With transparent huge pages there are few page faults, so nothing can be saved.
    anew = faults_of_second_use()
    if anew < 1_000:
        pytest.skip(f"200 MB are {anew} page faults here")
    assert faults_of_second_use("keep") < anew / 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
@pytest.mark.parametrize("program", ["convbert_jax.main", "convbert_jax.sweeps.child"])
def test_the_threads_of_a_program_keep_memory_too(tmp_path, program):
    # The first allocating thread fixes the number of heaps. If it runs before `keep_memory`, each
    # thread gets a heap that returns large blocks to the system.
    code = f"""
import runpy, sys, threading
from convbert_jax import main
{_USE}
def look(request):
    thread = threading.Thread(target=lambda: (use(), print(use(), flush=True)))
    thread.start()
    thread.join()
    sys.exit(3)
main._answer = look
sys.argv = ["{program}", "--config=configs/tiny.py", "--workdir={tmp_path}"]
sys.argv.append("--config.platform=cpu")
if sys.argv[0] == "convbert_jax.main":
    main.start()
else:
    runpy.run_module("{program}", run_name="__main__")
"""
    read, write = os.pipe()  # pipe of a worker; closing it would end its run
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            stdin=read,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(read)
        os.close(write)
    assert result.returncode == 3, result.stderr
    assert int(result.stdout) < 500  # of 51,200
