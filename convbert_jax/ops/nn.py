"""Activations, norms, softmax and dropout, computed in float32.

Autodiff would save every intermediate array of each layer. These functions save an input or an
output and recompute the rest, which is cheaper than writing and reading it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from convbert_jax.ops import dispatch, partitioning


# With prevent_cse, a barrier before the recomputation would split fusions: on TPUs a feed-forward
# block would cost 1.5 times as much.
@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Exact GELU, x Phi(x) with the Gaussian CDF as in BERT, not the tanh approximation."""
    exact = x.astype(jnp.float32)
    return (exact * (0.5 + 0.5 * jax.lax.erf(exact * 0.5**0.5))).astype(x.dtype)


def gelu_tanh(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """GELU with the tanh approximation, as in the gated feed-forward block of T5 1.1."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def silu(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """x sigmoid(x), also called swish."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


# config.model.activation -> function
ACTIVATIONS = {
    "gelu": gelu,
    "relu": jax.nn.relu,
    "geglu": gelu,
    "gated_gelu": gelu_tanh,
    "swiglu": silu,
}


# With jax.checkpoint, a norm between two dense layers has 20% to 60% more temporaries (CPU).
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "*B C"], scale: Float[Array, " C"], bias: Float[Array, " C"], epsilon: float
) -> Float[Array, "*B C"]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    exact = x.astype(jnp.float32)
    mean = exact.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(_variance(exact, mean, x.dtype) + epsilon)
    out = (exact - mean) * inverse * scale + bias
    return out.astype(x.dtype), (x, mean, inverse, scale)


def _variance(exact, mean, dtype):
    """Compute the variance; on TPU with bfloat16, as E[x²] - E[x]² in one pass with the mean.

    Cancellation in the one-pass form costs about 6e-4 where the mean is 100 standard deviations.
    Rounding `x` to bfloat16 costs far more there: neighboring values are half a deviation apart.
    """
    if dispatch.platform() != "tpu" or dtype != jnp.bfloat16:
        return jnp.square(exact - mean).mean(axis=-1, keepdims=True)
    return jnp.maximum(jnp.square(exact).mean(axis=-1, keepdims=True) - jnp.square(mean), 0)


def _layer_norm_backward(epsilon, saved, cotangent):
    x, mean, inverse, scale = saved
    normal = (x.astype(jnp.float32) - mean) * inverse
    cotangent = cotangent.astype(jnp.float32)
    d_normal = cotangent * scale
    along = jnp.mean(d_normal * normal, axis=-1, keepdims=True)
    d_x = (d_normal - d_normal.mean(axis=-1, keepdims=True) - normal * along) * inverse
    rows = tuple(range(x.ndim - 1))
    return d_x.astype(x.dtype), jnp.sum(cotangent * normal, rows), jnp.sum(cotangent, rows)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "*B C"], scale: Float[Array, " C"], epsilon: float):
    """x / sqrt(mean of squares + epsilon) * scale over the last axis (Zhang and Sennrich 2019)."""
    return _rms_norm_forward(x, scale, epsilon)[0]


def _rms_norm_forward(x, scale, epsilon):
    exact = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(exact).mean(axis=-1, keepdims=True) + epsilon)
    return (exact * inverse * scale).astype(x.dtype), (x, inverse, scale)


def _rms_norm_backward(epsilon, saved, cotangent):
    x, inverse, scale = saved
    normal, cotangent = x.astype(jnp.float32) * inverse, cotangent.astype(jnp.float32)
    d_normal = cotangent * scale
    d_x = (d_normal - normal * jnp.mean(d_normal * normal, axis=-1, keepdims=True)) * inverse
    return d_x.astype(x.dtype), jnp.sum(cotangent * normal, tuple(range(x.ndim - 1)))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax(
    logits: Float[Array, "*B K"], visible: Bool[Array, "*#B K"] | None, dtype: jnp.dtype
) -> Float[Array, "*B K"]:
    """Computes the softmax over the last axis.

    Args:
      logits: computed in float32.
      visible: mask, broadcastable to `logits`. Masked entries are 0, even if all are masked.
      dtype: dtype of the result.
    """
    logits = logits.astype(jnp.float32)
    if visible is None:
        powers = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return (powers / powers.sum(axis=-1, keepdims=True)).astype(dtype)
    # Mask the logits once: applying the mask in each of the three passes would double the reads on
    # a TPU. If nothing is visible, each power is still 0.
    logits = jnp.where(visible, logits, _LOWEST)
    largest = jnp.maximum(logits.max(axis=-1, keepdims=True), 0.5 * _LOWEST)
    powers = jnp.exp(logits - largest)
    total = jnp.maximum(powers.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return (powers / total).astype(dtype)


_LOWEST = float(jnp.finfo(jnp.float32).min)


def _softmax_forward(logits, visible, dtype):
    weights = softmax(logits, visible, dtype)
    return weights, (weights, jnp.zeros((0,), logits.dtype))


def _softmax_backward(dtype, saved, cotangent):
    weights, like = saved
    return softmax_backward(weights, cotangent).astype(like.dtype), None


def softmax_backward(
    weights: Float[Array, "*B K"], cotangent: Float[Array, "*B K"]
) -> Float[Array, "*B K"]:
    """Returns the gradient of the logits, in float32, from the gradient of the weights."""
    weights, cotangent = weights.astype(jnp.float32), cotangent.astype(jnp.float32)
    along = jnp.sum(weights * cotangent, axis=-1, keepdims=True)
    return weights * (cotangent - along)


softmax.defvjp(_softmax_forward, _softmax_backward)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout: zeroes entries with probability `rate` and scales the others to keep the mean.

    Attributes:
      rate: probability, rounded to a multiple of 1/256 from 1/256 to 255/256.
      key: random key of the mask.
    """

    rate: float
    key: Array

    @property
    def kept(self) -> int:
        """Expected number of kept entries out of 256."""
        return min(max(round((1.0 - self.rate) * 256), 1), 255)

    @property
    def factor(self) -> float:
        """Scale of kept entries."""
        return 256 / self.kept

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "..."]:
        """Draws a mask of `shape`, True for kept entries.

        With three or more axes, axis 0 is rows, which devices may split. Filters shared by all rows
        have two axes.
        """
        draw = functools.partial(_draw, self.kept)
        by_rows = len(shape) > 2
        keep = (
            partitioning.draw_by_rows(draw, self.key, shape) if by_rows else draw(self.key, shape)
        )
        if dispatch.platform() == "cpu":
            # Otherwise XLA:CPU recomputes the random bits in every fusion that reads them.
            keep = jax.lax.optimization_barrier(keep)
        return keep


def dropout_of(rate: float, key: Array | None) -> Dropout | None:
    """Returns a `Dropout`, or None if nothing is dropped: without a key or at rate 0."""
    return None if key is None or rate == 0.0 else Dropout(rate, key)


def _draw(kept: int, key: Array, shape: tuple[int, ...]) -> Array:
    """Draws booleans that are True with probability `kept` / 256."""
    if dispatch.platform() == "tpu":  # the TPU generator makes bytes at no extra cost
        return jax.random.bits(key, shape, jnp.uint8) < kept
    # Random words are expensive, so each yields four entries, a quarter of the second last axis
    # apart, so that no data moves.
    *batch, rows, columns = shape
    words = jax.random.bits(key, (*batch, -(-rows // 4), columns))
    parts = [((words >> (8 * part)) & 0xFF) < kept for part in range(4)]
    return jnp.concatenate(parts, axis=-2)[..., :rows, :]
