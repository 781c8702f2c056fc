"""The forward pass: scores of whole rows near the core, never in memory."""

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
    """The output [B, L, C], and for each query the logarithm to base 2 of what its powers of
    2 (scores times log2(e)) add up to, [B, tiles, heads, L]; `numbers` and `ids` as of `step.call`.
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
        # Each line for all heads before the next one: so the compiler finds, between the
        # instructions of a head, those of others.
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
        # Where nothing is seen each power is 0.
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
