"""Scaled dot-product attention within the segments of a row.

Implementations:
  xla: stores scores and weights in memory; any platform, supports attention dropout.
  cudnn: cuDNN fused attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`.
  pallas_tpu: kernels of `ops/tpu/attention/`; scores and dropout masks stay on chip.
  splash: JAX's blockwise attention kernel for TPU, for longer rows than pallas_tpu.

Decoder self-attention is causal; in cross-attention keys and values belong to another row with its
own segment ids.
"""

from convbert_jax.ops.attention.kernels import cudnn, pallas_tpu, splash
from convbert_jax.ops.attention.op import (
    IMPLEMENTATIONS,
    attention,
    attention_scores,
    attention_to_kept,
    attention_weights,
)
from convbert_jax.ops.attention.plain import xla
from convbert_jax.ops.attention.visible import visible_keys, visible_pairs

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "attention_scores",
    "attention_to_kept",
    "attention_weights",
    "cudnn",
    "pallas_tpu",
    "splash",
    "visible_keys",
    "visible_pairs",
    "xla",
]
