"""Attention over whole rows as Mosaic kernels for TPU, with its gradient."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops.tpu.attention.backward import backward
from convbert_jax.ops.tpu.attention.blocks import Settings
from convbert_jax.ops.tpu.attention.forward import forward
from convbert_jax.ops.tpu.bands import LANES


def attention(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    value: Float[Array, "B S H D"],
    query_ids: Int[Array, "B L"] | None,
    key_ids: Int[Array, "B S"] | None,
    numbers: Int[Array, " 5"],
    *,
    causal: bool,
    kept: int | None,
    interpret: bool = False,
) -> Float[Array, "B L H D"]:
    """Computes softmax(query . key / sqrt(D)) . value; kept weights are scaled by 256 / `kept`.

    Args:
      query, key, value: inputs.
      query_ids, key_ids: a query sees the keys with the same id; None: all.
      numbers: two seed words of dropout, and the global numbers of the first row, head and query,
        for the masks of marks.py.
      causal: a position sees only keys up to itself.
      kept: expected number of kept weights out of 256; None: no dropout.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, L, H, D]; 0 where a query sees no key.
    """
    heads, width = query.shape[2:]
    settings = Settings(width, causal, kept, interpret)
    # Pad to a multiple of 128 channels with heads of zeros, removed from the result.
    added = -heads % (LANES // width) if heads * width > LANES else 0

    def channels(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, added), (0, 0))).reshape(*x.shape[:2], -1)

    ids = () if query_ids is None else (query_ids[:, None], key_ids[:, None])
    out = _attention(settings, numbers, ids, *map(channels, (query, key, value)))
    return out.reshape(*query.shape[:2], heads + added, width)[:, :, :heads]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, numbers, ids, query, key, value):
    return forward(settings, numbers, ids, query, key, value)[0]


def _forward(settings, numbers, ids, query, key, value):
    out, sums = forward(settings, numbers, ids, query, key, value)
    return out, (numbers, ids, query, key, value, out, sums)


def _backward(settings, saved, cotangent):
    numbers, ids, *arrays = saved
    return None, None, *backward(settings, numbers, ids, *arrays, cotangent)


_attention.defvjp(_forward, _backward)
