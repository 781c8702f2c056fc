"""Depthwise convolution over time as Mosaic kernels for TPU: shift and accumulate on the chip.

XLA fuses the taps into the matrix product that follows and computes them again for each of its
tiles. Here each input is read once; a shift is a load from scratch memory at another row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from convbert_jax.ops import block_sizes, taps
from convbert_jax.ops.bands import LANES, SUBLANES, round_up
from convbert_jax.ops.pallas_tpu_rows import Rows
from convbert_jax.ops.pallas_tpu_windows import shifted_load

F32 = jnp.float32
CHUNK = 64  # positions of an accumulator: 8 vectors, few enough to stay in registers
MOST_ROWS = 4
# Rows of up to so many positions are unrolled: a load at a row that is known when the kernel is
# compiled is one instruction at any row, else it has to be aligned and the shift costs extra.
UNROLLED = 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def depthwise_conv(
    x: Float[Array, "B L C"],
    filters: Float[Array, "K C"],
    segment_ids: Int[Array, "B L"] | None,
    interpret: object = False,
) -> Float[Array, "B L C"]:
    """As `depthwise_conv.depthwise_conv`."""
    rows = _Rows(x, segment_ids)
    offsets = taps.offsets(len(filters))
    out = _call(_forward_kernel, rows, offsets, [rows.out(x)], [filters], rows.shape, interpret)[0]
    return rows.back(out)


def _forward(x, filters, segment_ids, interpret):
    return depthwise_conv(x, filters, segment_ids, interpret), (x, filters, segment_ids)


def _backward(interpret, saved, cotangent):
    x, filters, segment_ids = saved
    rows = _Rows(x, segment_ids)
    offsets = taps.offsets(len(filters))
    d_x, sums = _call(
        _backward_kernel, rows, offsets, [rows.out(x), rows.out(cotangent)], [filters],
        rows.shape, interpret, sums=True,
    )  # fmt: skip
    sums = sums.reshape(-1, len(filters), SUBLANES, x.shape[2])
    return rows.back(d_x), sums.sum(axis=(0, 2)).astype(filters.dtype), None


depthwise_conv.defvjp(_forward, _backward)


def _forward_kernel(offsets, ids, x, filters, out, shifted, columns):
    @pl.loop(0, x.shape[0])
    def _(r):
        _load_ids(offsets, ids, r, columns)
        _load(offsets, x[r], columns, shifted)

        def chunk(start, size):
            masks = _masks(offsets, columns, start, size)
            for lane in range(0, x.shape[2], LANES):
                block = slice(lane, min(lane + LANES, x.shape[2]))
                out[r, pl.ds(start, size), block] = _sum(
                    offsets, shifted, filters, masks, start, size, block
                ).astype(out.dtype)

        _for_chunks(x.shape[1], chunk)


def _backward_kernel(offsets, ids, x, cotangent, filters, d_x, sums, shifted, back, columns):
    opposite = tuple(-offset for offset in offsets)
    sums[...] = jnp.zeros(sums.shape, F32)

    @pl.loop(0, x.shape[0])
    def _(r):
        _load_ids(offsets, ids, r, columns)
        _load(offsets, x[r], columns, shifted)
        _load(offsets, cotangent[r], columns, back)

        def chunk(start, size):
            masks = _masks(opposite, columns, start, size)
            for lane in range(0, x.shape[2], LANES):
                block = slice(lane, min(lane + LANES, x.shape[2]))
                own = shifted_load(shifted, start + _halo(offsets), 0, size, block)
                total = None
                for tap, step in enumerate(opposite):
                    # What the positions that read this one through the tap got; for both gradients.
                    given = shifted_load(back, start + _halo(offsets), step, size, block)
                    given = _only(masks[tap], given)
                    product = given * filters[tap : tap + 1, block].astype(F32)
                    total = product if total is None else total + product
                    share = (own * given).reshape(-1, SUBLANES, given.shape[1]).sum(axis=0)
                    sums[0, tap * SUBLANES : (tap + 1) * SUBLANES, block] += share
                d_x[r, pl.ds(start, size), block] = total.astype(d_x.dtype)

        _for_chunks(x.shape[1], chunk)


def _sum(offsets, memory, filters, masks, start, size, block):
    """Filtered positions start to start + size of the channels of a block."""
    total = None
    for tap, offset in enumerate(offsets):
        read = shifted_load(memory, start + _halo(offsets), offset, size, block)
        product = _only(masks[tap], read) * filters[tap : tap + 1, block].astype(F32)
        total = product if total is None else total + product
    return total


def _only(mask, x):
    """Multiplied: so many masks for selection do not fit the registers made for them."""
    return x if mask is None else x * mask[:, : x.shape[1]]


def _halo(offsets) -> int:
    return round_up(max(1, *(abs(offset) for offset in offsets)), SUBLANES)


def _load_ids(offsets, ids, r, columns) -> None:
    """The ids of row r from lanes to rows of scratch memory, with a halo of 0."""
    if ids is None:
        return
    halo = _halo(offsets)
    length = columns.shape[0] - 2 * halo
    edge = jnp.zeros((halo, LANES), F32)
    columns[:halo] = edge
    columns[halo + length :] = edge
    for chunk in range(ids.shape[1]):
        lanes = jnp.broadcast_to(ids[r, chunk : chunk + 1], (LANES, LANES)).astype(F32)
        first = chunk * LANES
        size = min(LANES, length - first)
        columns[halo + first : halo + first + size] = lanes.T[:size]


def _load(offsets, row, columns, memory) -> None:
    """A row into scratch memory with its halo, without what padding holds."""
    halo, length = _halo(offsets), row.shape[0]
    edge = jnp.zeros((halo, row.shape[1]), F32)
    memory[:halo] = edge
    memory[halo + length :] = edge
    for lane in range(0, row.shape[1], LANES):
        part = row[:, lane : lane + LANES].astype(F32)
        if columns is not None:
            real = columns[halo : halo + length] != 0
            part = jnp.where(real[:, : part.shape[1]], part, 0.0)
        memory[halo : halo + length, lane : lane + part.shape[1]] = part


def _masks(offsets, columns, start, size):
    """For each tap [size, 128] 1 where it may read, else 0, or None: everywhere."""
    if columns is None:
        return [None] * len(offsets)
    here = columns[pl.ds(start + _halo(offsets), size)]
    real = here != 0
    masks = []
    for offset in offsets:
        there = shifted_load(columns, start + _halo(offsets), offset, size)
        masks.append(((here == there) & real).astype(F32) if offset else None)
    return masks


def _for_chunks(length, body) -> None:
    """Calls body(first position, size) for each chunk of a row."""
    whole = length // CHUNK * CHUNK
    if whole <= UNROLLED:
        for start in range(0, whole, CHUNK):
            body(start, CHUNK)
    else:

        @pl.loop(0, whole, step=CHUNK)
        def _(start):
            body(pl.multiple_of(start, CHUNK), CHUNK)

    if length > whole:
        body(whole, length - whole)


class _Rows(Rows):
    """Rows that share one are kept apart by their ids, which are made even if none are given."""

    def __init__(self, x, segment_ids):
        batch, length, channels = x.shape
        super().__init__(batch, length)
        self.shape = (self.batch_together, self.length_together, channels)
        if segment_ids is None and self.together > 1:
            segment_ids = jnp.ones((batch, length), jnp.int32)
        self.segment_ids = None
        if segment_ids is not None:
            place = jnp.arange(batch, dtype=jnp.int32)[:, None] % self.together
            apart = segment_ids.astype(jnp.int32) * self.together + place
            ids = self.out(jnp.where(segment_ids != 0, apart, 0))[..., 0]
            ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % LANES)))
            self.segment_ids = ids.reshape(len(ids), -1, LANES)


def _call(kernel, rows, offsets, arrays, constants, shape, interpret, *, sums=False):
    """pallas_call over the rows; outputs are [rows, L, C] and, with `sums`, each step's sums."""
    batch, length, channels = shape
    dtype = arrays[0].dtype
    fixed = len(arrays) * length * channels * 4
    most = (block_sizes.budget() - fixed) // (2 * (len(arrays) + 1) * length * channels * 2)
    most = min(max(most, 1), MOST_ROWS)
    together = max(n for n in range(1, most + 1) if batch % n == 0)
    row = pl.BlockSpec((together, length, channels), lambda step: (step, 0, 0))
    kept = length + 2 * _halo(offsets)
    outputs, output_specs = [jax.ShapeDtypeStruct(shape, dtype)], [row]
    if sums:
        size = (1, len(offsets) * SUBLANES, channels)
        outputs.append(jax.ShapeDtypeStruct((batch // together, *size[1:]), F32))
        output_specs.append(pl.BlockSpec(size, lambda step: (step, 0, 0)))
    scratch = [pltpu.VMEM((kept, channels), F32)] * len(arrays)
    body = functools.partial(kernel, offsets)
    specs = [row] * len(arrays)
    if rows.segment_ids is None:

        def with_ids(*references):
            body(None, *references, None)

        ids = []
    else:
        ids = [rows.segment_ids]
        chunks = rows.segment_ids.shape[1]
        specs = [pl.BlockSpec((together, chunks, LANES), lambda step: (step, 0, 0)), *specs]
        scratch = [*scratch, pltpu.VMEM((kept, LANES), F32)]
        with_ids = body
    constant = [pl.BlockSpec(array.shape, lambda step: (0, 0)) for array in constants]
    return pl.pallas_call(
        with_ids,
        grid=(batch // together,),
        in_specs=[*specs, *constant],
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=block_sizes.vmem_limit()
        ),
        interpret=interpret,
    )(*ids, *arrays, *constants)
