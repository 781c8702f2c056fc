"""Convolutions as Pallas kernels for TPU; attention is in `attention.py`."""

from convbert_jax.ops.tpu.depthwise import depthwise_conv
from convbert_jax.ops.tpu.dynamic import dynamic_conv, light_conv, light_suits
from convbert_jax.ops.tpu.span_dynamic import span_dynamic_conv

__all__ = ["depthwise_conv", "dynamic_conv", "light_conv", "light_suits", "span_dynamic_conv"]
