"""The backward pass: gradients of query, key and value in one kernel, from scores made again."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.attention.blocks import (
    F32,
    HIDDEN,
    I32,
    LANES,
    Blocks,
    Settings,
    dot,
    only,
    turn,
    turn_ids,
)  # fmt: skip
from convbert_jax.ops.tpu.attention.forward import LOG2_E, first_of_step, for_blocks, kept


def backward(settings: Settings, numbers, ids, query, key, value, out, sums, cotangent):
    """Gradients of query, key and value; `out` and `sums` are of `forward`, the rest as there."""
    blocks = Blocks(settings, query, key, arrays=8)
    arrays = [query, key, value, out, cotangent]
    turned = blocks.together * blocks.tiles, blocks.lanes, blocks.queries
    scratch = [pltpu.VMEM(turned, F32)]
    if ids:
        scratch.append(pltpu.VMEM((blocks.together, blocks.keys, LANES), I32))
    return blocks.call(
        functools.partial(_kernel, blocks, bool(ids)), numbers, ids, [*arrays, sums],
        [*(blocks.row_block(x) for x in arrays), blocks.sums_block()],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)],
        [blocks.row_block(x) for x in (query, key, value)],
        scratch,
    )  # fmt: skip


def _kernel(blocks, with_ids, numbers, *references):
    references = list(references)
    query_ids, key_ids = (references.pop(0), references.pop(0)) if with_ids else (None, None)
    query, key, value, out, cotangent, sums = references[:6]
    d_query, d_key, d_value, d_query_turned, *columns = references[6:]
    settings, dtype = blocks.settings, query.dtype
    size = blocks.at_once(blocks.keys, blocks.queries)
    units = blocks.units()
    step_row, step_head = first_of_step(blocks, numbers)

    @pl.loop(0, blocks.rows // blocks.together)
    def _(index):
        first_row = index * blocks.together
        first = step_row + first_row, step_head
        for row in range(blocks.together if with_ids else 0):
            turn_ids(key_ids[first_row + row], columns[0].at[row])

        def tile(array, row, number, positions=slice(None)):
            return array[first_row + row, positions, blocks.lanes_of(number)]

        def place(row, number, head):
            """Where the gradient of a head's queries is, turned over."""
            first = head * settings.width
            return row * blocks.tiles + number, pl.ds(first, settings.width)

        products = {
            (r, t): turn(tile(out, r, t).astype(F32) * tile(cotangent, r, t).astype(F32))
            for r in range(blocks.together)
            for t in range(blocks.tiles)
        }
        along = [
            jnp.sum(blocks.of_head(products[r, t], h), axis=0, keepdims=True) for r, t, h in units
        ]
        if size < blocks.keys:
            d_query_turned[...] = jnp.zeros(d_query_turned.shape, F32)

        def some_keys(start):
            here = pl.ds(start, size)
            seen = [
                blocks.visible(
                    columns[0][row, here] if with_ids else None,
                    query_ids[first_row + row] if with_ids else None,
                    (start, size), (0, blocks.queries),
                )
                for row in range(blocks.together)
            ]  # fmt: skip
            keys = [blocks.only_head(tile(key, r, t, here), h) for r, t, h in units]
            values = [blocks.only_head(tile(value, r, t, here), h) for r, t, h in units]
            scores = [
                dot(x, tile(query, r, t), (1, 1)) for x, (r, t, _) in zip(keys, units, strict=True)
            ]
            d_weights = [
                dot(x, tile(cotangent, r, t), (1, 1)) * settings.factor
                for x, (r, t, _) in zip(values, units, strict=True)
            ]
            scores = [
                x if seen[r] is None else jnp.where(seen[r], x, HIDDEN)
                for x, (r, _, _) in zip(scores, units, strict=True)
            ]
            weights = [
                jnp.exp2(x * (settings.scale * LOG2_E) - sums[first_row + r, t, h : h + 1])
                for x, (r, t, h) in zip(scores, units, strict=True)
            ]
            marked = [
                kept(blocks, numbers, first, unit, (start, size), (0, blocks.queries))
                for unit in units
            ]
            d_scores = [
                (weight * (only(mark, d_weight) - total)).astype(dtype)
                for weight, mark, d_weight, total in zip(
                    weights, marked, d_weights, along, strict=True
                )
            ]
            dropped = [
                only(mark, weight).astype(dtype)
                for mark, weight in zip(marked, weights, strict=True)
            ]
            for n_first in range(0, len(units), blocks.tile_heads):
                r, t, _ = units[n_first]
                total_key = total_value = 0.0
                for n in range(n_first, n_first + blocks.tile_heads):
                    head = units[n][2]
                    own = blocks.only_head(tile(query, r, t), head)
                    total_key = total_key + dot(d_scores[n], own, (1, 0))
                    own = blocks.only_head(tile(cotangent, r, t), head)
                    total_value = total_value + dot(dropped[n], own, (1, 0))
                lanes = blocks.lanes_of(t)
                d_key[first_row + r, here, lanes] = (total_key * settings.scale).astype(dtype)
                d_value[first_row + r, here, lanes] = (total_value * settings.factor).astype(dtype)
            for x, (r, t, h) in zip(d_scores, units, strict=True):
                turned = blocks.of_head(turn(tile(key, r, t, here)), h).astype(dtype)
                part = dot(turned, x, (1, 0))
                if size < blocks.keys:
                    d_query_turned[place(r, t, h)] += part
                else:
                    d_query_turned[place(r, t, h)] = part

        for_blocks(blocks.keys, size, some_keys)
        for r in range(blocks.together):
            for t in range(blocks.tiles):
                total = d_query_turned[r * blocks.tiles + t] * settings.scale
                d_query[first_row + r, :, blocks.lanes_of(t)] = total.T.astype(dtype)
