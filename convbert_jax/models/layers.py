"""Building blocks with parameters, which are float32; computation runs in the dtype of the input.

Randomness is an argument: `key=None` means deterministic.
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
State = Any  # what a decoder keeps of the positions before, see config/mixers.py


@dataclasses.dataclass(frozen=True)
class Initializers:
    """How parameters start, by role; biases start at 0 and layer norm scales at 1."""

    dense: Initializer  # kernels and tables
    depthwise: Callable[[int], Initializer]  # taps -> of filters that all tokens share
    glorot: Initializer  # what the release leaves at TensorFlow's default


def initializers(kind: str, stddev: float) -> Initializers:
    """`kind` is a value of config.model.initializers, or glorot.

    release: truncated normals that, as in TensorFlow, are cut at two `stddev` and not rescaled,
    so that what remains has 0.88 of it; the depthwise filters take 1 / taps. huggingface: plain
    normals everywhere. glorot: uniform by fan-in and fan-out, whatever `stddev`, as in LightConv.
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
    """y = x W + b over the last axis, or without b."""

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
        """W, and b or None."""
        return self.kernel[...], self.bias[...] if hasattr(self, "bias") else None

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C_out"]:
        return dense(x, *self.weights, x.dtype)


def apply_all(layers: Sequence[Dense], x: Float[Array, "*B C"]) -> list[Float[Array, "*B _"]]:
    """Each layer applied to the same `x`."""
    kernels, biases = zip(*(layer.weights for layer in layers), strict=True)
    return dense_of_one(x, kernels, biases, x.dtype)


class GroupedDense(nnx.Module):
    """A dense layer for each of `groups` contiguous channel groups (ConvBERT §3.3), no shuffle.

    The kernel is [groups, inputs / groups, outputs / groups], the bias, if there is one, [outputs].
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
    """Grouped if there is more than one group, as in the release (`dense` or `g_dense`)."""
    if groups == 1:
        return Dense(inputs, outputs, initializer, rngs, bias)
    return GroupedDense(inputs, outputs, groups, initializer, rngs, bias)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in float32: an epsilon of 1e-12 needs it."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in float32: neither a mean nor a bias, as in T5."""

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
    """What a part of a layer adds: norm(x + inner(x)), or x + inner(norm(x)).

    Args:
      order: "post" or "pre", a value of `LayerConfig.norm`.
    """
    return x + inner(norm(x)) if order == "pre" else norm(x + inner(x))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """`x` with what `ops.dropout.Dropout` drops; without a key, `x`."""
    drop = dropout_of(rate, key)
    return x if drop is None else jnp.where(drop.draw(x.shape), x * drop.factor, 0)
