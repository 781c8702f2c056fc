"""Layers with float32 parameters; computation runs in the dtype of the input.

Random keys are arguments; `key=None` is deterministic.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.models.functions import layer_norm, rms_norm
from convbert_jax.ops.dropout import dropout_of
from convbert_jax.ops.products import dense, dense_of_groups, dense_of_one

Initializer = jax.nn.initializers.Initializer
State = Any  # decoding state of earlier positions, see config/mixers.py


@dataclasses.dataclass(frozen=True)
class Initializers:
    """Parameter initializers by role; biases start at 0 and norm scales at 1."""

    dense: Initializer  # kernels and embeddings
    depthwise: Callable[[int], Initializer]  # number of taps -> initializer of depthwise filters
    glorot: Initializer  # for parameters that the official code leaves at TensorFlow's default


def initializers(kind: str, stddev: float) -> Initializers:
    """Return the initializers for a value of config.model.initializers, or "glorot".

    release: Normals truncated at two `stddev` and not rescaled, as in TensorFlow, so that the
      resulting deviation is 0.88 `stddev`; depthwise filters use 1 / taps as `stddev`.
    huggingface: Plain normals everywhere.
    glorot: Uniform by fan-in and fan-out as in LightConv; dense kernels ignore `stddev`.
    """
    truncated, normal = jax.nn.initializers.truncated_normal, jax.nn.initializers.normal
    return {
        "release": Initializers(
            dense=truncated(stddev),
            depthwise=lambda taps: truncated(1 / taps),
            glorot=jax.nn.initializers.glorot_uniform(),
        ),
        "huggingface": Initializers(
            dense=normal(stddev), depthwise=lambda taps: normal(stddev), glorot=normal(stddev)
        ),
        "glorot": Initializers(
            dense=jax.nn.initializers.glorot_uniform(),
            depthwise=lambda taps: truncated(1 / taps),
            glorot=jax.nn.initializers.glorot_uniform(),
        ),
    }[kind]


class Dense(nnx.Module):
    """y = x W + b over the last axis; b is optional."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        initializer: Initializer,
        rngs: nnx.Rngs,
        bias: bool = True,
    ):
        self.kernel = nnx.Param(initializer(rngs.params(), (inputs, outputs)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    @property
    def weights(self) -> tuple[Float[Array, "C C_out"], Float[Array, " C_out"] | None]:
        """Return W, and b or None."""
        return self.kernel[...], self.bias[...] if hasattr(self, "bias") else None

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C_out"]:
        return dense(x, *self.weights, x.dtype)


def apply_all(layers: Sequence[Dense], x: Float[Array, "*B C"]) -> list[Float[Array, "*B _"]]:
    """Apply several dense layers to the same `x`, fused."""
    kernels, biases = zip(*(layer.weights for layer in layers), strict=True)
    return dense_of_one(x, kernels, biases, x.dtype)


class GroupedDense(nnx.Module):
    """A dense layer per contiguous channel group (ConvBERT §3.3), without channel shuffle.

    The kernel is [groups, inputs / groups, outputs / groups]; the optional bias is [outputs].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        groups: int,
        initializer: Initializer,
        rngs: nnx.Rngs,
        bias: bool = True,
    ):
        shape = (groups, inputs // groups, outputs // groups)
        self.kernel = nnx.Param(initializer(rngs.params(), shape))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C_out"]:
        bias = self.bias[...] if hasattr(self, "bias") else None
        return dense_of_groups(x, self.kernel[...], bias, x.dtype)


def feed_forward_dense(
    inputs: int,
    outputs: int,
    groups: int,
    initializer: Initializer,
    rngs: nnx.Rngs,
    bias: bool = True,
) -> Dense | GroupedDense:
    """Return a grouped layer for more than one group, as in the official code (`g_dense`)."""
    if groups == 1:
        return Dense(inputs, outputs, initializer, rngs, bias)
    return GroupedDense(inputs, outputs, groups, initializer, rngs, bias)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in float32, which an epsilon of 1e-12 requires."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in float32, without mean or bias, as in T5."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return rms_norm(x, self.scale[...], self.epsilon)


NORMS = {"layer": LayerNorm, "rms": RMSNorm}  # by `LayerConfig.normalization`


def residual(
    x: Float[Array, "B L C"],
    inner: Callable[[Array], Array],
    norm: LayerNorm | RMSNorm,
    order: str,
) -> Float[Array, "B L C"]:
    """Apply a residual sublayer: norm(x + inner(x)) or x + inner(norm(x)).

    Args:
      order: "post" or "pre", a value of `LayerConfig.norm`.
    """
    return x + inner(norm(x)) if order == "pre" else norm(x + inner(x))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Apply dropout; return `x` unchanged if `key` is None."""
    drop = dropout_of(rate, key)
    return x if drop is None else jnp.where(drop.draw(x.shape), x * drop.factor, 0)
