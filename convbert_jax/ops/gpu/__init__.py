"""Convolutions as Pallas kernels for GPU."""

from convbert_jax.ops.gpu.depthwise import depthwise_conv
from convbert_jax.ops.gpu.plain import dynamic_conv
from convbert_jax.ops.gpu.span import span_dynamic_conv

__all__ = ["depthwise_conv", "dynamic_conv", "span_dynamic_conv"]
