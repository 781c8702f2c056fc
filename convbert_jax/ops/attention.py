"""Scaled dot-product self-attention within the segments of a row, by the best form per platform.

xla: scores and weights in memory, what every platform can do; the only one with attention dropout.
cudnn: cuDNN's fused attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`.
splash: JAX's blockwise attention kernel for TPU; scores never leave the core.
"""

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops import dispatch
from convbert_jax.ops.products import einsum
from convbert_jax.ops.softmax import softmax

log = logging.getLogger(__name__)

Implementation = Literal["auto", "xla", "cudnn", "splash"]

# Below this length splash costs more than XLA's form, by the TPU compiler's model
# (benchmarks/RESULTS.md): a grid step has a fixed price, and a short row is a step for each head.
SPLASH_FROM = 512
SPLASH_BLOCK = 512  # most positions of a step
LANES = 128  # splash works on multiples of this many positions
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def attention(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L H D"],
    value: Float[Array, "B L H D"],
    segment_ids: Int[Array, "B L"],
    *,
    implementation: Implementation = "auto",
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "B L H D"]:
    """softmax(query . key / sqrt(D)) . value over the keys that a position may see.

    Args:
      segment_ids: a position sees its own segment. Padding (0) is seen by nothing and sees the
        segment with the largest id: in a row of one segment that is all real tokens, as in the
        release. What a row of nothing but padding gives out is finite and means nothing.
      implementation: a key of IMPLEMENTATIONS, which never gives way to another; or "auto": the
        fastest that the platform and the arguments allow, "xla" if nothing else, said once in the
        log.
      drop: dropout of the weights; only "xla" has it.

    Returns:
      [B, L, H, D] in the dtype of `value`; scores and softmax are float32.

    Raises:
      ValueError: a named implementation that cannot do what is asked, or not on the devices at
        hand; the message says why.
    """
    name = _choose(query, implementation, drop is not None)
    if name == "xla":
        return xla(query, key, value, segment_ids, drop=drop)
    return IMPLEMENTATIONS[name](query, key, value, segment_ids)


def _choose(query, implementation: str, dropping: bool) -> str:
    if implementation not in ("auto", *IMPLEMENTATIONS):
        names = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(
            f"attention: implementation is {implementation!r}, but must be one of {names}."
        )
    if implementation == "auto":
        name = AUTO.get(dispatch.platform())
        reason = ""
        if name:
            reason = _refusal(name, query, dropping)
            if not reason and name == "splash" and query.shape[1] < SPLASH_FROM:
                reason = f"it pays from length {SPLASH_FROM} on, this is {query.shape[1]}"
        chosen = "xla" if reason or not name else name
        _say(chosen, f"not {name}: {reason}" if reason else "")
        return chosen
    if reason := implementation != "xla" and _refusal(implementation, query, dropping):
        raise ValueError(f"attention: implementation is {implementation!r}, but {reason}.")
    return implementation


@functools.cache
def _say(chosen: str, reason: str) -> None:
    log.info("Attention: auto takes %s%s.", chosen, f"; {reason}" if reason else "")


def _refusal(name: str, query, dropping: bool) -> str:
    """Why a kernel cannot do it, "" if it can."""
    needed, here = PLATFORMS[name], dispatch.platform()
    if needed != here:
        return f"it needs a {needed}, this program is for {here}"
    if dropping:
        return "it has no attention dropout"
    length, width = query.shape[1], query.shape[3]
    if name == "splash":
        return f"the length {length} is no multiple of {LANES}" if length % LANES else ""
    if "rocm" in jax.local_devices()[0].client.platform_version.lower():
        return "cuDNN is for NVIDIA's GPUs"
    if query.dtype not in CUDNN_DTYPES:
        return f"it computes in bfloat16 and float16, not {query.dtype}"
    return (
        f"the head width {width} is no multiple of 8 up to 128" if width % 8 or width > 128 else ""
    )


def xla(query, key, value, segment_ids, *, drop=None):
    """Scores in memory, in the order heads, queries, keys."""
    # By autodiff: its gradients are float32 products too, and 6% of a layer of length 512 on a TPU
    # cheaper than those of `products.einsum` (benchmarks/RESULTS.md).
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores *= query.shape[-1] ** -0.5
    weights = softmax(scores, visible_keys(segment_ids)[:, None], value.dtype)
    if drop is not None:
        weights = drop(weights)
    return einsum("bhqk,bkhd->bqhd", weights, value, value.dtype)


def cudnn(query, key, value, segment_ids):
    """By cuDNN; partitioned over rows and heads by its own rule."""
    mask = visible_keys(segment_ids)[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


def splash(query, key, value, segment_ids, *, interpret=False):
    """By JAX's splash attention kernel, forward and one fused kernel backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, width = query.shape[1], query.shape[3]
    block = next(size for size in range(SPLASH_BLOCK, 0, -LANES) if length % size == 0)
    blocks = {
        f"block_{name}": block
        for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    }

    def run(query, key, value, segment_ids):
        mask = masks.MultiHeadMask([masks.FullMask((length, length))] * query.shape[2])
        kernel = kernels.make_splash_mha(
            mask,
            block_sizes=kernels.BlockSizes(**blocks, use_fused_bwd_kernel=True),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        heads_first = (x.swapaxes(1, 2) for x in (query * width**-0.5, key, value))
        ids = kernels.SegmentIds(_own_segment(segment_ids), segment_ids)
        return jax.vmap(kernel)(*heads_first, segment_ids=ids).swapaxes(1, 2)

    return dispatch.over_mesh(run, (query, key, value, segment_ids), (2, 2, 2, None))


# name -> f(query, key, value, segment_ids)
IMPLEMENTATIONS = {"xla": xla, "cudnn": cudnn, "splash": splash}
# Where the kernels run, in the words of `dispatch.platform`, and what "auto" takes there if it can.
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
AUTO = {platform: name for name, platform in PLATFORMS.items()}


def visible_keys(segment_ids: Int[Array, "B L"]) -> Bool[Array, "B L L"]:
    """[query, key]: real tokens of the segment that the query sees."""
    key = segment_ids[:, None, :]
    return (key != 0) & (key == _own_segment(segment_ids)[:, :, None])


def _own_segment(segment_ids):
    """The segment each position sees; for padding the one with the largest id."""
    return jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
