"""--mode=doctor: checks for problems that would stop a run on this machine.

finding.py       result of a check; a check that fails or hangs is a finding too
versions.py      versions of Python, jax and its libraries, without importing them
host.py          memory and CPUs, with container limits
accelerators.py  requirements of TPUs and the NVIDIA driver, and processes that use a TPU
devices.py       devices that jax finds, and a computation on each
disk.py          workdir, its free space and locks, the compile cache, the clock
start.py         vocabulary, weights and data of the config
processes.py     settings that must be equal on all processes of a run

`examine` runs all checks. They remove all files that they create.
"""

from convbert_jax.doctor.examination import examine
from convbert_jax.doctor.finding import Finding, is_stuck
from convbert_jax.doctor.versions import fault_of_jax

__all__ = ["Finding", "examine", "fault_of_jax", "is_stuck"]
