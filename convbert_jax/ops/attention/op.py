"""Attention as models call it, and by which form it is computed."""

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

# name -> f(query, key, value, segment_ids, key_segment_ids, causal), with both ids or None
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
    """softmax(query . key / sqrt(D)) . value over the keys that a position may see.

    Args:
      segment_ids: a position sees the keys of its own segment. Padding (0) is seen by nothing and
        sees the segment with the largest id: in a row of one segment that is all real tokens, as in
        the release. None: one segment without padding.
      key_segment_ids: those of the keys; None: `segment_ids`, where keys are as many as queries,
        else one segment without padding.
      causal: the mask: False is full; True lets position t see the keys 0 to t only.
      implementation: as in `dispatch.choose`: a key of IMPLEMENTATIONS, or "auto".
      drop: dropout of the weights; "splash" and "cudnn" have none. What is dropped is not the same
        in every form.

    Returns:
      [B, L, H, D] in the dtype of `value`; scores and softmax are float32. What a row of nothing
      but padding gives out is finite and means nothing. Where keys have segments of their own, a
      position that sees no key gives out 0, and sends no gradient to any.

    Raises:
      ValueError: shapes that do not fit, or a named implementation that cannot do what is asked, or
        not on the devices at hand; the message says why.
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
    """What `attention` weighs the values with, in float32: each row adds up to 1, or to 0 where a
    position sees no key. Arguments as there.
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
    """query . key / sqrt(D) in float32, of which `attention_weights` are the softmax; 0 where a
    position does not see a key.
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
    """`attention` of a few positions to keys and values that many steps of decoding read: in the
    order in which a product reads them, so that no step turns them over.
    """
    count = query.shape[2]
    if dispatch.platform() == "tpu" and count == 1:  # to both products a vector: see products.py
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
            raise ValueError(
                f"attention: {name} is {list(array.shape)}, but must be {list(shape)}."
            )


def _ids(query, key, segment_ids, key_segment_ids):
    """Segments of queries and keys, both None if there is nothing to tell apart."""
    if key_segment_ids is None and query.shape[1] == key.shape[1]:
        return segment_ids, segment_ids
    if segment_ids is None and key_segment_ids is None:
        return None, None
    if segment_ids is None:
        segment_ids = jnp.ones(query.shape[:2], jnp.int32)
    if key_segment_ids is None:
        key_segment_ids = jnp.ones(key.shape[:2], jnp.int32)
    return segment_ids, key_segment_ids
