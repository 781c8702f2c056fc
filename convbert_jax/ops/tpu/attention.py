"""Attention over whole rows as Mosaic kernels for TPU, with dropout of the weights.

Heads lie side by side in the lanes of a *tile* of 128 channels. Products take a whole tile in which
the other heads are 0: the matrix unit sums over 128 channels at the cost of one head. Scores have
keys along sublanes and queries along lanes. Statistics of a query (maximum score, sum) are then a
row, and no product needs transposed scores.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops.tpu import layout
from convbert_jax.ops.tpu.layout import F32, I32, LANES, dot, masked_bitwise

LOG2_E = math.log2(math.e)
_TINY = float(jnp.finfo(F32).tiny)


def attention(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B S H D"],
    value: Float[Array, "B S H D"],
    query_ids: Int[Array, "B L"] | None,
    key_ids: Int[Array, "B S"] | None,
    numbers: Int[Array, " 5"],
    *,
    causal: bool,
    window: int,
    before: int,
    kept: int | None,
    interpret: bool = False,
) -> Float[Array, "B L H D"]:
    """Computes softmax(query . key / sqrt(D)) . value; kept weights are scaled by 256 / `kept`.

    Args:
      query, key, value: inputs.
      query_ids, key_ids: a query sees the keys with the same id; None: all.
      numbers: two seed words of dropout, and the global numbers of the first row, head and query,
        for the masks of `dropout_mask`.
      causal: a position sees only keys up to itself.
      window: a position sees only keys at most this many positions away; 0: no limit.
      before: number of keys before the position of the first query.
      kept: expected number of kept weights out of 256; None: no dropout.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, L, H, D]; 0 where a query sees no key.
    """
    heads, width = query.shape[2:]
    settings = Settings(width, causal, window, before, kept, interpret)
    # Pad to a multiple of 128 channels with heads of zeros, removed from the result.
    added = -heads % (LANES // width) if heads * width > LANES else 0

    def channels(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, added), (0, 0))).reshape(*x.shape[:2], -1)

    ids = () if query_ids is None else (query_ids[:, None], key_ids[:, None])
    out = _attention(settings, numbers, ids, *map(channels, (query, key, value)))
    return out.reshape(*query.shape[:2], heads + added, width)[:, :, :heads]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, numbers, ids, query, key, value):
    return _forward_call(settings, numbers, ids, query, key, value)[0]


def _forward(settings, numbers, ids, query, key, value):
    out, sums = _forward_call(settings, numbers, ids, query, key, value)
    return out, (numbers, ids, query, key, value, out, sums)


def _backward(settings, saved, cotangent):
    numbers, ids, *arrays = saved
    return None, None, *_backward_call(settings, numbers, ids, *arrays, cotangent)


_attention.defvjp(_forward, _backward)


# --- Block sizes: partitioning of rows and heads into grid steps, shared by both passes ---


HIDDEN = -1e30  # score of an invisible key
# Heads x rows computed at once, so that their instructions can overlap.
MOST_TOGETHER = 24
# The memory budget allows one score at a time per _BYTES (a million on a v5e), of which at most
# _OF_ONE_HEAD belong to one head.
_BYTES = 24
_OF_ONE_HEAD = 1 << 18


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a kernel.

    Attributes:
      width: channels per head.
      causal, window, before: as in `attention`.
      kept: expected number of weights out of 256 that dropout keeps; None: no dropout.
      interpret: run in Pallas' interpreter.
    """

    width: int
    causal: bool
    window: int
    before: int
    kept: int | None
    interpret: bool

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def factor(self) -> float:
        """Scale of kept weights."""
        return 1.0 if self.kept is None else 256 / self.kept


class Blocks:
    """Block sizes of the grid.

    Args:
      query, key: [B, L, C] and [B, S, C].
      arrays: number of inputs and outputs; each is double-buffered.

    Attributes:
      rows, tiles: rows per step, and tiles of each row.
      together: rows of a step that are computed at once.
      lanes, tile_heads: lanes and heads per tile.
    """

    def __init__(self, settings: Settings, query, key, *, arrays: int):
        self.settings = settings
        self.batch, self.queries, channels = query.shape
        self.keys = key.shape[1]
        self.lanes = min(channels, LANES)
        self.tile_heads = self.lanes // settings.width
        self.all_tiles = channels // self.lanes
        together = layout.budget() // _BYTES
        self._of_one_head = min(_OF_ONE_HEAD, together // self.tile_heads)
        scores = self.tile_heads * min(self.queries * self.keys, self._of_one_head)
        self.tiles = _largest_divisor(
            self.all_tiles, min(together // scores, MOST_TOGETHER // self.tile_heads)
        )
        lanes = self.tiles * self.lanes
        row = max(self.queries, self.keys) * max(lanes, LANES) * query.dtype.itemsize
        fits = layout.budget() // (2 * arrays * row)
        few = self.batch * self.all_tiles // (self.tiles * layout.FEWEST_STEPS)
        self.rows = _largest_divisor(self.batch, min(fits, few, layout.ROWS[0]))
        heads = self.tiles * self.tile_heads
        self.together = _largest_divisor(
            self.rows, min(together // (self.tiles * scores), MOST_TOGETHER // heads)
        )

    def units(self) -> list[tuple[int, int, int]]:
        """Returns (row, tile, head of the tile) of the heads that are computed at once."""
        return [
            (row, tile, head)
            for row in range(self.together)
            for tile in range(self.tiles)
            for head in range(self.tile_heads)
        ]

    def at_once(self, positions: int, others: int) -> int:
        """Returns the number of positions, a divisor, to compute at once against all `others`."""
        blocks = _largest_divisor(positions // LANES, self._of_one_head // (others * LANES))
        return blocks * LANES

    def row_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [B, positions, channels]."""
        shape = self.rows, array.shape[1], self.tiles * self.lanes
        return pl.BlockSpec(shape, lambda step, tile: (step, 0, tile))

    def ids_block(self, ids) -> pl.BlockSpec:
        """Returns the block spec of ids [B, 1, positions]."""
        return pl.BlockSpec((self.rows, 1, ids.shape[2]), lambda step, tile: (step, 0, 0))

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the log-sums, one number per query and head."""
        return self.batch, self.all_tiles, self.tile_heads, self.queries

    def sums_block(self) -> pl.BlockSpec:
        shape = self.rows, self.tiles, self.tile_heads, self.queries
        return pl.BlockSpec(shape, lambda step, tile: (step, tile, 0, 0))

    def lanes_of(self, tile: int) -> slice:
        return slice(tile * self.lanes, (tile + 1) * self.lanes)

    def only_head(self, x, head: int):
        """Returns a tile [positions, lanes] with the lanes of all other heads set to 0."""
        if self.tile_heads == 1:
            return x
        own = jax.lax.broadcasted_iota(I32, (1, self.lanes), 1) // self.settings.width == head
        return masked_bitwise(own, x.astype(F32)).astype(x.dtype)

    def of_head(self, x, head: int):
        """Returns the rows of a head of a transposed tile [lanes, positions]."""
        return x[head * self.settings.width : (head + 1) * self.settings.width]


def longest(dtype, width: int) -> int:
    """Returns the number of positions of the longest row that the kernels can be compiled for.

    Estimates the memory of the backward pass for one tile in 16 bits: eight double-buffered arrays
    and two more for temporaries, ids, a transposed gradient, and five sets of scores of 128 keys
    for each head of the tile. 32 bits halve the length. A third of the memory is left for compiler
    spills, which differ by chip.
    """
    of_position = (2 * 10 * 2 + 2 * 4 + 20 * max(LANES // width, 2)) * LANES
    of_position = of_position * jnp.dtype(dtype).itemsize // 2
    return int(0.67 * layout.vmem_limit()) // of_position // LANES * LANES


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, max(most, 1) + 1) if number % n == 0)


# --- Grid steps: rows, visibility and dropout masks ---


Part = tuple  # (first position, number of positions)


class Step:
    """A grid step. Create it outside of loops: the interpreter needs that for `pl.program_id`.

    Args:
      numbers: as in `call`.
      ids: segment ids of queries and keys, or empty.
      columns: scratch memory for the transposed ids of keys; None without ids.

    Attributes:
      first: index in the step of the first row being computed.
    """

    def __init__(self, blocks: Blocks, numbers, ids, columns):
        self.blocks, self._ids, self._columns = blocks, ids, columns
        self._seed = numbers[0, 0], numbers[0, 1]
        self._row = numbers[0, 2] + pl.program_id(0) * blocks.rows
        self._head = numbers[0, 3] + pl.program_id(1) * blocks.tiles * blocks.tile_heads
        self._query = numbers[0, 4]
        self.first = 0

    def for_rows(self, function: Callable[[], None]) -> None:
        """Calls `function` for each group of `together` rows of the step."""

        @pl.loop(0, self.blocks.rows // self.blocks.together)
        def _(index):
            self.first = index * self.blocks.together
            for row in range(self.blocks.together if self._ids else 0):
                self._turn_ids(row)
            function()

    def _turn_ids(self, row: int) -> None:
        """Transposes the ids of keys from lanes to sublanes, broadcast to all lanes."""
        ids = self._ids[1][self.first + row]
        for first in range(0, ids.shape[1], LANES):
            block = jnp.broadcast_to(ids[:, first : first + LANES], (LANES, LANES))
            self._columns[row, first : first + LANES] = block.T

    def tile(self, array, row: int, tile: int, positions=slice(None)):
        """Returns a tile [positions, lanes] of a reference [rows, positions, channels]."""
        return array[self.first + row, positions, self.blocks.lanes_of(tile)]

    def visible(self, keys: Part, queries: Part) -> list:
        """Returns for each row the mask [keys, queries] of visible keys, or None: all visible."""
        return [self._visible(row, keys, queries) for row in range(self.blocks.together)]

    def _visible(self, row, keys, queries):
        seen = None
        if self._ids:
            columns = self._columns[row, pl.ds(*keys)]
            wide = jnp.concatenate([columns] * (queries[1] // LANES), axis=1)
            seen = wide == self._ids[0][self.first + row, :, pl.ds(*queries)]
        causal, window = self.blocks.settings.causal, self.blocks.settings.window
        if causal or window:
            shape = keys[1], queries[1]
            key = keys[0] - self.blocks.settings.before + jax.lax.broadcasted_iota(I32, shape, 0)
            query = queries[0] + jax.lax.broadcasted_iota(I32, shape, 1)
            near = key <= query if causal else key <= query + window
            near = near & (key >= query - window) if window else near
            seen = near if seen is None else seen & near
        return seen

    def dropout_mask(self, unit: tuple[int, int, int], keys: Part, queries: Part):
        """Returns the dropout mask of a unit of `Blocks.units`, or None: all weights are kept."""
        blocks = self.blocks
        if blocks.settings.kept is None:
            return None
        row, tile, head = unit
        head = self._head + tile * blocks.tile_heads + head
        words = head_words(self._seed, self._row + self.first + row, head)
        queries = self._query + queries[0], queries[1]
        return dropout_mask(words, keys, queries, blocks.settings.kept)


def call(
    kernel, blocks: Blocks, numbers, ids, arrays: Sequence, specs, outputs, output_specs, scratch=()
) -> list:
    """Runs pallas_call; the kernel gets a `Step` before the arrays.

    Args:
      numbers: int32, two seed words of dropout; the first row, head and query of this device.
      ids: segment ids of queries and keys, [B, 1, positions], or empty.
    """
    count = len(ids)
    columns = [pltpu.VMEM((blocks.together, blocks.keys, LANES), I32)] if ids else []

    def with_step(numbers, *references):
        columns = references[-1] if count else None
        rest = references[count : len(references) - bool(count)]
        kernel(Step(blocks, numbers, references[:count], columns), *rest)

    return pl.pallas_call(
        with_step,
        grid=(blocks.batch // blocks.rows, blocks.all_tiles // blocks.tiles),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *map(blocks.ids_block, ids),
            *specs,
        ],
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=[*scratch, *columns],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=layout.vmem_limit(),
        ),
        interpret=blocks.settings.interpret,
    )(numbers[None], *ids, *arrays)  # two axes, so that vmap over seeds can add a third


def for_blocks(positions: int, size: int, function: Callable) -> None:
    """Calls function(first position) for each block of `size` positions."""
    if positions == size:
        function(0)
        return

    @pl.loop(0, positions // size)
    def _(block):
        function(pl.multiple_of(block * size, LANES))


# --- The forward pass: scores of whole rows stay on chip ---


def _forward_call(settings: Settings, numbers, ids, query, key, value):
    """Returns the output [B, L, C] and the log-sums [B, tiles, heads, L].

    The log-sum of a query is log2(sum over keys of 2^(score * log2(e))).

    Args:
      numbers, ids: as in `call`.
      query, key, value: [B, L, C], [B, S, C] and [B, S, C].
    """
    blocks = Blocks(settings, query, key, arrays=4)
    sums = jax.ShapeDtypeStruct(blocks.sums_shape, F32)
    return call(
        functools.partial(_forward_kernel, blocks), blocks, numbers, ids, [query, key, value],
        [blocks.row_block(x) for x in (query, key, value)],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), sums],
        [blocks.row_block(query), blocks.sums_block()],
    )  # fmt: skip


def _forward_kernel(blocks, step, query, key, value, out, sums):
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
            dot(
                step.tile(key, r, t),
                blocks.only_head(step.tile(query, r, t, here), h),
                contract=(1, 1),
            )
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
            masked_bitwise(step.dropout_mask(unit, keys, queries), x)
            for x, unit in zip(powers, units, strict=True)
        ]
        values = [
            blocks.of_head(transpose_f32(step.tile(value, r, t)), h).astype(value.dtype)
            for r, t, h in units
        ]
        outs = [
            dot(y, x.astype(value.dtype)) * (blocks.settings.factor / total)
            for x, y, total in zip(powers, values, totals, strict=True)
        ]
        for n in range(0, len(units), blocks.tile_heads):
            r, t, _ = units[n]
            heads = jnp.concatenate(outs[n : n + blocks.tile_heads], axis=0)
            out[step.first + r, here, blocks.lanes_of(t)] = heads.T.astype(out.dtype)

    step.for_rows(lambda: for_blocks(blocks.queries, size, some_queries))


# --- The backward pass: one kernel recomputes the scores and returns all three gradients ---


def _backward_call(settings: Settings, numbers, ids, query, key, value, out, sums, cotangent):
    """Returns the gradients of query, key and value.

    Args:
      out, sums: results of `_forward_call`.
      cotangent: gradient of `out`, [B, L, C].
      settings, numbers, ids, query, key, value: as in `_forward_call`.
    """
    blocks = Blocks(settings, query, key, arrays=8)
    arrays = [query, key, value, out, cotangent]
    turned = blocks.together * blocks.tiles, blocks.lanes, blocks.queries
    return call(
        functools.partial(_backward_kernel, blocks), blocks, numbers, ids, [*arrays, sums],
        [*(blocks.row_block(x) for x in arrays), blocks.sums_block()],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)],
        [blocks.row_block(x) for x in (query, key, value)],
        scratch=[pltpu.VMEM(turned, F32)],
    )  # fmt: skip


def _backward_kernel(
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
            dot(x, step.tile(query, r, t), contract=(1, 1))
            for x, (r, t, _) in zip(own_keys, units, strict=True)
        ]
        d_weights = [
            dot(x, step.tile(cotangent, r, t), contract=(1, 1)) * settings.factor
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
        kept = [step.dropout_mask(unit, keys, queries) for unit in units]
        d_scores = [
            (weight * (masked_bitwise(mark, d_weight) - total)).astype(dtype)
            for weight, mark, d_weight, total in zip(weights, kept, d_weights, along, strict=True)
        ]
        dropped = [
            masked_bitwise(mark, weight).astype(dtype)
            for mark, weight in zip(kept, weights, strict=True)
        ]
        for first in range(0, len(units), blocks.tile_heads):
            r, t, _ = units[first]
            total_key = total_value = 0.0
            for n in range(first, first + blocks.tile_heads):
                head = units[n][2]
                own = blocks.only_head(step.tile(query, r, t), head)
                total_key = total_key + dot(d_scores[n], own)
                own = blocks.only_head(step.tile(cotangent, r, t), head)
                total_value = total_value + dot(dropped[n], own)
            place = step.first + r, here, blocks.lanes_of(t)
            d_key[place] = (total_key * settings.scale).astype(dtype)
            d_value[place] = (total_value * settings.factor).astype(dtype)
        for x, (r, t, h) in zip(d_scores, units, strict=True):
            keys_turned = blocks.of_head(transpose_f32(step.tile(key, r, t, here)), h).astype(dtype)
            part = dot(keys_turned, x)
            place = r * blocks.tiles + t, pl.ds(h * settings.width, settings.width)
            if size < blocks.keys:
                turned[place] += part
            else:
                turned[place] = part

    def some_rows():
        tiles = sorted({(r, t) for r, t, _ in units})
        products = {
            (r, t): transpose_f32(
                step.tile(out, r, t).astype(F32) * step.tile(cotangent, r, t).astype(F32)
            )
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


def transpose_f32(x):
    """Transposes [positions, lanes] in float32, whose rows can be sliced."""
    return x.astype(F32).T


# --- Dropout masks of attention weights from a counter-based generator ---
#
# The mask is a function of two seed words and the index of a weight, so it does not depend on the
# partitioning into blocks and devices. The backward pass draws the same mask again, and none is
# stored. Four weights share a 32-bit word: a counter, mixed by the two rounds of a hash function
# (Ettinger, "hash-prospector", lowbias32), XORed with a word of the row and head before each round.


# Keys per group of 32 words: byte k from the top decides keys 32 k to 32 k + 31 of the group.
GROUP = 128
_WORDS = GROUP // 4
_MOST_HEADS = 1024  # maximum number of heads
_MOST_QUERIES = 1 << 16  # maximum number of positions


def head_words(seed: Int[Array, " 2"], row, head) -> tuple[Array, Array]:
    """Returns two words that are distinct for each row and head."""
    unit = row * _MOST_HEADS + head
    return _mix(unit ^ seed[0]), _mix(unit ^ seed[1])


def dropout_mask(
    words: tuple[Array, Array], keys: tuple[int, int], queries: tuple[int, int], kept_of_256: int
) -> Bool[Array, "keys queries"]:
    """Returns the dropout mask of a block of weights, True for kept weights.

    Args:
      words: result of `head_words`.
      keys, queries: (first position, number); multiples of GROUP for keys.
      kept_of_256: a weight is kept with probability kept_of_256 / 256.
    """
    shape = _WORDS, queries[1]
    counter = jax.lax.broadcasted_iota(I32, shape, 0) * _MOST_QUERIES
    counter = counter + jax.lax.broadcasted_iota(I32, shape, 1) + queries[0]
    limit = I32((kept_of_256 << 24) - (1 << 31))
    parts = []
    for first in range(0, keys[1], GROUP):
        place = (keys[0] + first) // GROUP * (_WORDS * _MOST_QUERIES)
        drawn = _mix(counter + place ^ words[0], words[1])
        # Only the upper byte matters, since the lower bytes of the limit are 0.
        parts += [drawn << (8 * byte) < limit for byte in range(4)]
    return jnp.concatenate(parts, axis=0)


def _mix(x, between=0):
    x = x ^ jax.lax.shift_right_logical(x, I32(16))
    x = x * I32(0x7FEB352D)
    x = x ^ jax.lax.shift_right_logical(x, I32(15)) ^ between
    x = x * I32(0x846CA68B - (1 << 32))
    return x ^ jax.lax.shift_right_logical(x, I32(16))
