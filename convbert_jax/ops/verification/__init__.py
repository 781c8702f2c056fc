"""Checks a kernel against XLA on the device before the first program uses it.

compare.py   both on small random inputs: outputs, gradients, dropout
verdicts.py  when a check runs, where its verdict is kept, what all processes agree on
"""

from convbert_jax.ops.verification.verdicts import KernelError, find_fault

__all__ = ["KernelError", "find_fault"]
