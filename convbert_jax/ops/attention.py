"""Scaled dot-product attention within the segments of a row, by the best form per platform.

xla: scores and weights in memory, what every platform can do; the only one with attention dropout.
cudnn: cuDNN's fused attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`.
splash: JAX's blockwise attention kernel for TPU; scores never leave the core.

A decoder's self-attention is causal; its cross-attention has keys and values of another row, with
segments of their own.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops import dispatch
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import POSITIONS, POSITIONS_AND_HEADS, ROWS, ROWS_AND_HEADS
from convbert_jax.ops.products import SUBLANES, einsum
from convbert_jax.ops.softmax import softmax, softmax_backward

# Below this length splash costs more than XLA's form, by the TPU compiler's model
# (benchmarks/RESULTS.md): a grid step has a fixed price, and a short row is a step for each head.
SPLASH_FROM = 512
SPLASH_BLOCK = 512  # most positions of a step
LANES = 128  # splash works on multiples of this many positions
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)

Drop = Callable[[tuple[int, ...]], tuple[Bool[Array, "B H L S"], float]]


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
    drop: Drop | None = None,
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
      drop: dropout of the weights: their shape -> which are kept, and what these are multiplied
        by; only "xla" has it.

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
    return _weights(query, key, *ids, causal, jnp.float32)


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
    visible = _visible(query, key, *_ids(query, key, segment_ids, None), causal)
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


def xla(query, key, value, segment_ids, key_segment_ids, causal, *, drop=None):
    """Scores in memory, in the order heads, queries, keys. Where a mesh splits positions, each
    device has all keys and values of its rows.
    """
    key, value = division.whole_rows(key), division.whole_rows(value)
    if drop is not None:
        scores = _scores(query, key)
        visible = _visible(query, key, segment_ids, key_segment_ids, causal)
        return _attend_to_kept(scores, value, visible, *_draw(drop, scores.shape))
    weights = _weights(query, key, segment_ids, key_segment_ids, causal, value.dtype)
    return einsum("bhqk,bkhd->bqhd", weights, value, value.dtype)


def _draw(drop: Drop, shape: tuple[int, ...]):
    if dispatch.platform() != "tpu":
        return drop(shape)
    # Its compiler has queries in the lanes, and would turn marks over that are drawn otherwise.
    *rows, queries, keys = shape
    keep, factor = drop((*rows, keys, queries))
    return keep.swapaxes(-1, -2), factor


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_to_kept(
    scores: Float[Array, "B H L S"],
    value: Float[Array, "B S H D"],
    visible: Bool[Array, "#B 1 L S"] | None,
    keep: Bool[Array, "B H L S"],
    factor: float,
) -> Float[Array, "B L H D"]:
    """The product of softmax(scores) with `value`, of weights that are kept times `factor`.

    Autodiff keeps three arrays of the scores' size for the backward pass: weights, marks, and the
    products of both. As no weight is negative, one can hold them all.
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


def _weights(query, key, segment_ids, key_segment_ids, causal, dtype):
    visible = _visible(query, key, segment_ids, key_segment_ids, causal)
    return softmax(_scores(query, key), visible, dtype)


def _scores(query, key):
    # By autodiff: its gradients are float32 products too, and 6% of a layer of length 512 on a TPU
    # cheaper than those of `products.einsum` (benchmarks/RESULTS.md).
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    return scores * query.shape[-1] ** -0.5


def cudnn(query, key, value, segment_ids, key_segment_ids, causal):
    """By cuDNN; partitioned over rows and heads by its own rule."""
    mask = _visible(query, key, segment_ids, key_segment_ids, causal=False)
    out = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal)


def splash(query, key, value, segment_ids, key_segment_ids, causal, *, interpret=False):
    """By JAX's splash attention kernel, forward and one fused kernel backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    width = query.shape[3]

    def run(query, key, value, segment_ids, key_segment_ids):
        shape = query.shape[1], key.shape[1]
        mask_of_head = (masks.CausalMask if causal else masks.FullMask)(shape)
        block_q, block_kv = map(_splash_block, shape)
        blocks = {
            **{f"block_{name}": block_q for name in ("q", "q_dkv")},
            **{
                f"block_{name}": block_kv
                for name in ("kv", "kv_compute", "kv_dkv", "kv_dkv_compute")
            },
        }
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([mask_of_head] * query.shape[2]),
            block_sizes=kernels.BlockSizes(**blocks, use_fused_bwd_kernel=True),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        heads_first = (x.swapaxes(1, 2) for x in (query * width**-0.5, key, value))
        ids = None
        if segment_ids is not None:
            ids = kernels.SegmentIds(segment_ids, key_segment_ids)
        return jax.vmap(kernel)(*heads_first, segment_ids=ids).swapaxes(1, 2)

    # A device's own queries, and all keys. A causal mask counts from the first position of a row,
    # and what no block divides cannot be split: there each has the whole.
    splits = not causal and division.positions_here(query.shape[1]) % LANES == 0
    queries, ids = (POSITIONS_AND_HEADS, POSITIONS) if splits else (ROWS_AND_HEADS, ROWS)
    out = division.over_mesh(
        run,
        (query, key, value, _own_segment(segment_ids), key_segment_ids),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS),
        queries,
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal)


def _silence(out, query, key, segment_ids, key_segment_ids, causal):
    """0 where a position sees no key: the kernels give the mean of values it must not see."""
    if key_segment_ids is segment_ids:  # each token sees at least itself
        return out
    visible = _visible(query, key, segment_ids, key_segment_ids, causal)
    return jnp.where(visible.any(axis=-1)[:, 0, :, None, None], out, 0)


def _splash_block(length: int) -> int:
    return next(size for size in range(SPLASH_BLOCK, 0, -LANES) if length % size == 0)


def _splash_refuses(query, key, *_, drop=None) -> str:
    if drop is not None:
        return "it has no attention dropout"
    for length in (query.shape[1], key.shape[1]):
        if length % LANES:
            return f"the length {length} is no multiple of {LANES}"
    return ""


def _splash_left(query, key, *_, **__) -> str:
    length = max(query.shape[1], key.shape[1])
    return f"it pays from length {SPLASH_FROM} on, this is {length}" if length < SPLASH_FROM else ""


def _cudnn_refuses(query, key, value, segment_ids, *_, drop=None) -> str:
    if drop is not None:
        return "it has no attention dropout"
    if "rocm" in jax.local_devices()[0].client.platform_version.lower():
        return "cuDNN is for NVIDIA's GPUs"
    if division.positions_here(query.shape[1]) < query.shape[1]:
        return "it does not divide positions over config.mesh.sequence"
    if query.dtype not in CUDNN_DTYPES:
        return f"it computes in bfloat16 and float16, not {query.dtype}"
    lengths = query.shape[1], key.shape[1]
    if segment_ids is not None and any(length % 2 for length in lengths):
        return f"with segments it needs even lengths, not {lengths[0]} and {lengths[1]}"
    width = query.shape[3]
    if value.shape[3] != width:
        return f"values of width {value.shape[3]} are not as wide as queries, {width}"
    return (
        f"the head width {width} is no multiple of 8 up to 128" if width % 8 or width > 128 else ""
    )


# name -> f(query, key, value, segment_ids, key_segment_ids, causal), with both ids or None
IMPLEMENTATIONS = {
    "splash": Implementation(splash, "tpu", _splash_refuses, _splash_left),
    "cudnn": Implementation(cudnn, "gpu", _cudnn_refuses),
    "xla": Implementation(xla),
}


def visible_keys(
    segment_ids: Int[Array, "B L"], key_segment_ids: Int[Array, "B S"] | None = None
) -> Bool[Array, "B L S"]:
    """[query, key]: real tokens of the segment that the query sees."""
    key = (segment_ids if key_segment_ids is None else key_segment_ids)[:, None, :]
    return (key != 0) & (key == _own_segment(segment_ids)[:, :, None])


def _visible(query, key, segment_ids, key_segment_ids, causal):
    """[B or 1, 1, L, S] what may be seen, or None: everything."""
    seen = None
    if segment_ids is not None:
        seen = visible_keys(segment_ids, key_segment_ids)[:, None]
    if causal:
        before = jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
        seen = before if seen is None else seen & before
    return seen


def _own_segment(segment_ids):
    """The segment each position sees; for padding the one with the largest id."""
    if segment_ids is None:
        return None
    return jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
