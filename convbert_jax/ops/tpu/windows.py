"""What the TPU kernels share: filters to bands, rows to windows, and the pallas_call over rows.

A grid step takes whole rows, as many as fit. Values and cotangents are copied into scratch memory
with their halo, once for each class of heads that must be kept apart; what padding holds is left
out there, so that NaN in it meets no arithmetic. A value of a real token that is not finite does
reach other segments within its window, since 0 * inf is NaN: as in attention, where a key with
weight 0 does the same.

Mosaic has limits that shape this code: the rotation of rows starts at multiples of 8 lanes and
goes forward only; a selection whose result enters a product makes the compiler fail (multiply), and
so does a bf16 value that is both a factor and converted back.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import LANES, SUBLANES, WINDOW, Bands

F32 = jnp.float32
# A row of more windows is looped over instead of unrolled: unrolled windows overlap in the
# schedule, but each costs compile time.
UNROLLED_WINDOWS = 24
# This chip rotates all rows of a vector alike and has no gather of rows: both take steps.
TPU_V4 = "TPU v4"


def gradients_of_row(
    bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, apart
) -> None:
    """Writes the gradient of row r of the values and, in mirrored slots, that of its filters.

    Args:
      filters: scratch [L + 2 halo, slot lanes] with the filters of the row in mirrored slots.
      d_values: output [R, L, C].
      gradients: scratch [L, slot lanes].
      backwards, apart: scratch for the copies of the values and the cotangent.
    """
    ids.load(r)
    keep_apart(bands, values[r], ids.real(), backwards, backwards=True)
    keep_apart(bands, cotangent[r], ids.real(), apart)
    opposite = tuple(-offset for offset in bands.offsets)

    def window(start, size):
        readers = _readers(bands, filters, start, size)
        mask = ids.mask(start, size, opposite)
        convolve(bands, readers, mask, apart, start, size, d_values, r)
        mask = ids.mask_backwards(start, size, bands.offsets)
        products = _products(bands, cotangent, backwards, mask, start, size, r)
        gradients[pl.ds(start, size)] = products

    for_windows(bands, window)


def _readers(bands, filters, start, size):
    """[size, slot lanes] at each position what the filters of other positions have for it."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, bands.slot_lanes), 1)
    tap = lane % WINDOW % bands.slot
    found = jnp.zeros((size, bands.slot_lanes), F32)
    for offset in bands.offsets:
        there = shifted_load(filters, start + bands.halo, -offset, size)
        found = jnp.where(tap == bands.halo - offset, there, found)
    return found


def shifted_load(memory, start, shift, size):
    """Rows start + shift to start + shift + size; `start` is a multiple of 8, `shift` any number.

    A row that is known when the kernel is compiled is loaded as it is. Loads at any other have to
    be aligned, and the rest of the shift is done on what was loaded.
    """
    if isinstance(start, int):
        return memory[start + shift : start + shift + size]
    whole, rest = shift // SUBLANES * SUBLANES, shift % SUBLANES
    first = pl.multiple_of(start + whole, SUBLANES)
    return memory[pl.ds(first, size + SUBLANES * (rest > 0))][rest : rest + size]


def _products(bands, cotangent, backwards, mask, start, size, r):
    """[size, slot lanes] dot products of cotangents with what each tap read, mirrored slots."""
    _, mask = mask
    first = bands.middle * (bands.windows - 1) - start
    found = {}
    for begin, end, pairs in bands.blocks():
        given = cotangent[r, pl.ds(start, size), begin:end]
        for pair in pairs:
            read = _stack(bands, backwards, pair, first, begin, end)
            product = dot(given, read, contract=(1, 1))
            found[pair] = found[pair] + product if pair in found else product
    vectors = [jnp.zeros((size, LANES), F32)] * (bands.slot_lanes // LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 1) % WINDOW
    for pair, product in found.items():
        vector, place = bands.slot_start(2 * pair)
        product = jnp.where(mask, product, 0.0)
        product = _rotate(product, place + 2 * bands.halo - WINDOW)
        own = (lane >= place) & (lane < place + bands.slot)
        vectors[vector] = vectors[vector] + product * own.astype(F32)
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors, axis=1)


def convolve(bands, filters, mask, apart, start, size, out, r) -> None:
    """Writes positions start to start + size of row r: filters of these times a window."""
    # Multiplied by the mask: a selection before a product makes the compiler fail. It takes clean
    # filters, though.
    real, mask = mask
    if real is not None:
        filters = jnp.concatenate(
            [
                jnp.where(real, filters[:, lane : lane + LANES], 0.0)
                for lane in range(0, bands.slot_lanes, LANES)
            ],
            axis=1,
        )
    mask = mask.astype(F32)
    built = {}
    for begin, end, pairs in bands.blocks():
        result = None
        for pair in pairs:
            if pair not in built:
                vector, place = bands.slot_start(2 * pair)
                band = filters[:, vector * LANES : (vector + 1) * LANES]
                band = _rotate(band, -place)
                built[pair] = (band * mask).astype(out.dtype)
            product = dot(built[pair], _stack(bands, apart, pair, start, begin, end))
            result = product if result is None else result + product
        out[r, pl.ds(start, size), begin:end] = result.astype(out.dtype)


def _stack(bands, apart, pair, start, begin, end):
    """[128, channels of a block]: a window with the even head of a pair above that with the odd."""
    window = pl.ds(start, WINDOW)
    classes = 2 * pair % bands.classes, (2 * pair + 1) % bands.classes
    return jnp.concatenate([apart[c, window, begin:end] for c in classes], axis=0)


def _rotate(x, lanes):
    """Row r rotated forward by `lanes` + r."""
    if block_sizes.device_kind() != TPU_V4:
        return pltpu.roll(x, lanes % LANES, axis=1, stride=1, stride_axis=0)
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    x = pltpu.roll(x, lanes % LANES, axis=1)
    for step in (1, 2, 4, 8, 16, 32):  # the binary digits of r
        x = jnp.where(row & step != 0, pltpu.roll(x, step, axis=1), x)
    return x


def keep_apart(bands: Bands, row, real, memory, *, backwards: bool = False) -> None:
    """Copies a row [L, C] with halo into memory [classes, padded length, C], a class of heads each.

    Args:
      real: [L, 128] where the row is no padding, or None: everywhere.
      backwards: row halo + t goes to padded_length - halo - t instead.
    """
    after = bands.padded_length - bands.halo - bands.length
    for begin in range(0, bands.channels, LANES):
        end = min(begin + LANES, bands.channels)
        x = row[:, begin:end].astype(F32)
        if real is not None:
            x = jnp.where(real[:, : end - begin], x, 0.0)
        x = jnp.concatenate([_zeros(bands.halo, x), x, _zeros(after, x)])
        if backwards:
            x = _backwards(x)
        head = (begin + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)) // bands.width
        for number in range(bands.classes):
            own = x * (head % bands.classes == number).astype(F32)
            memory[number, :, begin:end] = own.astype(memory.dtype)


def _zeros(rows, like):
    return jnp.zeros((rows, like.shape[1]), like.dtype)


def _backwards(x):
    """Row r of x at row len(x) - r; row 0 of the result is 0."""
    sublane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 0)
    turned = [_turn(x[first : first + SUBLANES], sublane) for first in range(0, len(x), SUBLANES)]
    after = [*turned[1:], jnp.zeros_like(turned[0])]
    rows = [jnp.where(sublane == 0, b, a) for a, b in zip(turned, after, strict=True)]
    return jnp.concatenate(rows[::-1])


def _turn(x, sublane):
    """Row r of a vector at row -r mod 8."""
    if block_sizes.device_kind() != TPU_V4:
        return jnp.take_along_axis(x, -sublane % SUBLANES, axis=0)
    for step in (1, 2, 4):  # 7 - r is r with its binary digits inverted
        ahead, back = pltpu.roll(x, SUBLANES - step, axis=0), pltpu.roll(x, step, axis=0)
        x = jnp.where(sublane & step == 0, ahead, back)
    return pltpu.roll(x, 1, axis=0)


def fill_halo(bands: Bands, memory, row) -> None:
    """Position t at row halo + t, zeros around."""
    edge = jnp.zeros((bands.halo, memory.shape[1]), F32)
    memory[: bands.halo] = edge
    memory[bands.halo : bands.halo + bands.length] = row
    memory[bands.halo + bands.length :] = edge


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


class Ids:
    """What positions of a row may read, from its segment ids; without ids only distance decides."""

    def __init__(self, bands: Bands, rows=None, windows=None, columns=None):
        self.bands, self.rows, self.windows, self.columns = bands, rows, windows, columns

    def load(self, r) -> None:
        """Turns the ids of row r from lanes to rows: [L, 128], the same in every lane."""
        self.r = r
        if self.rows is None:
            return
        for chunk in range(self.rows.shape[1]):
            lanes = jnp.broadcast_to(self.rows[r, chunk : chunk + 1], (LANES, LANES))
            first = chunk * LANES
            size = min(LANES, self.bands.length - first)
            self.columns[first : first + size] = lanes.astype(F32).T[:size]

    def _window(self, start, *, backwards):
        """[1, 128] the ids of a window, for both halves of the lanes."""
        bands = self.bands
        start = bands.length - 1 - start + bands.halo if backwards else start + WINDOW - bands.halo
        row = self.windows[self.r, pl.ds(int(backwards), 1)].astype(F32)
        if isinstance(start, int):
            window = row[:, start : start + WINDOW]
        else:
            window = pltpu.roll(row, -start % row.shape[1], axis=1)[:, :WINDOW]
        return jnp.concatenate([window, window], axis=1)

    def real(self):
        return None if self.rows is None else self.columns[...] != 0

    def mask(self, start, size, offsets):
        """([size, 128] or None where a position is real, where it may read a window position)."""
        return self._mask(start, size, offsets, backwards=False)

    def mask_backwards(self, start, size, offsets):
        """The same if lane l stands for window position 64 - l."""
        return self._mask(start, size, offsets, backwards=True)

    def _mask(self, start, size, offsets, *, backwards):
        row = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 1) % WINDOW
        position = WINDOW - lane if backwards else lane
        distance = position - row - self.bands.halo
        mask = (distance >= min(offsets)) & (distance <= max(offsets))
        for boundary in self.bands.boundaries(start):
            mask &= (row < boundary) == (position - self.bands.halo < boundary)
        if self.rows is None:
            return None, mask
        there = self._window(start, backwards=backwards)
        here = self.columns[pl.ds(start, size)]
        return here != 0, mask & (here == there) & (here != 0)


def dot(a, b, *, contract=(1, 0)):
    """Product with f32 sums; of f32 factors in full precision, not in one bf16 pass."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=F32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == F32 else None,
    )


def row_block(rows: int, array) -> pl.BlockSpec:
    """`rows` rows of an array [B, ...] a step."""
    rest = array.shape[1:]
    return pl.BlockSpec((rows, *rest), lambda step: (step, *(0 for _ in rest)))


def whole(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda step: (0,) * array.ndim)


def copies(bands: Bands, dtype):
    return pltpu.VMEM((bands.classes, bands.padded_length, bands.channels), dtype)


def slots(bands: Bands, *, halo: bool = False):
    return pltpu.VMEM((bands.length + 2 * bands.halo * halo, bands.slot_lanes), F32)


def backward_scratch(bands: Bands, dtype):
    """What `gradients_of_row` works in: backwards, apart, filters and gradients."""
    copy = copies(bands, dtype)
    return [copy, copy, slots(bands, halo=True), slots(bands)]


def call(
    kernel, bands, segment_ids, arrays, specs, *, outputs, output_specs, scratch, rows, interpret
) -> list[Array]:
    """pallas_call over the rows; the kernel gets an `Ids` before the arrays."""
    if segment_ids is None:

        def with_ids(*references):
            kernel(Ids(bands), *references)

    else:
        ids = _chunks(segment_ids), _windows(segment_ids)
        arrays = [*ids, *arrays]
        specs = [*(row_block(rows, array) for array in ids), *specs]
        scratch = [*scratch, pltpu.VMEM((bands.length, LANES), F32)]

        def with_ids(chunks, windows, *references):
            *references, columns = references
            kernel(Ids(bands, chunks, windows, columns), *references)

    return pl.pallas_call(
        with_ids,
        grid=(len(arrays[0]) // rows,),
        in_specs=specs,
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=block_sizes.vmem_limit()
        ),
        interpret=interpret,
    )(*arrays)


def _chunks(segment_ids: Int[Array, "B L"]) -> Int[Array, "B chunks 128"]:
    batch, length = segment_ids.shape
    padded = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, -length % LANES)))
    return padded.reshape(batch, -1, LANES)


def _windows(segment_ids: Int[Array, "B L"]) -> Int[Array, "B 2 P"]:
    """The ids and the ids backwards, a window of zeros before and at least as many after."""
    both = jnp.stack([segment_ids, segment_ids[:, ::-1]], axis=1).astype(jnp.int32)
    return jnp.pad(both, ((0, 0), (0, 0), (WINDOW, WINDOW + -both.shape[2] % LANES)))
