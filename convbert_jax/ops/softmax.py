"""Softmax over the last axis whose backward pass needs only the result."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
