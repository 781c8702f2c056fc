"""The forward pass: scores of whole rows near the core, never in memory."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu.attention import marks
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

LOG2_E = math.log2(math.e)
_TINY = float(jnp.finfo(F32).tiny)


def forward(settings: Settings, numbers, ids, query, key, value):
    """The output [B, L, C], and for each query the logarithm to base 2 of what its powers of
    2 (scores times log2(e)) add up to, [B, tiles, heads, L].

    Args:
      numbers: int32: two words of dropout; the first row, head and query of this device.
      ids: segments of queries and keys, [B, 1, positions], or none.
    """
    blocks = Blocks(settings, query, key, arrays=4)
    return blocks.call(
        functools.partial(_kernel, blocks, bool(ids)), numbers, ids, [query, key, value],
        [blocks.row_block(x) for x in (query, key, value)],
        [
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(blocks.sums_shape, F32),
        ],
        [blocks.row_block(query), blocks.sums_block()],
        [pltpu.VMEM((blocks.together, blocks.keys, LANES), I32)] if ids else [],
    )  # fmt: skip


def _kernel(blocks, with_ids, numbers, *references):
    references = list(references)
    query_ids, key_ids = (references.pop(0), references.pop(0)) if with_ids else (None, None)
    query, key, value, out, sums, *columns = references
    settings = blocks.settings
    size = blocks.at_once(blocks.queries, blocks.keys)
    scale = settings.scale * LOG2_E
    units = blocks.units()
    step_row, step_head = first_of_step(blocks, numbers)

    @pl.loop(0, blocks.rows // blocks.together)
    def _(index):
        first_row = index * blocks.together
        first = step_row + first_row, step_head
        for row in range(blocks.together if with_ids else 0):
            turn_ids(key_ids[first_row + row], columns[0].at[row])

        def some_queries(start):
            def tile(array, row, number, positions=slice(None)):
                return array[first_row + row, positions, blocks.lanes_of(number)]

            # Each step for all heads before the next one: so the compiler finds, between the
            # instructions of a head, those of others.
            here = pl.ds(start, size)
            seen = [
                blocks.visible(
                    columns[0][row] if with_ids else None,
                    query_ids[first_row + row, :, here] if with_ids else None,
                    (0, blocks.keys), (start, size),
                )
                for row in range(blocks.together)
            ]  # fmt: skip
            scores = [
                dot(tile(key, r, t), blocks.only_head(tile(query, r, t, here), h), (1, 1))
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
                sums[first_row + r, t, h : h + 1, here] = most * scale + jnp.log2(total)
            powers = [
                only(kept(blocks, numbers, first, unit, (0, blocks.keys), (start, size)), x)
                for x, unit in zip(powers, units, strict=True)
            ]
            outs = [
                dot(
                    blocks.of_head(turn(tile(value, r, t)), h).astype(value.dtype),
                    x.astype(value.dtype),
                    (1, 0),
                )
                * (settings.factor / total)
                for x, total, (r, t, h) in zip(powers, totals, units, strict=True)
            ]
            for n in range(0, len(units), blocks.tile_heads):
                r, t, _ = units[n]
                heads = jnp.concatenate(outs[n : n + blocks.tile_heads], axis=0)
                out[first_row + r, here, blocks.lanes_of(t)] = heads.T.astype(out.dtype)

        for_blocks(blocks.queries, size, some_queries)


def first_of_step(blocks, numbers):
    """Numbers of the first row and head of this step; outside of loops, where the interpreter knows
    the step.
    """
    row = numbers[0, 2] + pl.program_id(0) * blocks.rows
    return row, numbers[0, 3] + pl.program_id(1) * blocks.tiles * blocks.tile_heads


def kept(blocks, numbers, first, unit, keys, queries):
    """Which weights of a head dropout keeps, or None: all.

    Args:
      first: numbers of the row and head from which `unit` counts.
    """
    if blocks.settings.kept is None:
        return None
    row, tile, head = unit
    head = tile * blocks.tile_heads + head
    words = marks.of_head((numbers[0, 0], numbers[0, 1]), first[0] + row, first[1] + head)
    queries = numbers[0, 4] + queries[0], queries[1]
    return marks.kept(words, keys, queries, blocks.settings.kept)


def for_blocks(positions: int, size: int, function) -> None:
    """function(first position) for each block."""
    if positions == size:
        function(0)
        return

    @pl.loop(0, positions // size)
    def _(block):
        function(pl.multiple_of(block * size, LANES))
