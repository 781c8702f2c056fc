"""Scaled dot-product attention within the segments of a row, by the best form per platform.

xla: scores and weights in memory, what every platform can do; with attention dropout.
cudnn: cuDNN's fused attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`.
pallas_tpu: the kernels of `ops/tpu/attention/`; scores stay in the core, dropout is drawn there.
splash: JAX's blockwise attention kernel for TPU, for rows longer than those.

A decoder's self-attention is causal; its cross-attention has keys and values of another row, with
segments of their own.
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
