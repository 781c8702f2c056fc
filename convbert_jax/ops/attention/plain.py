"""Attention in XLA operations, with scores and weights [B, H, L, S] in memory."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from convbert_jax.ops import dispatch
from convbert_jax.ops.attention.visible import visible_pairs
from convbert_jax.ops.dropout import Dropout
from convbert_jax.ops.mesh import division
from convbert_jax.ops.products import einsum
from convbert_jax.ops.softmax import softmax, softmax_backward


def xla(query, key, value, segment_ids, key_segment_ids, causal, *, drop=None):
    """Computes attention with scores in memory.

    If the mesh splits positions, keys and values are gathered: each device has all of its rows.
    """
    key, value = division.whole_rows(key), division.whole_rows(value)
    if drop is not None:
        scores = _scores(query, key)
        visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal)
        return _attend_to_kept(scores, value, visible, _draw(drop, scores.shape), drop.factor)
    weights = weights_of(query, key, segment_ids, key_segment_ids, causal, value.dtype)
    return einsum("bhqk,bkhd->bqhd", weights, value, value.dtype)


def _draw(drop: Dropout, shape: tuple[int, ...]) -> Bool[Array, "B H L S"]:
    if dispatch.platform() != "tpu":
        return drop.draw(shape)
    # XLA for TPU keeps queries in the lanes and would transpose a mask drawn in any other order.
    *rows, queries, keys = shape
    return drop.draw((*rows, keys, queries)).swapaxes(-1, -2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_to_kept(
    scores: Float[Array, "B H L S"],
    value: Float[Array, "B S H D"],
    visible: Bool[Array, "#B 1 L S"] | None,
    keep: Bool[Array, "B H L S"],
    factor: float,
) -> Float[Array, "B L H D"]:
    """Computes the product of softmax(scores) and `value`; kept weights are scaled by `factor`.

    Autodiff keeps three arrays of the size of the scores as residuals: weights, mask and their
    product. One array is enough: weights are not negative, so the sign can store the mask.
    """
    return _attend_to_kept_forward(scores, value, visible, keep, factor)[0]


def _attend_to_kept_forward(scores, value, visible, keep, factor):
    weights = softmax(scores, visible, value.dtype)
    marked = jnp.where(keep, weights, -weights)
    out = einsum("bhqk,bkhd->bqhd", _dropped(marked, factor), value, value.dtype)
    return out, (marked, value)


def _attend_to_kept_backward(factor, saved, cotangent):
    marked, value = saved
    d_dropped = einsum("bqhd,bkhd->bhqk", cotangent, value, value.dtype)
    d_value = einsum("bhqk,bqhd->bkhd", _dropped(marked, factor), cotangent, value.dtype)
    d_weights = jnp.where(marked > 0, d_dropped * factor, 0)
    d_scores = softmax_backward(jnp.abs(marked), d_weights)
    return d_scores, d_value, None, None


def _dropped(marked, factor):
    return jnp.where(marked > 0, marked * factor, 0)


_attend_to_kept.defvjp(_attend_to_kept_forward, _attend_to_kept_backward)


def weights_of(query, key, segment_ids, key_segment_ids, causal, dtype):
    visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal)
    return softmax(_scores(query, key), visible, dtype)


def _scores(query, key):
    # jnp.einsum with autodiff: its gradients are float32 products too, and faster on a TPU than
    # those of `products.einsum` (benchmarks/RESULTS.md).
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    return scores * query.shape[-1] ** -0.5
