"""Shared code of the banded TPU kernels: masks of taps, pallas_call over rows, bands and windows.

Values and cotangents are copied into scratch memory with their halo. Padding is zeroed in the copy,
so NaN in padding has no effect. The two heads of a pair are separated bitwise when a window is
read. Non-finite values of real tokens do reach other segments within their window, since 0 * inf is
NaN; attention has the same property, where a key with weight 0 does.

Mosaic has limits that shape this code:

- Row rotations start at multiples of 8 lanes and only go forward.
- The compiler fails if the result of a select enters a product (multiply by the mask instead), or
  if a bf16 value is both a factor and converted back.
- Only memory with 128 lanes can be read from any row at no cost and is stored in whole vectors.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from convbert_jax.ops.tpu import layout
from convbert_jax.ops.tpu.layout import (
    F32,
    I32,
    LANES,
    SUBLANES,
    WINDOW,
    Bands,
    dot,
    masked,
)

# --- Masks of visible taps, in the lanes of the taps ---


# Margin before and after a row, larger than any offset of a band.
EDGE = WINDOW


class Ids:
    """Segment ids of the rows of a grid step; without ids all taps inside the row are visible.

    Concatenated rows of `bands.period` positions are separated by distinct ids.

    Args:
      columns: scratch memory from `ids_scratch`; None: all taps are visible.
      block: ids of several rows; None: one segment per row.
      first: index in `block` of the first row of the step.
    """

    def __init__(self, bands: Bands, columns=None, block=None, first=0):
        self.bands, self.columns, self.block, self.first = bands, columns, block, first

    def load(self, r) -> None:
        """Transposes the ids of row r of the step from lanes to rows, broadcast to all lanes."""
        if self.columns is None:
            return
        bands = self.bands
        edge = jnp.zeros((EDGE, LANES), I32)
        self.columns[:EDGE] = edge
        self.columns[EDGE + bands.length :] = edge
        for first in range(0, bands.length, LANES):
            size = min(LANES, bands.length - first)
            lanes = jnp.broadcast_to(self._lanes(r, first), (LANES, LANES))
            self.columns[EDGE + first : EDGE + first + size] = lanes.T[:size]

    def _lanes(self, r, first):
        """Returns the ids [1, 128] of row r from position `first`, distinct per shorter row."""
        bands = self.bands
        position = first + jax.lax.broadcasted_iota(I32, (1, LANES), 1)
        if self.block is None:
            ids = jnp.where(position < bands.length, 1, 0)
        else:
            block = self.block[:, first : first + LANES]
            own = jax.lax.broadcasted_iota(I32, block.shape, 0) == self.first + r
            ids = jnp.sum(jnp.where(own, block, 0), axis=0, keepdims=True)
        together = bands.length // bands.period
        if together == 1:
            return ids
        number = sum((position >= n * bands.period).astype(I32) for n in range(1, together))
        return jnp.where(ids == 0, 0, ids * together + number)

    def real(self, start=0, size=None):
        """Returns the mask [size, 128] of positions that are not padding, or None: all."""
        if self.columns is None:
            return None
        size = self.bands.length if size is None else size
        return self.columns[pl.ds(EDGE + start, size)] != 0

    def visible(self, bands: Bands, start, size, *, sign: int = 1):
        """Returns the mask [size, 128]: the lane's tap sees the position at sign * offset.

        Args:
          bands: geometry that defines the lanes.
          sign: -1 if `bands` has the opposite offsets.
        """
        if self.columns is None:
            return None
        here = self.columns[pl.ds(EDGE + start, size)]
        there = by_tap(bands, self.columns, start, size, sign=sign)
        # Padding reads nothing, not even itself: no position has the id -1.
        return there == jnp.where(here == 0, -1, here)


def by_tap(bands: Bands, memory, start, size, *, sign: int = 1):
    """Returns [size, 128]: row t is memory[EDGE + start + t + sign * offset] in a tap's lanes."""
    lane = jax.lax.broadcasted_iota(I32, (SUBLANES, LANES), 1) % WINDOW
    tap = (lane + bands.slot * WINDOW - bands.halo) % bands.slot
    tap = jnp.broadcast_to(tap[:1], (size, LANES))
    found = None
    for offset in bands.offsets:
        there = shifted_load(memory, start, EDGE + sign * offset, size)
        own = tap == offset % bands.slot
        found = there if found is None else jnp.where(own, there, found)
    return found


def shifted_load(memory, start, shift, size):
    """Loads rows start + shift to start + shift + size; `start` must be a multiple of 8.

    Static indices may have any value; dynamic ones must be aligned.
    """
    if isinstance(start, int):
        return memory[start + shift : start + shift + size]
    return memory.at[pl.ds(start, EDGE + size + EDGE)][shift : shift + size]


def ids_scratch(bands: Bands):
    """Returns the scratch memory of `Ids`."""
    return pltpu.VMEM((bands.length + 2 * EDGE, LANES), I32)


# --- pallas_call over rows ---


class Grid:
    """Grid steps of `rows` rows each, divided among the cores of a device.

    Attributes:
      rows: rows per step.
      steps: number of steps.
      sums: number of accumulators of a sum over positions, one per core.
    """

    def __init__(self, batch: int, rows: int):
        self.rows, self.steps = rows, batch // rows
        self.sums = layout.cores() if self.steps % layout.cores() == 0 else 1

    def row_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [B, ...], the rows of a step."""
        rest, steps = array.shape[1:], self.steps // self.sums
        return pl.BlockSpec(
            (self.rows, *rest), lambda core, step: (core * steps + step, *(0 for _ in rest))
        )

    def sum_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [sums, ...], the accumulator of a core."""
        rest = array.shape[1:]
        return pl.BlockSpec((1, *rest), lambda core, step: (core, *(0 for _ in rest)))

    def ids_block(self, ids) -> pl.BlockSpec:
        """Returns the block spec of ids [B, L], in blocks of 8 rows, or all if there are fewer."""
        rows, steps = min(len(ids), SUBLANES), self.steps // self.sums
        return pl.BlockSpec(
            (rows, ids.shape[1]), lambda core, step: ((core * steps + step) * self.rows // rows, 0)
        )


def whole(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda core, step: (0,) * array.ndim)


def is_first_step():
    """Returns whether this is the first step of a core, which initializes accumulators."""
    return pl.program_id(1) == 0


def call(
    kernel, bands, grid: Grid, segment_ids, arrays, specs, *, outputs, output_specs, scratch,
    interpret,
) -> list[Array]:  # fmt: skip
    """Runs pallas_call; the kernel gets an `Ids` before the arrays."""
    if segment_ids is None and bands.period == bands.length:

        def with_ids(*references):
            kernel(Ids(bands), *references)

    elif segment_ids is None:
        scratch = [*scratch, ids_scratch(bands)]

        def with_ids(*references):
            *references, columns = references
            kernel(Ids(bands, columns), *references)

    else:
        ids = segment_ids.astype(jnp.int32)
        if ids.shape[1] % LANES:
            ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % LANES)))
        arrays, specs = [ids, *arrays], [grid.ids_block(ids), *specs]
        scratch = [*scratch, ids_scratch(bands)]

        def with_ids(block, *references):
            *references, columns = references
            step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
            first = step * grid.rows % block.shape[0]
            kernel(Ids(bands, columns, block, first), *references)

    return pl.pallas_call(
        with_ids,
        grid=(grid.sums, grid.steps // grid.sums),
        in_specs=specs,
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=layout.vmem_limit(),
        ),
        interpret=interpret,
    )(*arrays)


# --- Bands from filters, windows from rows ---


# Rows with more windows use a loop: unrolled windows overlap in the schedule, but each costs
# compile time.
UNROLLED_WINDOWS = 24
# This chip rotates all rows of a vector by the same amount and has no row gather, so both are
# composed of several steps.
TPU_V4 = "TPU v4"


def gradients_of_row(
    bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, copy, keep=masked
) -> None:
    """Writes the gradients of the values and filters of row r.

    Args:
      bands: geometry of the forward convolution.
      ids: `Ids` with row r loaded.
      values, cotangent: inputs [R, L, C].
      filters: filters of the row in slots of the opposite offsets, in memory from `slot_scratch`
        with edges; 0 for invisible taps.
      d_values: output [R, L, C].
      gradients: output in slots of the opposite offsets, in memory from `slot_scratch`; 0 for
        invisible taps.
      backwards, copy: scratch from `halo_scratch` for the values and the cotangent.
      keep: `masked`, or `masked_bitwise` if a product reads the gradients.
    """
    opposite = bands.opposite
    copy_row(bands, values, r, ids.real(), backwards, backwards=True)
    copy_row(opposite, cotangent, r, ids.real(), copy)

    def window(start, size):
        readers = [by_tap(opposite, filters.at[v], start, size) for v in range(opposite.vectors)]
        convolve(opposite, readers, copy, start, size, d_values, r)
        visible = ids.visible(opposite, start, size, sign=-1)
        products = _products(bands, cotangent, backwards, start, size, r)
        for vector, product in enumerate(products):
            gradients[vector, pl.ds(start, size)] = keep(visible, product)

    for_windows(bands, window)


def _products(bands, cotangent, backwards, start, size, r):
    """Returns the dot products of the cotangents with the inputs of each tap.

    One [size, 128] array for each vector of slots of the opposite offsets.
    """
    opposite = bands.opposite
    first = bands.middle * (bands.windows - 1) - start
    found = {}
    for begin, end, pairs in bands.blocks():
        given = cotangent[r, pl.ds(start, size), begin:end]
        window = _window(backwards, begin // LANES, first, cotangent.dtype)
        for pair in pairs:
            read = _pair(bands, window, given.dtype, pair, begin, end)
            product = dot(given, read, contract=(1, 1))
            found[pair] = found[pair] + product if pair in found else product
    mask = _reach(bands, size, backwards=True)
    vectors = [None] * opposite.vectors
    for pair, product in found.items():
        vector, place = opposite.slot_start(2 * pair)
        product = jnp.where(mask, product, 0.0)
        product = _rotate(product, place + opposite.halo + bands.halo - WINDOW)
        vectors[vector] = product if vectors[vector] is None else vectors[vector] + product
    return vectors


def convolve(bands, filters, copy, start, size, out, r) -> None:
    """Writes positions start to start + size of row r of the output: bands times a window.

    Args:
      filters: [size, 128] for each vector of slots, 0 for invisible taps.
      copy: scratch from `halo_scratch` with the row.
      out: output [R, L, C].
    """
    # Multiply by the mask: the compiler fails on a select before a product.
    mask = _reach(bands, size).astype(F32)
    built = {}
    for begin, end, pairs in bands.blocks():
        window = _window(copy, begin // LANES, start, out.dtype)
        result = None
        for pair in pairs:
            if pair not in built:
                vector, place = bands.slot_start(2 * pair)
                built[pair] = (_rotate(filters[vector], -place) * mask).astype(out.dtype)
            product = dot(built[pair], _pair(bands, window, out.dtype, pair, begin, end))
            result = product if result is None else result + product
        out[r, pl.ds(start, size), begin:end] = result[:, : end - begin].astype(out.dtype)


def _reach(bands, size, *, backwards=False):
    """Returns the mask [size, 128] of window positions that a position of the middle can reach.

    With `backwards`, lane l is window position 64 - l.
    """
    row = jax.lax.broadcasted_iota(I32, (size, LANES), 0)
    lane = jax.lax.broadcasted_iota(I32, (size, LANES), 1) % WINDOW
    distance = (WINDOW - lane if backwards else lane) - row - bands.halo
    return (distance >= bands.offsets[0]) & (distance <= bands.offsets[-1])


def _window(copy, block, start, dtype):
    """Returns a window of a copy, [words, 128]; `start` is a multiple of 16 positions."""
    first, words = (number * dtype.itemsize // 4 for number in (start, WINDOW))
    if not isinstance(first, int):
        first = pl.multiple_of(first, SUBLANES)
    return copy[block, pl.ds(first, words)]


def _pair(bands, window, dtype, pair, begin, end):
    """Returns [128, channels of a block]: a window with only the even head, above the odd head."""
    channel = begin + jax.lax.broadcasted_iota(I32, (1, LANES), 1)
    heads = []
    for head in (2 * pair, 2 * pair + 1):
        own = (channel >= head * bands.width) & (channel < (head + 1) * bands.width)
        heads.append(pltpu.bitcast(window & jnp.where(own, -1, 0), dtype))
    return jnp.concatenate(heads, axis=0)[:, : end - begin]


def _rotate(x, lanes):
    """Rotates row r forward by `lanes` + r."""
    if layout.device_kind() != TPU_V4:
        return pltpu.roll(x, lanes % LANES, axis=1, stride=1, stride_axis=0)
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    x = pltpu.roll(x, lanes % LANES, axis=1)
    for step in (1, 2, 4, 8, 16, 32):  # the binary digits of r
        x = jnp.where(row & step != 0, pltpu.roll(x, step, axis=1), x)
    return x


def copy_row(bands: Bands, rows, r, real, memory, *, backwards: bool = False) -> None:
    """Copies row r with its halo into scratch memory.

    Args:
      rows: input [R, L, C].
      real: mask [L, 128] of positions that are not padding, or None: all.
      memory: output [blocks, padded length, 128] of 32-bit words, which hold one position, or two
        of a 16-bit dtype.
      backwards: position t goes to row padded_length - halo - t instead of halo + t.
    """
    after = bands.padded_length - bands.halo - bands.length
    for block, begin in enumerate(range(0, bands.channels, LANES)):
        end = min(begin + LANES, bands.channels)
        x = rows[r, :, begin:end].astype(F32)
        if end - begin < LANES:
            x = jnp.concatenate([x, jnp.zeros((len(x), LANES - (end - begin)), F32)], axis=1)
        x = masked(real, x)
        around = (_zeros(bands.halo), x, _zeros(after))
        x = jnp.concatenate([part for part in around if len(part)])  # Mosaic rejects empty arrays
        if backwards:
            x = _backwards(x)
        memory[block] = pltpu.bitcast(x.astype(rows.dtype), I32)


def _zeros(rows):
    return jnp.zeros((rows, LANES), F32)


def _backwards(x):
    """Reverses rows: row r of x goes to row len(x) - r; row 0 of the result is 0."""
    sublane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 0)
    turned = [_turn(x[first : first + SUBLANES], sublane) for first in range(0, len(x), SUBLANES)]
    after = [*turned[1:], jnp.zeros_like(turned[0])]
    rows = [jnp.where(sublane == 0, b, a) for a, b in zip(turned, after, strict=True)]
    return jnp.concatenate(rows[::-1])


def _turn(x, sublane):
    """Moves row r of a vector to row -r mod 8."""
    if layout.device_kind() != TPU_V4:
        return jnp.take_along_axis(x, -sublane % SUBLANES, axis=0)
    for step in (1, 2, 4):  # 7 - r is r with its binary digits inverted
        ahead, back = pltpu.roll(x, SUBLANES - step, axis=0), pltpu.roll(x, step, axis=0)
        x = jnp.where(sublane & step == 0, ahead, back)
    return pltpu.roll(x, 1, axis=0)


def fill_edges(memory, row) -> None:
    """Writes [L, 128] to memory from row EDGE on, with zeros before and after."""
    memory[:EDGE] = _zeros(EDGE)
    memory[EDGE : EDGE + len(row)] = row
    memory[EDGE + len(row) :] = _zeros(EDGE)


def for_windows(bands: Bands, body: Callable) -> None:
    """Calls body(first position of the middle, its size) for each window."""
    last = bands.windows - 1
    if bands.windows <= UNROLLED_WINDOWS:
        for index in range(last):
            body(index * bands.middle, bands.middle)
    else:

        @pl.loop(0, last)
        def _(index):
            body(pl.multiple_of(index * bands.middle, 16), bands.middle)

    start = last * bands.middle
    body(start, bands.length - start)


def halo_scratch(bands: Bands, dtype):
    words = bands.padded_length * dtype.itemsize // 4
    return pltpu.VMEM((-(-bands.channels // LANES), words, LANES), I32)


def slot_scratch(bands: Bands, *, edges: bool = False):
    return pltpu.VMEM((bands.vectors, bands.length + 2 * EDGE * edges, LANES), F32)


def backward_scratch(bands: Bands, dtype):
    """Returns the scratch of `gradients_of_row`: backwards, copy, filters and gradients."""
    copy = halo_scratch(bands, dtype)
    return [copy, copy, slot_scratch(bands.opposite, edges=True), slot_scratch(bands.opposite)]
