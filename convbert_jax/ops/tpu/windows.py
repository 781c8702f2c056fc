"""Shared code of the banded TPU kernels: builds bands from filters and windows from rows.

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

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import LANES, SUBLANES, WINDOW, Bands
from convbert_jax.ops.tpu.ids import EDGE, by_tap

F32, I32 = jnp.float32, jnp.int32
# Rows with more windows use a loop: unrolled windows overlap in the schedule, but each costs
# compile time.
UNROLLED_WINDOWS = 24
# This chip rotates all rows of a vector by the same amount and has no row gather, so both are
# composed of several steps.
TPU_V4 = "TPU v4"


def only(mask, x):
    """Returns x where the mask is True or None, else 0."""
    return x if mask is None else jnp.where(mask, x, 0.0)


def only_by_bits(mask, x):
    """Computes `only` bitwise, for float32 inputs of a product, even by way of memory.

    The compiler fuses a select into a masked product, on which its profiler aborts (libtpu 0.0.52).
    """
    if mask is None:
        return x
    return pltpu.bitcast(pltpu.bitcast(x, I32) & jnp.where(mask, -1, 0), F32)


def gradients_of_row(
    bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, copy, keep=only
) -> None:
    """Writes the gradients of the values and filters of row r.

    Args:
      bands: geometry of the forward convolution.
      ids: `Ids` with row r loaded.
      values, cotangent: inputs [R, L, C].
      filters: filters of the row in slots of the opposite offsets, in memory from `slots` with
        edges; 0 for invisible taps.
      d_values: output [R, L, C].
      gradients: output in slots of the opposite offsets, in memory from `slots`; 0 for invisible
        taps.
      backwards, copy: scratch from `copies` for the values and the cotangent.
      keep: `only`, or `only_by_bits` if a product reads the gradients.
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
      copy: scratch from `copies` with the row.
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
    if block_sizes.device_kind() != TPU_V4:
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
        x = only(real, x)
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
    if block_sizes.device_kind() != TPU_V4:
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


def dot(a, b, *, contract=(1, 0)):
    """Computes a product with f32 accumulation; f32 factors are not rounded to bf16."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=F32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == F32 else None,
    )


def copies(bands: Bands, dtype):
    words = bands.padded_length * dtype.itemsize // 4
    return pltpu.VMEM((-(-bands.channels // LANES), words, LANES), I32)


def slots(bands: Bands, *, edges: bool = False):
    return pltpu.VMEM((bands.vectors, bands.length + 2 * EDGE * edges, LANES), F32)


def backward_scratch(bands: Bands, dtype):
    """Returns the scratch of `gradients_of_row`: backwards, copy, filters and gradients."""
    copy = copies(bands, dtype)
    return [copy, copy, slots(bands.opposite, edges=True), slots(bands.opposite)]
