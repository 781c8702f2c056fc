"""Convolutions in XLA operations, for all platforms."""

from convbert_jax.ops.xla.depthwise import depthwise_conv
from convbert_jax.ops.xla.plain import dynamic_conv
from convbert_jax.ops.xla.span import span_dynamic_conv, span_filters

__all__ = ["depthwise_conv", "dynamic_conv", "span_dynamic_conv", "span_filters"]
