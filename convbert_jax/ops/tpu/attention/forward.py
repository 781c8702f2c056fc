"""The forward pass: scores of whole rows stay on chip."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops.tpu.attention.blocks import HIDDEN, Blocks, Settings
from convbert_jax.ops.tpu.attention.factors import F32, dot, only, turn
from convbert_jax.ops.tpu.attention.step import call, for_blocks

LOG2_E = math.log2(math.e)
_TINY = float(jnp.finfo(F32).tiny)


def forward(settings: Settings, numbers, ids, query, key, value):
    """Returns the output [B, L, C] and the log-sums [B, tiles, heads, L].

    The log-sum of a query is log2(sum over keys of 2^(score * log2(e))).

    Args:
      numbers, ids: as in `step.call`.
      query, key, value: [B, L, C], [B, S, C] and [B, S, C].
    """
    blocks = Blocks(settings, query, key, arrays=4)
    sums = jax.ShapeDtypeStruct(blocks.sums_shape, F32)
    return call(
        functools.partial(_kernel, blocks), blocks, numbers, ids, [query, key, value],
        [blocks.row_block(x) for x in (query, key, value)],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), sums],
        [blocks.row_block(query), blocks.sums_block()],
    )  # fmt: skip


def _kernel(blocks, step, query, key, value, out, sums):
    size = blocks.at_once(blocks.queries, blocks.keys)
    scale = blocks.settings.scale * LOG2_E
    units = blocks.units()
    keys = 0, blocks.keys

    def some_queries(start):
        # Each statement covers all heads, so that the compiler can interleave their instructions.
        queries = start, size
        here = pl.ds(*queries)
        seen = step.visible(keys, queries)
        scores = [
            dot(step.tile(key, r, t), blocks.only_head(step.tile(query, r, t, here), h), (1, 1))
            for r, t, h in units
        ]
        scores = [
            x if seen[r] is None else jnp.where(seen[r], x, HIDDEN)
            for x, (r, _, _) in zip(scores, units, strict=True)
        ]
        # If a query sees no key, each power is 0.
        largest = [jnp.maximum(jnp.max(x, axis=0, keepdims=True), 0.5 * HIDDEN) for x in scores]
        powers = [jnp.exp2((x - most) * scale) for x, most in zip(scores, largest, strict=True)]
        totals = [jnp.maximum(jnp.sum(x, axis=0, keepdims=True), _TINY) for x in powers]
        for (r, t, h), most, total in zip(units, largest, totals, strict=True):
            sums[step.first + r, t, h : h + 1, here] = most * scale + jnp.log2(total)
        powers = [
            only(step.kept(unit, keys, queries), x) for x, unit in zip(powers, units, strict=True)
        ]
        values = [
            blocks.of_head(turn(step.tile(value, r, t)), h).astype(value.dtype) for r, t, h in units
        ]
        outs = [
            dot(y, x.astype(value.dtype), (1, 0)) * (blocks.settings.factor / total)
            for x, y, total in zip(powers, values, totals, strict=True)
        ]
        for n in range(0, len(units), blocks.tile_heads):
            r, t, _ = units[n]
            heads = jnp.concatenate(outs[n : n + blocks.tile_heads], axis=0)
            out[step.first + r, here, blocks.lanes_of(t)] = heads.T.astype(out.dtype)

    step.for_rows(lambda: for_blocks(blocks.queries, size, some_queries))
