"""What would stop a run on this machine, found before it starts: --mode=doctor.

finding.py       what a check says; a check that fails itself, or hangs, is a finding too
versions.py      Python, jax and what belongs to it; loads none of them
host.py          memory and CPUs, within the limits of a container
accelerators.py  what TPUs and NVIDIA's driver lack, and who holds them
devices.py       what jax finds, and whether it computes
disk.py          the folder of the run, its space and locks, the compile cache, the clock
start.py         vocabulary, weights and data that a config names
processes.py     what all processes of a run must have in common

`examine` goes through them in this order. Nothing is left behind.
"""

from convbert_jax.doctor.examination import examine
from convbert_jax.doctor.finding import Finding, is_stuck
from convbert_jax.doctor.versions import fault_of_jax

__all__ = ["Finding", "examine", "fault_of_jax", "is_stuck"]
