"""--mode=doctor: checks for problems that would stop a run on this machine.

checks.py      the list of checks, and those of versions, host, accelerators and disks, without jax
run_checks.py  checks of devices, vocabulary, weights, data, and of all processes of a run

`examine` runs all checks. They remove all files that they create.
"""

from convbert_jax.doctor.checks import Finding, examine, fault_of_jax, is_stuck

__all__ = ["Finding", "examine", "fault_of_jax", "is_stuck"]
