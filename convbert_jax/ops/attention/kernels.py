"""Attention by kernels, those of `ops/tpu/attention/` and of others, on a mesh."""

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

# Below this length splash costs more than XLA's form, by the TPU compiler's model
# (benchmarks/RESULTS.md): a grid step has a fixed price, and a short row is a step for each head.
SPLASH_FROM = 512
# Up to this one it costs more than ours, for which heads need not be put apart in memory.
SPLASH_BEYOND = 2048
SPLASH_BLOCK = 512  # most positions of a step
LANES = 128  # splash works on multiples of this many positions
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def pallas_tpu(
    query, key, value, segment_ids, key_segment_ids, causal, *, drop=None, interpret=False
):
    """By the kernels of this package, dropout included: what is dropped is the same on any mesh."""

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
    if seen is not None:  # nobody sees padding, not even where there is nothing else
        key_segment_ids = jnp.where(key_segment_ids == 0, -1, key_segment_ids)
    batch, length, heads, _ = query.shape
    # Constants, which the compiler slices.
    numbers = (np.arange(size, dtype=np.int32) for size in (batch, heads, length))
    queries, ids, here = _queries_of_a_device(length, causal)
    return division.over_mesh(
        run,
        (query, key, value, seen, key_segment_ids, seed, *numbers),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS, WHOLE, ROWS, jax.P(HEADS), here),
        queries,
    )


class KernelDropout(Dropout):
    """Dropout of attention weights that keeps the weights that `pallas_tpu` keeps."""

    def draw(self, shape: tuple[int, ...]) -> Bool[Array, "B H L S"]:
        batch, heads, *positions = shape
        turned = dispatch.platform() == "tpu"  # there the XLA form asks for keys, queries
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
    """What `pallas_tpu` computes, by XLA."""
    if drop is not None:
        drop = KernelDropout(drop.rate, drop.key)
    return plain.xla(*arguments, drop=drop)


def pallas_tpu_refuses(query, key, *_, **__) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it computes in bfloat16 and float32, not {query.dtype}"
    if query.shape[3] not in (32, 64, 128):
        return f"its heads have 32, 64 or 128 channels, not {query.shape[3]}"
    longest = tpu.longest(query.dtype, query.shape[3])
    for length in (query.shape[1], key.shape[1]):
        if length % LANES or length > longest:
            return f"the length {length} is no multiple of {LANES} up to {longest}"
    return ""


def left_for_length(query, key, *_, drop=None) -> str:
    length = max(query.shape[1], key.shape[1])
    if drop is not None or length <= SPLASH_BEYOND:
        return ""
    return f"without dropout splash costs less beyond length {SPLASH_BEYOND}, this is {length}"


def cudnn(query, key, value, segment_ids, key_segment_ids, causal):
    """By cuDNN; partitioned over rows and heads by its own rule."""
    mask = visible_pairs(query, key, segment_ids, key_segment_ids, causal=False)
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

    queries, ids, _ = _queries_of_a_device(query.shape[1], causal)
    out = division.over_mesh(
        run,
        (query, key, value, own_segment(segment_ids), key_segment_ids),
        (queries, ROWS_AND_HEADS, ROWS_AND_HEADS, ids, ROWS),
        queries,
    )
    return _silence(out, query, key, segment_ids, key_segment_ids, causal)


def _queries_of_a_device(length: int, causal: bool):
    """How a mesh splits queries, ids of theirs and their numbers; each device has all keys.

    A causal mask counts from the first position of a row, and what no block divides cannot be
    split: there each has the whole.
    """
    if causal or division.positions_here(length) % LANES:
        return ROWS_AND_HEADS, ROWS, WHOLE
    return POSITIONS_AND_HEADS, POSITIONS, jax.P(SEQUENCE)


def _silence(out, query, key, segment_ids, key_segment_ids, causal):
    """0 where a position sees no key: the kernels give the mean of values it must not see."""
    if key_segment_ids is segment_ids:  # each token sees at least itself
        return out
    visible = visible_pairs(query, key, segment_ids, key_segment_ids, causal)
    return jnp.where(visible.any(axis=-1)[:, 0, :, None, None], out, 0)


def _splash_block(length: int) -> int:
    return next(size for size in range(SPLASH_BLOCK, 0, -LANES) if length % size == 0)


def splash_refuses(query, key, *_, drop=None) -> str:
    if drop is not None:
        return "it has no attention dropout"
    for length in (query.shape[1], key.shape[1]):
        if length % LANES:
            return f"the length {length} is no multiple of {LANES}"
    return ""


def left_for_shortness(query, key, *_, **__) -> str:
    length = max(query.shape[1], key.shape[1])
    return f"it pays from length {SPLASH_FROM} on, this is {length}" if length < SPLASH_FROM else ""


def cudnn_refuses(query, key, value, segment_ids, *_, drop=None) -> str:
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
