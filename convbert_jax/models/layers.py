"""Layers with float32 parameters; computation runs in the dtype of the input.

Random keys are arguments; `key=None` is deterministic. `Capture` collects activations:

    hidden, seen = model.encode(tokens, segment_ids, type_ids, capture=("attention", "filters"))
    seen[0]["attention"][3]  # layer 3 of the first stage, [B, H, L, L]

Captured values are computed separately; the layer itself still runs its fused kernels.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from convbert_jax.ops.nn import dropout_of, layer_norm, rms_norm
from convbert_jax.ops.products import dense, fused_dense, grouped_dense

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


def apply_fused(layers: Sequence[Dense], x: Float[Array, "*B C"]) -> list[Float[Array, "*B _"]]:
    """Apply several dense layers to the same `x`, fused."""
    kernels, biases = zip(*(layer.weights for layer in layers), strict=True)
    return fused_dense(x, kernels, biases, x.dtype)


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
        return grouped_dense(x, self.kernel[...], bias, x.dtype)


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


class Capture:
    """Collects the requested activations of one layer; created per layer, inside the layer scan.

    A mixer receives a `Capture` or None, and offers the activations that it has:

        if capture is not None:
            capture.offer("filters", lambda: filters_of(query, span_key))

    Attributes:
      seen: Captured arrays by name, for the names that were both requested and offered.
      offered: All offered names.
    """

    def __init__(self, wanted: Collection[str]):
        self._wanted = frozenset(wanted)
        self.seen: dict[str, Array] = {}
        self.offered: set[str] = set()

    def offer(self, name: str, make: Callable[[], Array]) -> None:
        """Record `name` as offered, and store `make()` if `name` was requested."""
        self.offered.add(name)
        if name in self._wanted:
            self.seen[name] = make()


class PaperFlops:
    """FLOPs per element, counted as in the ConvBERT paper; see `analysis/flops.py`."""

    LAYER_NORM = 5
    GELU = 8
    SOFTMAX = 5
    DROPOUT = 4
    GLU = 5  # a sigmoid and a product
