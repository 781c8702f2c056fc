"""Scaled dot-product attention within the segments of a row.

Implementations:
  xla: stores scores and weights in memory; any platform, supports attention dropout.
  cudnn: cuDNN fused attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`.
  pallas_tpu: kernels of `ops/tpu/attention.py`; scores and dropout masks stay on chip.
  splash: JAX's blockwise attention kernel for TPU, for longer rows than pallas_tpu.

Decoder self-attention is causal; in cross-attention keys and values belong to another row with its
own segment ids.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from convbert_jax.ops import dispatch, partitioning, verification
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.nn import Dropout, softmax, softmax_backward
from convbert_jax.ops.partitioning import (
    HEADS,
    POSITIONS,
    POSITIONS_AND_HEADS,
    REPLICATED,
    ROWS,
    ROWS_AND_HEADS,
    SEQUENCE,
)
from convbert_jax.ops.products import SUBLANES, einsum
from convbert_jax.ops.tpu import attention as tpu


@jax.named_scope("attention")
def attention(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    value: Float[Array, "B S H D"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    causal: bool = False,
    window: int = 0,
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
      window: a position sees only keys at most this many positions away; 0: no limit.
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
    arguments = (query, key, value, *_ids(query, key, segment_ids, key_segment_ids), causal, window)
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
    window: int = 0,
) -> Float[Array, "B H L S"]:
    """Returns the weights of `attention` in float32.

    Each row sums to 1, or to 0 if the position sees no key. Arguments as in `attention`.
    """
    _check(query, key, key, segment_ids, key_segment_ids)
    ids = _ids(query, key, segment_ids, key_segment_ids)
    return weights_of(query, key, *ids, causal, window, jnp.float32)


def attention_scores(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    causal: bool = False,
    window: int = 0,
) -> Float[Array, "B H L S"]:
    """Returns query . key / sqrt(D) in float32, 0 for invisible keys.

    `attention_weights` returns their softmax over the visible keys.
    """
    _check(query, key, key, segment_ids, None)
    scores = einsum("bqhd,bkhd->bhqk", query, key, jnp.float32) * query.shape[-1] ** -0.5
    visible = visible_pairs(query, key, *_ids(query, key, segment_ids, None), causal, window)
    return scores if visible is None else jnp.where(visible, scores, 0.0)


def decode_attention(
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


def rotary(
    x: Float[Array, "B L H D"], places: Int[Array, "B L"], base: float
) -> Float[Array, "B L H D"]:
    """Rotates channels i and i + D/2 by place * base^(-2i/D) (RoPE, Su et al. 2021, in halves)."""
    half = x.shape[-1] // 2
    waves = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = places[..., None, None].astype(jnp.float32) * jnp.tile(waves, 2)
    # [-second half, first half], as a product: on a TPU, slices of 32 lanes are slow.
    swap = np.zeros((2 * half, 2 * half), np.float32)
    swap[np.arange(half) + half, np.arange(half)] = -1
    swap[np.arange(half), np.arange(half) + half] = 1
    swapped = jnp.einsum(
        "blhd,de->blhe", x, jnp.asarray(swap, x.dtype), precision="highest",
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (x.astype(jnp.float32) * jnp.cos(angles) + swapped * jnp.sin(angles)).astype(x.dtype)


# --- Masks: keys of the same segment, in the window, and for causal attention no later ones ---


def visible_keys(
    segment_ids: Int[Array, "B L"], key_segment_ids: Int[Array, "B S"] | None = None
) -> Bool[Array, "B L S"]:
    """Returns whether each key is a real token in the segment that the query sees."""
    key = (segment_ids if key_segment_ids is None else key_segment_ids)[:, None, :]
    return (key != 0) & (key == own_segment(segment_ids)[:, :, None])


def visible_pairs(query, key, segment_ids, key_segment_ids, causal, window):
    """Returns the mask [B or 1, 1, L, S] of visible keys, or None if all are visible."""
    seen = None
    if segment_ids is not None:
        seen = visible_keys(segment_ids, key_segment_ids)[:, None]
    if causal:
        before = jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
        seen = before if seen is None else seen & before
    if window:
        queries, keys = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
        near = (jnp.abs(queries - keys) <= window)[None, None]
        seen = near if seen is None else seen & near
    return seen


def own_segment(segment_ids):
    """Returns the segment that each position sees; for padding the one with the largest id."""
    if segment_ids is None:
        return None
    return jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)


# --- XLA ---


def xla(query, key, value, segment_ids, key_segment_ids, causal, window, *, drop=None):
    """Computes attention with scores in memory.

    If the mesh splits positions, keys and values are gathered: each device has all of its rows.
    Long rows with a window are computed in blocks.
    """
    arguments = (query, key, value, segment_ids, key_segment_ids)
    if window and drop is None and _fits_blocks(query, key, window):
        return _in_blocks(*arguments, causal, window)
    key, value = partitioning.all_gather_positions(key), partitioning.all_gather_positions(value)
    if drop is not None:
        scores = _scores(query, key)
        visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal, window)
        return _attend_to_kept(scores, value, visible, _draw(drop, scores.shape), drop.factor)
    weights = weights_of(query, key, segment_ids, key_segment_ids, causal, window, value.dtype)
    return einsum("bhqk,bkhd->bqhd", weights, value, value.dtype)


def _fits_blocks(query, key, window: int) -> bool:
    length = query.shape[1]
    # An exported program has a symbolic length.
    known = isinstance(length, int) and key.shape[1] == length
    return known and 4 * window <= length and partitioning.positions_here(length) == length


def _in_blocks(query, key, value, segment_ids, key_segment_ids, causal, window):
    """Computes attention of blocks of `window` queries, which see their own and adjacent blocks."""
    batch, length = query.shape[:2]
    count = -(-length // window)

    def blocks(x):  # [B, N, W, ...]
        return _cut(x, window)

    def adjacent(x):  # [B, N, 2 W or 3 W, ...]
        return _with_neighbors(blocks(x), window, 0 if causal else window)

    keys = adjacent(key)
    scores = jnp.einsum(
        "bnqhd,bnkhd->bnhqk", blocks(query), keys, preferred_element_type=jnp.float32
    )
    away = jnp.arange(keys.shape[2]) - window - jnp.arange(window)[:, None]
    ones = jnp.ones((batch, length), jnp.int32)
    own, theirs = (
        (ones, ones) if segment_ids is None else (own_segment(segment_ids), key_segment_ids)
    )
    theirs = adjacent(theirs)[:, :, None, None, :]  # 0 beyond the row
    seen = (jnp.abs(away) <= window) & ((away <= 0) | (not causal)) & (theirs != 0)
    seen &= theirs == blocks(own)[:, :, None, :, None]
    weights = softmax(scores * query.shape[-1] ** -0.5, seen, value.dtype)
    out = einsum("bnhqk,bnkhd->bnqhd", weights, adjacent(value), value.dtype)
    return out.reshape(batch, count * window, *value.shape[2:])[:, :length]


def _cut(x: Shaped[Array, "B L *rest"], size: int) -> Shaped[Array, "B N {size} *rest"]:
    """Cuts rows into blocks; the last one is filled with zeros."""
    batch, length, *rest = x.shape
    count = -(-length // size)
    pads = [(0, 0), (0, count * size - length), *((0, 0) for _ in rest)]
    return jnp.pad(x, pads).reshape(batch, count, size, *rest)


def _with_neighbors(blocks: Shaped[Array, "B N S *rest"], before: int, after: int):
    """Adds the positions before and after each block, zeros beyond the row.

    Returns:
      [B, N, before + S + after, ...]; both numbers are at most S.
    """
    rest = [(0, 0)] * (blocks.ndim - 2)
    first = jnp.pad(blocks[:, :-1, blocks.shape[2] - before :], [(0, 0), (1, 0), *rest])
    last = jnp.pad(blocks[:, 1:, :after], [(0, 0), (0, 1), *rest])
    return jnp.concatenate([first, blocks, last], axis=2)


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


def weights_of(query, key, segment_ids, key_segment_ids, causal, window, dtype):
    visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal, window)
    return softmax(_scores(query, key), visible, dtype)


def _scores(query, key):
    # jnp.einsum with autodiff: its gradients are float32 products too, and faster on a TPU than
    # those of `products.einsum` (benchmarks/notes/tpu_kernels.md).
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    return scores * query.shape[-1] ** -0.5


# --- Kernels of this package, JAX and cuDNN, on a mesh ---


# Below this length splash is slower than XLA (benchmarks/notes/tpu_kernels.md): each grid step has
# a fixed cost, and a short row takes one step per head.
SPLASH_FROM = 512
# Up to this length splash is slower than pallas_tpu, which does not transpose heads in memory.
SPLASH_BEYOND = 2048
SPLASH_BLOCK = 512  # maximum number of positions per step
WINDOW_BLOCK = 256  # maximum number of queries of pallas_tpu that share their keys with a window
# Up to this length, whole rows with a mask cost less than blocks, which copy keys and values.
WHOLE_ROWS = 1024
LANES = 128  # lengths must be multiples
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def pallas_tpu(
    query, key, value, segment_ids, key_segment_ids, causal, window, *, drop=None, interpret=False
):
    """Runs the kernels of this package. The dropout mask does not depend on the mesh.

    Long rows with a window are cut into blocks of queries, with the keys that they see.
    """
    size, before = _window_block(query, window)
    if window and segment_ids is None:
        segment_ids = key_segment_ids = jnp.ones(query.shape[:2], jnp.int32)

    def cut(x, around):
        # Channels of all heads side by side: XLA would pad heads of 64 to 128 lanes.
        blocks = _cut(x.reshape(*x.shape[:2], -1), size)
        return _with_neighbors(blocks, around, around).reshape(-1, size + 2 * around, *x.shape[2:])

    def run(query, key, value, query_ids, key_ids, seed, *numbers):
        numbers = jnp.concatenate([seed, *(each[:1] for each in numbers)])
        kept = None if drop is None else drop.kept
        rows = query.shape
        if before:
            query, query_ids = (cut(x, 0) for x in (query, query_ids))
            key, value, key_ids = (cut(x, before) for x in (key, value, key_ids))
        out = tpu.attention(
            query, key, value, query_ids, key_ids, numbers,
            causal=causal, window=window, before=before, kept=kept, interpret=interpret,
        )  # fmt: skip
        return out.reshape(*rows[:3], value.shape[3])

    seed = jnp.zeros(2, jnp.int32)
    if drop is not None:
        seed = jax.lax.bitcast_convert_type(jax.random.key_data(drop.key)[:2], jnp.int32)
    seen = own_segment(segment_ids)
    if seen is not None:  # padding keys stay invisible, even in a row of padding only
        key_segment_ids = jnp.where(key_segment_ids == 0, -1, key_segment_ids)
    batch, length, heads, _ = query.shape
    # Global row, head and query numbers; each device gets its part of these constants.
    numbers = (np.arange(size, dtype=np.int32) for size in (batch, heads, length))
    queries, ids, here = _queries_of_a_device(length, causal or window)
    return partitioning.shard_map_op(
        run,
        (query, key, value, seen, key_segment_ids, seed, *numbers),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS, REPLICATED, ROWS, jax.P(HEADS), here),
        queries,
    )


def _window_block(query, window: int) -> tuple[int, int]:
    """Returns the queries of a block of `pallas_tpu`, and the keys on each of its sides."""
    length = query.shape[1]
    if not window or length <= min(WHOLE_ROWS, tpu.longest(query.dtype, query.shape[3])):
        return length, 0
    around = -(-window // (LANES // 2)) * (LANES // 2)  # block and both sides: a multiple of LANES
    sizes = [size for size in range(LANES, length, LANES) if length % size == 0 and size >= around]
    size = max((size for size in sizes if size <= WINDOW_BLOCK), default=min(sizes, default=length))
    return (size, around) if size + 2 * around < length else (length, 0)


def pallas_tpu_check_length(query, key, value, segment_ids, key_segment_ids, causal, window, **_):
    """Returns a short length with the blocks of this call, which short rows do not have."""
    size, before = _window_block(query, window)
    if not before:
        return verification.LENGTH
    return (max(WHOLE_ROWS, size + 2 * before) // size + 1) * size


class KernelDropout(Dropout):
    """Attention dropout with the same mask as `pallas_tpu`."""

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "B H L S"]:
        batch, heads, *positions = shape
        turned = dispatch.platform() == "tpu"  # there `xla` draws [..., keys, queries]
        keys, queries = positions if turned else positions[::-1]
        words = jax.lax.bitcast_convert_type(jax.random.key_data(self.key)[:2], jnp.int32)

        def draw_head(row, head):
            of_head = tpu.head_words(words, row, head)
            return tpu.dropout_mask(of_head, (0, keys), (0, queries), self.kept)

        drawn = jax.vmap(jax.vmap(draw_head, (None, 0)), (0, None))(
            jnp.arange(batch), jnp.arange(heads)
        )
        return drawn if turned else drawn.swapaxes(-1, -2)


def pallas_tpu_definition(*arguments, drop=None):
    """Computes the result of `pallas_tpu` with XLA."""
    if drop is not None:
        drop = KernelDropout(drop.rate, drop.key)
    return xla(*arguments, drop=drop)


def pallas_tpu_refuses(
    query, key, value, segment_ids, key_segment_ids, causal, window, *, drop=None
) -> str:
    if window and (causal or drop is not None or query.shape[1] != key.shape[1]):
        return "has a window only for rows that see themselves, both sides and without dropout"
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"supports bfloat16 and float32, not {query.dtype}"
    if query.shape[3] not in (32, 64, 128):
        return f"supports heads of 32, 64 or 128 channels, not {query.shape[3]}"
    longest = tpu.longest(query.dtype, query.shape[3])
    for array in (query, key):
        size, before = _window_block(array, window)
        if array.shape[1] % LANES or size + 2 * before > longest:
            return f"length {array.shape[1]} is not a multiple of {LANES} up to {longest}"
    return ""


def left_for_length(query, key, value, segment_ids, key_segment_ids, causal, window, *, drop=None):
    length = max(query.shape[1], key.shape[1])
    if drop is not None or window or length <= SPLASH_BEYOND:
        return ""
    return f"slower than splash beyond length {SPLASH_BEYOND} without dropout, length is {length}"


def cudnn(query, key, value, segment_ids, key_segment_ids, causal, window):
    """Runs cuDNN's fused attention; JAX's own rule partitions it over rows and heads."""
    mask = visible_pairs(query, key, segment_ids, key_segment_ids, False, window)
    out = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal, window)


def splash(query, key, value, segment_ids, key_segment_ids, causal, window, *, interpret=False):
    """Runs JAX's splash attention kernel, with one fused kernel for the backward pass.

    Blocks outside of a causal mask or a window are skipped.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    width = query.shape[3]

    def run(query, key, value, segment_ids, key_segment_ids):
        shape = query.shape[1], key.shape[1]
        mask_of_head = (masks.CausalMask if causal else masks.FullMask)(shape)
        if window:
            mask_of_head = masks.LocalMask(shape, (window, 0 if causal else window), offset=0)
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

    queries, ids, _ = _queries_of_a_device(query.shape[1], causal or window)
    out = partitioning.shard_map_op(
        run,
        (query, key, value, own_segment(segment_ids), key_segment_ids),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS),
        queries,
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal, window)


def _queries_of_a_device(length: int, by_position: bool):
    """Returns the specs of queries, query segment ids and query numbers; keys are not split.

    Positions stay whole for a mask `by_position` (causal or a window), which counts from the first
    position of a row, and for lengths that do not divide into blocks.
    """
    if by_position or partitioning.positions_here(length) % LANES:
        return ROWS_AND_HEADS, ROWS, REPLICATED
    return POSITIONS_AND_HEADS, POSITIONS, jax.P(SEQUENCE)


def _silence(out, query, key, segment_ids, key_segment_ids, causal, window):
    """Sets the output of positions without visible keys to 0; the kernels average all values."""
    if key_segment_ids is segment_ids:  # each token sees itself
        return out
    visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal, window)
    return jnp.where(visible.any(axis=-1)[:, 0, :, None, None], out, 0)


def _splash_block(length: int) -> int:
    return next(size for size in range(SPLASH_BLOCK, 0, -LANES) if length % size == 0)


def splash_refuses(query, key, *_, drop=None) -> str:
    if drop is not None:
        return "has no attention dropout"
    for length in (query.shape[1], key.shape[1]):
        if length % LANES:
            return f"length {length} is not a multiple of {LANES}"
    return ""


def left_for_shortness(query, key, *_, **__) -> str:
    length = max(query.shape[1], key.shape[1])
    return f"slower below length {SPLASH_FROM}, length is {length}" if length < SPLASH_FROM else ""


def cudnn_refuses(query, key, value, segment_ids, *_, drop=None) -> str:
    if drop is not None:
        return "has no attention dropout"
    if "rocm" in jax.local_devices()[0].client.platform_version.lower():
        return "requires an NVIDIA GPU"
    if partitioning.positions_here(query.shape[1]) < query.shape[1]:
        return "cannot split positions over config.mesh.sequence"
    if query.dtype not in CUDNN_DTYPES:
        return f"supports bfloat16 and float16, not {query.dtype}"
    lengths = query.shape[1], key.shape[1]
    if segment_ids is not None and any(length % 2 for length in lengths):
        return f"requires even lengths for segments, not {lengths[0]} and {lengths[1]}"
    width = query.shape[3]
    if value.shape[3] != width:
        return f"value width {value.shape[3]} differs from query width {width}"
    return (
        f"head width {width} is not a multiple of 8 up to 128" if width % 8 or width > 128 else ""
    )


# name -> f(query, key, value, segment_ids, key_segment_ids, causal, window); ids: arrays or None
IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(
        pallas_tpu,
        "tpu",
        pallas_tpu_refuses,
        left_for_length,
        pallas_tpu_definition,
        pallas_tpu_check_length,
    ),
    "splash": Implementation(splash, "tpu", splash_refuses, left_for_shortness),
    "cudnn": Implementation(cudnn, "gpu", cudnn_refuses),
    "xla": Implementation(xla),
}
