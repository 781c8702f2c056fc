"""Attention as Pallas kernels for TPU, with dropout of the weights."""

from convbert_jax.ops.tpu.attention.blocks import longest
from convbert_jax.ops.tpu.attention.scaled import attention

__all__ = ["attention", "longest"]
