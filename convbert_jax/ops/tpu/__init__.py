"""Convolutions as Pallas kernels for TPU."""

from convbert_jax.ops.tpu.depthwise import depthwise_conv
from convbert_jax.ops.tpu.light import light_conv, light_suits
from convbert_jax.ops.tpu.plain import dynamic_conv
from convbert_jax.ops.tpu.span import span_dynamic_conv

__all__ = ["depthwise_conv", "dynamic_conv", "light_conv", "light_suits", "span_dynamic_conv"]
