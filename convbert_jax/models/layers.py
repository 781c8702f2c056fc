"""Layers with float32 parameters; computation runs in the dtype of the input.

Random keys are arguments; `key=None` is deterministic. `Capture` collects activations:

    hidden, seen = model.encode(tokens, segment_ids, type_ids, capture=("attention", "filters"))
    seen[0]["attention"][3]  # layer 3 of the first stage, [B, H, L, L]

Captured values are computed separately; the layer itself still runs its fused kernels.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import EmbeddingsConfig, LayerConfig
from convbert_jax.config.network import CANON_TAPS
from convbert_jax.ops.convolution import depthwise_conv, depthwise_conv_step
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

    def __init__(self, size: int, epsilon: float, bias: bool = True):
        self.scale = nnx.Param(jnp.ones(size))
        if bias:
            self.bias = nnx.Param(jnp.zeros(size))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        scale = self.scale[...]
        bias = self.bias[...] if hasattr(self, "bias") else jnp.zeros_like(scale)
        return layer_norm(x, scale, bias, self.epsilon)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in float32, without mean or bias, as in T5."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return rms_norm(x, self.scale[...], self.epsilon)


def make_norm(config: LayerConfig | EmbeddingsConfig, size: int) -> LayerNorm | RMSNorm:
    """Make the norm named by config.model.normalization."""
    if config.normalization == "rms":
        return RMSNorm(size, config.layer_norm_epsilon)
    return LayerNorm(size, config.layer_norm_epsilon, config.biases)


def residual(
    x: Float[Array, "B L C"],
    inner: Callable[[Array], Array],
    norm: LayerNorm | RMSNorm | None,
    order: str,
) -> Float[Array, "B L C"]:
    """Apply a residual sublayer: norm(x + inner(x)) or x + inner(norm(x)).

    Args:
      norm: None: x + inner(x), where `x` is already normalized.
      order: "post" or "pre", a value of `LayerConfig.norm`.
    """
    if norm is None:
        return x + inner(x)
    return x + inner(norm(x)) if order == "pre" else norm(x + inner(x))


def positions(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Return position indices that restart at 0 in each segment, so that documents can be packed.

    Padding continues the count: a padded row with one segment gets 0 .. L-1, as in the official
    code.
    """
    places = jnp.arange(segment_ids.shape[1])
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = (segment_ids != before) & (segment_ids != 0)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Apply dropout; return `x` unchanged if `key` is None."""
    drop = dropout_of(rate, key)
    return x if drop is None else jnp.where(drop.draw(x.shape), x * drop.factor, 0)


def start_past(
    rows: int, taps: int, channels: int, dtype: jnp.dtype, dilation: int = 1
) -> Float[Array, "B P C"]:
    """Return the past inputs of a causal convolution at the first position: zeros."""
    return jnp.zeros((rows, (taps - 1) * dilation, channels), dtype)


def keep_past(
    inputs: Float[Array, "B P C"],
    segment_ids: Int[Array, "B P"],
    taps: int,
    copies: int,
    dilation: int = 1,
) -> Float[Array, "R T C"]:
    """Return the past inputs of a causal convolution after prompts, for B x `copies` rows.

    Padding and positions before the prompt are zeros.
    """
    span = (taps - 1) * dilation
    inputs = jnp.where((segment_ids != 0)[..., None], inputs, 0)
    begun = inputs.shape[1]
    past = jnp.pad(inputs, ((0, 0), (max(0, span - begun), 0), (0, 0)))[:, max(0, begun - span) :]
    return jnp.repeat(past, copies, axis=0)


def move(
    past: Float[Array, "B P C"], new: Float[Array, "B 1 C"]
) -> tuple[Float[Array, "B P1 C"], Float[Array, "B P C"]]:
    """Append a new input; return the window that ends with it, and the next position's past."""
    window = jnp.concatenate([past, new], axis=1)
    return window, window[:, 1:]


class Canon(nnx.Module):
    """x + conv(x), a depthwise convolution without bias (Allen-Zhu 2025, arXiv 2512.17351).

    Centered filters have one more tap on the left. Taps never read padding or other documents.
    """

    def __init__(
        self,
        size: int,
        initializers: Initializers,
        rngs: nnx.Rngs,
        causal: bool,
        implementation: str,
    ):
        start = initializers.depthwise(CANON_TAPS)
        self.depthwise = nnx.Param(start(rngs.params(), (CANON_TAPS, size)))
        self.causal, self.implementation = causal, implementation

    def __call__(
        self, x: Float[Array, "B L C"], segment_ids: Int[Array, "B L"]
    ) -> Float[Array, "B L C"]:
        return x + depthwise_conv(
            x, self.depthwise[...], segment_ids=segment_ids, causal=self.causal,
            implementation=self.implementation,
        )  # fmt: skip

    def step(
        self, x: Float[Array, "R 1 C"], past: Float[Array, "R P C"]
    ) -> tuple[Float[Array, "R 1 C"], Float[Array, "R P C"]]:
        """Apply the causal form at one position; also return the past of the next position."""
        window, past = move(past, x)
        return x + depthwise_conv_step(window, self.depthwise[...])[:, None], past


class Canons:
    """Applies the `Canon` layers of modules: on whole rows, on prompts, or at one position.

    A module has its `Canon` for the input NAME as the attribute NAME_canon. Inputs without one are
    unchanged.

    Attributes:
      state: After prompts or a position: name -> inputs that the next position reads.
    """

    def __init__(
        self,
        segment_ids: Int[Array, "B L"] | None = None,
        *,
        copies: int = 0,
        past: Mapping[str, Array] | None = None,
    ):
        """Select the form.

        Args:
          segment_ids: Of whole rows or prompts.
          copies: Of prompts: the number of rows that continue each of them.
          past: Of one position: the state before it.
        """
        self._segment_ids, self._copies, self._past = segment_ids, copies, past
        self.state: dict[str, Array] = {}

    @staticmethod
    def start(rows: int, dtype: jnp.dtype, *modules: nnx.Module) -> dict[str, Array]:
        """Return the state of the `Canon` layers of `modules` before the first position."""
        return {
            name.removesuffix("_canon"): start_past(rows, *canon.depthwise[...].shape, dtype)
            for module in modules
            for name, canon in vars(module).items()
            if isinstance(canon, Canon)
        }

    def __call__(self, module: nnx.Module, name: str, x: Array) -> Array:
        """Return `x`, the input `name` of a module, after its `Canon`."""
        canon = getattr(module, f"{name}_canon", None)
        if canon is None:
            return x
        if self._past is not None:
            x, self.state[name] = canon.step(x, self._past[name])
            return x
        if self._copies:
            self.state[name] = keep_past(x, self._segment_ids, CANON_TAPS, self._copies)
        return canon(x, self._segment_ids)


def add_canons(
    layer: nnx.Module,
    config: LayerConfig,
    initializers: Initializers,
    rngs: nnx.Rngs,
    causal: bool = False,
) -> None:
    """Add the `Canon` layers of config.model.canon to a layer, its mixer and its feed-forward."""
    owners = {"A": layer, "B": layer.mixer, "C": layer, "D": layer.feed_forward}
    for position, widths in config.canon_widths.items():
        for name, size in widths.items():
            canon = Canon(size, initializers, rngs, causal, config.convolution)
            setattr(owners[position], f"{name}_canon", canon)


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
