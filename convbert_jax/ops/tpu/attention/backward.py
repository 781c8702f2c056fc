"""The backward pass: one kernel recomputes the scores and returns all three gradients."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.attention.blocks import HIDDEN, Blocks, Settings
from convbert_jax.ops.tpu.attention.factors import F32, dot, only, turn
from convbert_jax.ops.tpu.attention.forward import LOG2_E
from convbert_jax.ops.tpu.attention.step import call, for_blocks


def backward(settings: Settings, numbers, ids, query, key, value, out, sums, cotangent):
    """Returns the gradients of query, key and value.

    Args:
      out, sums: results of `forward`.
      cotangent: gradient of `out`, [B, L, C].
      settings, numbers, ids, query, key, value: as in `forward`.
    """
    blocks = Blocks(settings, query, key, arrays=8)
    arrays = [query, key, value, out, cotangent]
    turned = blocks.together * blocks.tiles, blocks.lanes, blocks.queries
    return call(
        functools.partial(_kernel, blocks), blocks, numbers, ids, [*arrays, sums],
        [*(blocks.row_block(x) for x in arrays), blocks.sums_block()],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)],
        [blocks.row_block(x) for x in (query, key, value)],
        scratch=[pltpu.VMEM(turned, F32)],
    )  # fmt: skip


def _kernel(
    blocks, step, query, key, value, out, cotangent, sums, d_query, d_key, d_value, turned
):  # fmt: skip
    """Processes a step; `turned` [rows x tiles, lanes, queries] accumulates query gradients."""
    settings, dtype = blocks.settings, query.dtype
    size = blocks.at_once(blocks.keys, blocks.queries)
    units = blocks.units()
    queries = 0, blocks.queries

    def some_keys(along, start):
        keys = start, size
        here = pl.ds(*keys)
        seen = step.visible(keys, queries)
        own_keys = [blocks.only_head(step.tile(key, r, t, here), h) for r, t, h in units]
        values = [blocks.only_head(step.tile(value, r, t, here), h) for r, t, h in units]
        scores = [
            dot(x, step.tile(query, r, t), (1, 1))
            for x, (r, t, _) in zip(own_keys, units, strict=True)
        ]
        d_weights = [
            dot(x, step.tile(cotangent, r, t), (1, 1)) * settings.factor
            for x, (r, t, _) in zip(values, units, strict=True)
        ]
        scores = [
            x if seen[r] is None else jnp.where(seen[r], x, HIDDEN)
            for x, (r, _, _) in zip(scores, units, strict=True)
        ]
        weights = [
            jnp.exp2(x * (settings.scale * LOG2_E) - sums[step.first + r, t, h : h + 1])
            for x, (r, t, h) in zip(scores, units, strict=True)
        ]
        kept = [step.kept(unit, keys, queries) for unit in units]
        d_scores = [
            (weight * (only(mark, d_weight) - total)).astype(dtype)
            for weight, mark, d_weight, total in zip(weights, kept, d_weights, along, strict=True)
        ]
        dropped = [
            only(mark, weight).astype(dtype) for mark, weight in zip(kept, weights, strict=True)
        ]
        for first in range(0, len(units), blocks.tile_heads):
            r, t, _ = units[first]
            total_key = total_value = 0.0
            for n in range(first, first + blocks.tile_heads):
                head = units[n][2]
                own = blocks.only_head(step.tile(query, r, t), head)
                total_key = total_key + dot(d_scores[n], own, (1, 0))
                own = blocks.only_head(step.tile(cotangent, r, t), head)
                total_value = total_value + dot(dropped[n], own, (1, 0))
            place = step.first + r, here, blocks.lanes_of(t)
            d_key[place] = (total_key * settings.scale).astype(dtype)
            d_value[place] = (total_value * settings.factor).astype(dtype)
        for x, (r, t, h) in zip(d_scores, units, strict=True):
            keys_turned = blocks.of_head(turn(step.tile(key, r, t, here)), h).astype(dtype)
            part = dot(keys_turned, x, (1, 0))
            place = r * blocks.tiles + t, pl.ds(h * settings.width, settings.width)
            if size < blocks.keys:
                turned[place] += part
            else:
                turned[place] = part

    def some_rows():
        tiles = sorted({(r, t) for r, t, _ in units})
        products = {
            (r, t): turn(step.tile(out, r, t).astype(F32) * step.tile(cotangent, r, t).astype(F32))
            for r, t in tiles
        }
        # Softmax gradient: the weighted mean of the weights' gradients, from out . cotangent.
        along = [
            jnp.sum(blocks.of_head(products[r, t], h), axis=0, keepdims=True) for r, t, h in units
        ]
        if size < blocks.keys:
            turned[...] = jnp.zeros(turned.shape, F32)
        for_blocks(blocks.keys, size, functools.partial(some_keys, along))
        for r, t in tiles:
            total = turned[r * blocks.tiles + t] * settings.scale
            d_query[step.first + r, :, blocks.lanes_of(t)] = total.T.astype(dtype)

    step.for_rows(some_rows)
