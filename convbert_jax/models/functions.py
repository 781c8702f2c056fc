"""Activations and norms in float32, with custom gradients that save few activations.

Autodiff would save every intermediate array of each layer. These functions save an input or an
output and recompute the rest, which is cheaper than writing and reading it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from convbert_jax.ops import dispatch


@jax.custom_vjp
def gelu(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Exact GELU, x Phi(x) with the Gaussian CDF as in BERT, not the tanh approximation."""
    exact = x.astype(jnp.float32)
    return (exact * _gauss(exact)).astype(x.dtype)


def _gauss(x):
    return 0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5)


def _gelu_backward(x, cotangent):
    exact = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(exact)) * (2 * jnp.pi) ** -0.5
    slope = _gauss(exact) + exact * density
    return ((cotangent.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


def gelu_tanh(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """GELU with the tanh approximation, as in the gated feed-forward block of T5 1.1."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS = {"gelu": gelu, "relu": jax.nn.relu, "gated_gelu": gelu_tanh}


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
