"""Attention functions for models, and the table of implementations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops import dispatch
from convbert_jax.ops.attention import kernels, plain
from convbert_jax.ops.attention.visible import visible_pairs
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.dropout import Dropout
from convbert_jax.ops.products import SUBLANES, einsum
from convbert_jax.ops.softmax import softmax

# name -> f(query, key, value, segment_ids, key_segment_ids, causal); both ids are arrays or None
IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        kernels.pallas_tpu,
        "tpu",
        kernels.pallas_tpu_refuses,
        kernels.left_for_length,
        kernels.pallas_tpu_definition,
    ),
    "splash": Implementation(
        kernels.splash, "tpu", kernels.splash_refuses, kernels.left_for_shortness
    ),
    "cudnn": Implementation(kernels.cudnn, "gpu", kernels.cudnn_refuses),
    "xla": Implementation(plain.xla),
}


@jax.named_scope("attention")
def attention(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    value: Float[Array, "B S H D"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    causal: bool = False,
    implementation: str = "auto",
    drop: Dropout | None = None,
) -> Float[Array, "B L H D"]:
    """Computes softmax(query . key / sqrt(D)) . value over the visible keys.

    Args:
      query, key, value: inputs; queries are scaled here.
      segment_ids: a position sees the keys of its own segment. Padding (0) is never seen and sees
        the segment with the largest id: all real tokens in a row of one segment, as in the official
        code. None: one segment without padding.
      key_segment_ids: segments of the keys. None: `segment_ids` if S = L, else one segment without
        padding.
      causal: position t sees only keys 0 to t.
      implementation: a key of IMPLEMENTATIONS, or "auto"; see `dispatch.choose`.
      drop: dropout of the weights, not supported by "splash" and "cudnn". The mask for a key
        depends on the implementation.

    Returns:
      [B, L, H, D] in the dtype of `value`; scores and softmax are float32. Rows of padding only
      return arbitrary finite numbers. With `key_segment_ids`, a position that sees no key returns 0
      and contributes no gradient.

    Raises:
      ValueError: shapes do not match, or the named implementation does not support this call on the
        available devices.
    """
    _check(query, key, value, segment_ids, key_segment_ids)
    arguments = (query, key, value, *_ids(query, key, segment_ids, key_segment_ids), causal)
    options = {} if drop is None else {"drop": drop}
    function = dispatch.choose("attention", implementation, IMPLEMENTATIONS, *arguments, **options)
    return function(*arguments, **options)


def attention_weights(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    causal: bool = False,
) -> Float[Array, "B H L S"]:
    """Returns the weights of `attention` in float32.

    Each row sums to 1, or to 0 if the position sees no key. Arguments as in `attention`.
    """
    _check(query, key, key, segment_ids, key_segment_ids)
    ids = _ids(query, key, segment_ids, key_segment_ids)
    return plain.weights_of(query, key, *ids, causal, jnp.float32)


def attention_scores(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    causal: bool = False,
) -> Float[Array, "B H L S"]:
    """Returns query . key / sqrt(D) in float32, 0 for invisible keys.

    `attention_weights` returns their softmax over the visible keys.
    """
    _check(query, key, key, segment_ids, None)
    scores = einsum("bqhd,bkhd->bhqk", query, key, jnp.float32) * query.shape[-1] ** -0.5
    visible = visible_pairs(query, key, *_ids(query, key, segment_ids, None), causal)
    return scores if visible is None else jnp.where(visible, scores, 0.0)


def attention_to_kept(
    query: Float[Array, "B H Q D"],
    key: Float[Array, "B H D S"],
    value: Float[Array, "B H S D"],
    visible: Bool[Array, "B 1 #Q S"],
) -> Float[Array, "B H Q D"]:
    """Computes `attention` of a few positions over cached keys and values, for decoding.

    The cache has the axis order that the products read, so no step transposes it.

    Args:
      query: Q new positions.
      key, value: cache of S positions.
      visible: whether a query sees a key.
    """
    count = query.shape[2]
    if dispatch.platform() == "tpu" and count == 1:  # avoid matrix-vector products: products.py
        query = jnp.broadcast_to(query, (*query.shape[:2], SUBLANES, query.shape[3]))
    scores = einsum("bhqd,bhdk->bhqk", query, key, jnp.float32) * query.shape[-1] ** -0.5
    weights = softmax(scores, visible, value.dtype)
    return einsum("bhqk,bhkd->bhqd", weights, value, value.dtype)[:, :, :count]


def _check(query, key, value, segment_ids, key_segment_ids):
    batch, length, *heads = query.shape
    for name, array, shape in (
        ("key", key, (batch, key.shape[1], *heads)),
        ("value", value, (batch, *key.shape[1:3], value.shape[-1])),
        ("segment_ids", segment_ids, (batch, length)),
        ("key_segment_ids", key_segment_ids, (batch, key.shape[1])),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"attention: {name} must be {list(shape)}, got {list(array.shape)}.")


def _ids(query, key, segment_ids, key_segment_ids):
    """Returns segment ids of queries and keys, both None for one segment without padding."""
    if key_segment_ids is None and query.shape[1] == key.shape[1]:
        return segment_ids, segment_ids
    if segment_ids is None and key_segment_ids is None:
        return None, None
    if segment_ids is None:
        segment_ids = jnp.ones(query.shape[:2], jnp.int32)
    if key_segment_ids is None:
        key_segment_ids = jnp.ones(key.shape[:2], jnp.int32)
    return segment_ids, key_segment_ids
