"""Checks a kernel against XLA on the device before the first program uses it.

compare.py   compares outputs, gradients and dropout masks on small random inputs
verdicts.py  runs checks on first use, caches results, combines them over processes
"""

from convbert_jax.ops.verification.verdicts import KernelError, find_fault

__all__ = ["KernelError", "find_fault"]
