"""Attention kernels of this package, JAX and cuDNN, on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from convbert_jax.ops import dispatch
from convbert_jax.ops.attention import plain
from convbert_jax.ops.attention.visible import own_segment, visible_pairs
from convbert_jax.ops.dropout import Dropout
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import (
    HEADS,
    POSITIONS,
    POSITIONS_AND_HEADS,
    ROWS,
    ROWS_AND_HEADS,
    SEQUENCE,
    WHOLE,
)  # fmt: skip
from convbert_jax.ops.tpu import attention as tpu
from convbert_jax.ops.tpu.attention import marks

# Below this length splash is slower than XLA (benchmarks/RESULTS.md): each grid step has a fixed
# cost, and a short row takes one step per head.
SPLASH_FROM = 512
# Up to this length splash is slower than pallas_tpu, which does not transpose heads in memory.
SPLASH_BEYOND = 2048
SPLASH_BLOCK = 512  # maximum number of positions per step
LANES = 128  # lengths must be multiples
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def pallas_tpu(
    query, key, value, segment_ids, key_segment_ids, causal, *, drop=None, interpret=False
):
    """Runs the kernels of this package. The dropout mask does not depend on the mesh."""

    def run(query, key, value, query_ids, key_ids, seed, *numbers):
        numbers = jnp.concatenate([seed, *(each[:1] for each in numbers)])
        kept = None if drop is None else drop.kept
        return tpu.attention(
            query, key, value, query_ids, key_ids, numbers,
            causal=causal, kept=kept, interpret=interpret,
        )  # fmt: skip

    seed = jnp.zeros(2, jnp.int32)
    if drop is not None:
        seed = jax.lax.bitcast_convert_type(jax.random.key_data(drop.key)[:2], jnp.int32)
    seen = own_segment(segment_ids)
    if seen is not None:  # padding keys stay invisible, even in a row of padding only
        key_segment_ids = jnp.where(key_segment_ids == 0, -1, key_segment_ids)
    batch, length, heads, _ = query.shape
    # Global row, head and query numbers; each device gets its part of these constants.
    numbers = (np.arange(size, dtype=np.int32) for size in (batch, heads, length))
    queries, ids, here = _queries_of_a_device(length, causal)
    return division.over_mesh(
        run,
        (query, key, value, seen, key_segment_ids, seed, *numbers),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS, WHOLE, ROWS, jax.P(HEADS), here),
        queries,
    )


class KernelDropout(Dropout):
    """Attention dropout with the same mask as `pallas_tpu`."""

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "B H L S"]:
        batch, heads, *positions = shape
        turned = dispatch.platform() == "tpu"  # there `plain.xla` draws [..., keys, queries]
        keys, queries = positions if turned else positions[::-1]
        words = jax.lax.bitcast_convert_type(jax.random.key_data(self.key)[:2], jnp.int32)

        def draw_head(row, head):
            of_head = marks.of_head(words, row, head)
            return marks.kept(of_head, (0, keys), (0, queries), self.kept)

        drawn = jax.vmap(jax.vmap(draw_head, (None, 0)), (0, None))(
            jnp.arange(batch), jnp.arange(heads)
        )
        return drawn if turned else drawn.swapaxes(-1, -2)


def pallas_tpu_definition(*arguments, drop=None):
    """Computes the result of `pallas_tpu` with XLA."""
    if drop is not None:
        drop = KernelDropout(drop.rate, drop.key)
    return plain.xla(*arguments, drop=drop)


def pallas_tpu_refuses(query, key, *_, **__) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"supports bfloat16 and float32, not {query.dtype}"
    if query.shape[3] not in (32, 64, 128):
        return f"supports heads of 32, 64 or 128 channels, not {query.shape[3]}"
    longest = tpu.longest(query.dtype, query.shape[3])
    for length in (query.shape[1], key.shape[1]):
        if length % LANES or length > longest:
            return f"length {length} is not a multiple of {LANES} up to {longest}"
    return ""


def left_for_length(query, key, *_, drop=None) -> str:
    length = max(query.shape[1], key.shape[1])
    if drop is not None or length <= SPLASH_BEYOND:
        return ""
    return f"slower than splash beyond length {SPLASH_BEYOND} without dropout, length is {length}"


def cudnn(query, key, value, segment_ids, key_segment_ids, causal):
    """Runs cuDNN's fused attention; JAX's own rule partitions it over rows and heads."""
    mask = visible_pairs(query, key, segment_ids, key_segment_ids, causal=False)
    out = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal)


def splash(query, key, value, segment_ids, key_segment_ids, causal, *, interpret=False):
    """Runs JAX's splash attention kernel, with one fused kernel for the backward pass."""
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

    queries, ids, _ = _queries_of_a_device(query.shape[1], causal)
    out = division.over_mesh(
        run,
        (query, key, value, own_segment(segment_ids), key_segment_ids),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS),
        queries,
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal)


def _queries_of_a_device(length: int, causal: bool):
    """Returns the specs of queries, query segment ids and query numbers; keys are not split.

    Positions stay whole for a causal mask, which counts from the first position of a row, and for
    lengths that do not divide into blocks.
    """
    if causal or division.positions_here(length) % LANES:
        return ROWS_AND_HEADS, ROWS, WHOLE
    return POSITIONS_AND_HEADS, POSITIONS, jax.P(SEQUENCE)


def _silence(out, query, key, segment_ids, key_segment_ids, causal):
    """Sets the output of positions without visible keys to 0; the kernels average all values."""
    if key_segment_ids is segment_ids:  # each token sees itself
        return out
    visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal)
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
    if division.positions_here(query.shape[1]) < query.shape[1]:
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
