"""Convolutions as Pallas kernels for GPU, by way of Triton.

This is the only file that imports a GPU backend: Pallas for Triton, which requires Ampere or newer.
Its designated successor, Mosaic GPU, requires Hopper. jax 0.12 deprecates the Triton backend;
`requirements.txt` excludes the release that may drop it.

A program processes a block of positions of a row. Each tap loads its own shifted block; the K loads
overlap, so all but the first hit the cache. Invisible positions are masked in the load, so their
contents, even NaN, never enter a register. Triton's blocks are powers of two: head widths, taps and
channels are rounded up and masked.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BLOCK = 64  # default positions per program
WARPS = 4  # a [64, 64] float32 block takes 32 registers in each thread of 4 warps
TENSOR_CORE = 16  # minimum size of the axes of a product


def row_grid(values, block: int = BLOCK) -> tuple[int, int]:
    """Returns the grid over positions and rows; only the first axis of a CUDA grid can be long."""
    return math.ceil(values.shape[1] / block), values.shape[0]


def block_range(program, block: int = BLOCK):
    """Returns the positions of a program."""
    return padded_range(block, program * block)


def call(kernel, grid, arrays, segment_ids, outputs, interpret, warps=WARPS):
    """Runs `kernel(segment ids or None, *arrays, *outputs)` with references to whole arrays."""
    if segment_ids is None:
        body = functools.partial(kernel, None)
    else:
        body, arrays = kernel, [segment_ids, *arrays]
    return pl.pallas_call(
        body,
        out_shape=outputs,
        grid=grid,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    )(*arrays)


program_id = pl.program_id
power_of_two = pl.next_power_of_2


def padded_range(size: int, start=0):
    """Returns start, start + 1, ..., with `size` rounded up to a power of two."""
    return start + jnp.arange(power_of_two(size), dtype=jnp.int32)


def within(positions, length):
    """Returns the mask of positions that are in the row; None: all."""
    return None if length % len(positions) == 0 else positions < length


def visible(ids, row, positions, offset, length):
    """Returns the positions that a tap reads, and the mask of visible ones or None: all visible.

    Comparisons that cannot fail are omitted, since instructions limit the speed of these kernels.
    """
    reads, seen = positions + offset, within(positions, length)
    if offset < 0:
        seen = both(seen, reads >= 0)
    if offset > 0:
        seen = both(seen, reads < length)
    if ids is None:
        return reads, seen
    own = load(ids.at[row, positions], within(positions, length))
    other = load(ids.at[row, reads], seen)
    return reads, both(seen, (own == other) & (own != 0))


def both(*masks):
    """Returns the logical and of masks; None is True everywhere."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def lanes_within(lanes, count: int):
    """Returns the mask [1, lanes] of lanes below `count`; None: all."""
    return None if len(lanes) == count else (lanes < count)[None, :]


def column(mask):
    """Reshapes a mask [positions] to [positions, 1]."""
    return None if mask is None else mask[:, None]


def load(reference, mask):
    """Loads a block, 0 where masked."""
    return plgpu.load(reference, mask=mask, other=None if mask is None else 0)


def load_f32(reference, mask):
    """Loads a block as float32, 0 where masked."""
    return load(reference, mask).astype(jnp.float32)


def store(reference, value, mask) -> None:
    """Stores a block in the dtype of `reference`, except where masked."""
    plgpu.store(reference, value.astype(reference.dtype), mask=mask)


def dot(a, b):
    """Computes a product: tensor cores for 16-bit dtypes, full precision (not TF32) for float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


# --- Depthwise convolution: a program is (block of positions, row, chunk of channels) ---
#
# The backward kernel reads the cotangent of each tap once for both gradients. Each program writes
# partial sums of the filter gradients, K / BLOCK of the size of the input, and XLA adds them.


CHANNELS = 64  # channels of a program


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def depthwise_conv(x, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.depthwise_conv`. `interpret`: run in Pallas' interpreter."""
    _, length, channels = x.shape
    return call(
        functools.partial(
            _depthwise_forward_kernel, offsets=offsets, length=length, channels=channels
        ),
        _depthwise_grid(x),
        [x, filters],
        segment_ids,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret,
    )


def _depthwise_forward(x, filters, segment_ids, offsets, interpret):
    return depthwise_conv(x, filters, segment_ids, offsets, interpret), (x, filters, segment_ids)


def _depthwise_backward(offsets, interpret, saved, cotangent):
    x, filters, segment_ids = saved
    batch, length, channels = x.shape
    blocks, _ = row_grid(x)
    d_x, sums = call(
        functools.partial(
            _depthwise_backward_kernel, offsets=offsets, length=length, channels=channels
        ),
        _depthwise_grid(x),
        [x, filters, cotangent],
        segment_ids,
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, blocks, len(offsets), channels), jnp.float32),
        ),
        interpret,
    )
    return d_x, sums.sum(axis=(0, 1)).astype(filters.dtype), None


depthwise_conv.defvjp(_depthwise_forward, _depthwise_backward)


def _depthwise_grid(x):
    return *row_grid(x), math.ceil(x.shape[2] / CHANNELS)


def _depthwise_forward_kernel(ids, x, filters, out, *, offsets, length, channels):
    positions, row, lanes, used = _depthwise_block(channels)
    inside = None if used is None else used[None, :]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = visible(ids, row, positions, offset, length)
        factor = load_f32(filters.at[tap, lanes], used)
        place = x.at[row, reads[:, None], lanes[None, :]]
        total += load_f32(place, both(column(seen), inside)) * factor[None, :]
    mask = both(column(within(positions, length)), inside)
    store(out.at[row, positions[:, None], lanes[None, :]], total, mask)


def _depthwise_backward_kernel(ids, x, filters, cotangent, d_x, sums, *, offsets, length, channels):
    positions, row, lanes, used = _depthwise_block(channels)
    inside = None if used is None else used[None, :]
    _, real = visible(ids, row, positions, 0, length)
    place = x.at[row, positions[:, None], lanes[None, :]]
    own = load_f32(place, both(column(real), inside))
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        # Cotangent of the positions that read this one through the tap.
        readers, seen = visible(ids, row, positions, -offset, length)
        place = cotangent.at[row, readers[:, None], lanes[None, :]]
        given = load_f32(place, both(column(seen), inside))
        total += given * load_f32(filters.at[tap, lanes], used)[None, :]
        place = sums.at[row, program_id(0), tap, lanes]
        store(place, jnp.sum(own * given, axis=0), used)
    mask = both(column(within(positions, length)), inside)
    store(d_x.at[row, positions[:, None], lanes[None, :]], total, mask)


def _depthwise_block(channels):
    """Returns positions, row and lanes of a program, and the mask of used lanes or None: all."""
    positions = block_range(program_id(0))
    lanes = padded_range(CHANNELS, program_id(2) * CHANNELS)
    used = None if channels % CHANNELS == 0 else lanes < channels
    return positions, program_id(1), lanes, used


# --- Dynamic convolution: a program is (block of positions, row, head) ---


# Small programs, so that a multiprocessor runs many at once; on an H100 faster than blocks of 64.
DYNAMIC_BLOCK = 16  # positions
DYNAMIC_WARPS = 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(values, filters, segment_ids, offsets, interpret=False):
    """Computes `reference.dynamic_conv`. `interpret`: run in Pallas' interpreter."""
    return convolve(values, filters, segment_ids, offsets, interpret)


def _dynamic_forward(values, filters, segment_ids, offsets, interpret):
    out = dynamic_conv(values, filters, segment_ids, offsets, interpret)
    return out, (values, filters, segment_ids)


def _dynamic_backward(offsets, interpret, saved, cotangent):
    values, filters, segment_ids = saved
    gradients = convolve_backward(
        values, filters, segment_ids, cotangent, offsets, interpret, of_logits=False
    )
    return *gradients, None


dynamic_conv.defvjp(_dynamic_forward, _dynamic_backward)


def convolve(values, filters, segment_ids, offsets, interpret):
    """Returns the convolution [B, L, H, D]; filters [B, L, H, >= K] may be padded after K taps."""
    _, length, heads, width = values.shape
    return call(
        functools.partial(_dynamic_forward_kernel, offsets=offsets, length=length, width=width),
        (*row_grid(values, DYNAMIC_BLOCK), heads),
        [values, filters],
        segment_ids,
        jax.ShapeDtypeStruct(values.shape, values.dtype),
        interpret,
        DYNAMIC_WARPS,
    )


def convolve_backward(values, filters, segment_ids, cotangent, offsets, interpret, *, of_logits):
    """Returns the gradients of values and filters; 0 for the padding after the taps.

    With `of_logits`, the second gradient is the one of the logits whose softmax the filters are.
    """
    _, length, heads, width = values.shape
    return call(
        functools.partial(
            _dynamic_backward_kernel,
            offsets=offsets,
            length=length,
            width=width,
            of_logits=of_logits,
        ),
        (*row_grid(values, DYNAMIC_BLOCK), heads),
        [values, filters, cotangent],
        segment_ids,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (values, filters)),
        interpret,
        DYNAMIC_WARPS,
    )


def _dynamic_forward_kernel(ids, values, filters, out, *, offsets, length, width):
    positions, row, head, lanes, inside = _dynamic_block(width)
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = visible(ids, row, positions, offset, length)
        factor = load_f32(filters.at[row, positions, head, tap], seen)
        value = values.at[row, reads[:, None], head, lanes[None, :]]
        total += load_f32(value, both(column(seen), inside)) * factor[:, None]
    place = out.at[row, positions[:, None], head, lanes[None, :]]
    store(place, total, both(column(within(positions, length)), inside))


def _dynamic_backward_kernel(
    ids, values, filters, cotangent, d_values, d_filters, *, offsets, length, width, of_logits
):
    positions, row, head, lanes, inside = _dynamic_block(width)
    in_row = within(positions, length)

    def read(source, at, mask):
        place = source.at[row, at[:, None], head, lanes[None, :]]
        return load_f32(place, both(column(mask), inside))

    # d values[t] = sum over i of filters[t - offsets[i], i] * cotangent[t - offsets[i]]
    total = jnp.zeros((len(positions), len(lanes)), jnp.float32)
    for tap, offset in enumerate(offsets):
        readers, seen = visible(ids, row, positions, -offset, length)
        factor = load_f32(filters.at[row, readers, head, tap], seen)
        total += read(cotangent, readers, seen) * factor[:, None]
    place = d_values.at[row, positions[:, None], head, lanes[None, :]]
    store(place, total, both(column(in_row), inside))
    # d filters[t, i] = values[t + offsets[i]] . cotangent[t], 0 for an invisible tap
    _, real = visible(ids, row, positions, 0, length)
    own = read(cotangent, positions, real)
    taps = padded_range(filters.shape[-1])
    gradient = jnp.zeros((len(positions), len(taps)), jnp.float32)
    for tap, offset in enumerate(offsets):
        reads, seen = visible(ids, row, positions, offset, length)
        dots = jnp.sum(read(values, reads, seen) * own, axis=1)
        if seen is not None:  # the cotangent may be NaN
            dots = jnp.where(seen, dots, 0)
        gradient = jnp.where((taps == tap)[None, :], dots[:, None], gradient)
    place = (row, positions[:, None], head, taps[None, :])
    stored = both(column(in_row), lanes_within(taps, filters.shape[-1]))
    if of_logits:
        used = lanes_within(taps, len(offsets))
        weights = load_f32(filters.at[place], both(column(in_row), used))
        along = jnp.sum(weights * gradient, axis=1, keepdims=True)
        gradient = weights * (gradient - along)
        if real is not None:
            gradient = jnp.where(real[:, None], gradient, 0)
    store(d_filters.at[place], gradient, stored)


def _dynamic_block(width):
    """Returns positions, row, head and lanes of a program, and the mask of used lanes."""
    positions = block_range(program_id(0), DYNAMIC_BLOCK)
    row, head = program_id(1), program_id(2)
    lanes = padded_range(width)
    return positions, row, head, lanes, lanes_within(lanes, width)


# --- Span-based dynamic convolution: computes filters, then the dynamic convolution ---
#
# If the span key is None, the filters depend on the query alone.
#
# Forward: one kernel reads query and span key once and computes the filters of several heads.
# Filters go through memory and are kept as residuals. Taps are padded to a power of two per head,
# so that filters are read in whole words (16 for 64 channels at K = 9).
#
# Backward: the kernel of dynamic convolution returns the gradients of values and logits; a last
# kernel returns the gradients of query, span key and projection.
#
# [B, L, C] arrays are read or written only as often as necessary: 4 times forward, 7 backward.


CHUNK = 64  # channels per step of a product
# Logits per position and program; a quarter for float32, whose products do not use tensor cores.
COLUMNS = 256
# Accumulators per program of the projection's gradient, half for float32; more would spill
# registers.
MOST_SUMS = 64 * 128
# Programs of the projection's gradient, which split the positions: two per multiprocessor of an
# H100. Slightly more would leave most multiprocessors idle in the last wave.
PROGRAMS = 264
NOT_A_TAP = -1e30  # logit of a padding column: its weight is 0, and not NaN if all are padding


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret=False
):
    """Computes `reference.span_dynamic_conv`. `interpret`: run in Pallas' interpreter."""
    arrays = (query, span_key, values, projection, bias, segment_ids)
    return _span_forward(*arrays, heads, offsets, interpret)[0]


def _span_forward(
    query, span_key, values, projection, bias, segment_ids, heads, offsets, interpret
):
    filters = _make_filters(query, span_key, projection, bias, heads, interpret)
    by_head = values.reshape(*values.shape[:2], heads, -1)
    out = convolve(by_head, filters, segment_ids, offsets, interpret)
    saved = (query, span_key, values, projection, bias, segment_ids, filters)
    return out.reshape(values.shape), saved


def _span_backward(heads, offsets, interpret, saved, cotangent):
    query, span_key, values, projection, bias, segment_ids, filters = saved
    by_head = (*values.shape[:2], heads, -1)
    d_values, d_logits = convolve_backward(
        values.reshape(by_head), filters, segment_ids, cotangent.reshape(by_head), offsets,
        interpret, of_logits=True,
    )  # fmt: skip
    d_query, d_span_key, d_projection = _through_product(
        query, span_key, projection, segment_ids, d_logits, interpret
    )
    taps = len(offsets)
    d_bias = d_logits[..., :taps].astype(jnp.float32).sum(axis=(0, 1)).reshape(bias.shape)
    return (
        d_query, d_span_key, d_values.reshape(values.shape),
        d_projection.astype(projection.dtype), d_bias.astype(bias.dtype), None,
    )  # fmt: skip


span_dynamic_conv.defvjp(_span_forward, _span_backward)


def _make_filters(query, span_key, projection, bias, heads, interpret):
    """Computes softmax((query * span_key) projection + bias) over the taps of each head.

    Returns:
      [B, L, H, T] in the dtype of the query; T is K rounded up to a power of two, padded with 0.
    """
    *rows, channels = query.shape
    count = math.prod(rows)
    taps = power_of_two(projection.shape[1] // heads)
    # `group` heads per program; the last one may have fewer.
    most = COLUMNS if query.dtype.itemsize == 2 else COLUMNS // 4
    group = min(power_of_two(heads), max(1, most // taps))
    group = max(group, math.ceil(TENSOR_CORE / taps))
    groups = math.ceil(heads / group)
    matrix = _by_tap(projection, heads, taps, groups * group, 0).astype(query.dtype)
    logits = _by_tap(bias[None].astype(jnp.float32), heads, taps, groups * group, NOT_A_TAP)
    return call(
        functools.partial(
            _filters_kernel, count=count, channels=channels, heads=heads, group=group, taps=taps
        ),
        (math.ceil(count / BLOCK), groups),
        [query.reshape(count, channels), _flat(span_key), matrix, logits[0]],
        None,
        jax.ShapeDtypeStruct((count, heads, taps), query.dtype),
        interpret,
        WARPS if group * taps < COLUMNS else 2 * WARPS,
    ).reshape(*rows, heads, taps)


def _by_tap(matrix, heads: int, taps: int, all_heads: int, fill: float):
    """Pads the taps and heads of [N, H K] with `fill` to [N, all_heads * taps]."""
    by_head = matrix.reshape(len(matrix), heads, -1)
    behind = ((0, 0), (0, all_heads - heads), (0, taps - by_head.shape[2]))
    return jnp.pad(by_head, behind, constant_values=fill).reshape(len(matrix), -1)


def _flat(x):
    return None if x is None else x.reshape(-1, x.shape[-1])


def _through_product(query, span_key, projection, segment_ids, d_logits, interpret):
    """Returns the gradients of query, span key and projection, the last one in float32."""
    *rows, channels = query.shape
    count = math.prod(rows)
    heads, taps = d_logits.shape[-2:]
    outputs = heads * taps
    columns = power_of_two(max(TENSOR_CORE, outputs))
    most = MOST_SUMS if query.dtype.itemsize == 2 else MOST_SUMS // 2
    chunk = max(TENSOR_CORE, min(CHUNK, most // columns))
    chunks = math.ceil(channels / chunk)
    splits = max(1, min(PROGRAMS // chunks, math.ceil(count / BLOCK)))
    flat = jax.ShapeDtypeStruct((count, channels), query.dtype)
    keyed = span_key is not None
    d_query, d_span_key, sums = call(
        functools.partial(
            _products_kernel, count=count, channels=channels, outputs=outputs, chunk=chunk,
            splits=splits,
        ),
        (chunks, splits),
        [
            _flat(query),
            _flat(span_key),
            _by_tap(projection, heads, taps, heads, 0).astype(query.dtype),
            d_logits.reshape(count, outputs),
        ],
        None if segment_ids is None else segment_ids.reshape(count),
        (
            flat,
            flat if keyed else None,
            jax.ShapeDtypeStruct((splits, channels, outputs), jnp.float32),
        ),
        interpret,
        WARPS if columns < COLUMNS and query.dtype.itemsize == 2 else 2 * WARPS,
    )  # fmt: skip
    d_projection = sums.sum(axis=0).reshape(channels, heads, taps)
    d_projection = d_projection[..., : projection.shape[1] // heads].reshape(projection.shape)
    d_span_key = d_span_key.reshape(query.shape) if keyed else None
    return d_query.reshape(query.shape), d_span_key, d_projection


# Kernels; rows and positions are one axis.


def _filters_kernel(_, query, span_key, matrix, bias, out, *, count, channels, heads, group, taps):
    """Computes filters; a program is (block of positions, group of heads)."""
    positions = block_range(program_id(0))
    columns = program_id(1) * group * taps + padded_range(group * taps)
    real = (positions < count)[:, None]

    def step(i, logits):
        lanes = padded_range(CHUNK, i * CHUNK)
        inside = lanes < channels
        place = (positions[:, None], lanes[None, :])
        mask = real & inside[None, :]
        product = load(query.at[place], mask)
        if span_key is not None:
            product *= load(span_key.at[place], mask)
        factor = load(matrix.at[lanes[:, None], columns[None, :]], inside[:, None])
        return logits + dot(product, factor)

    logits = jnp.zeros((len(positions), len(columns)), jnp.float32)
    logits = jax.lax.fori_loop(0, math.ceil(channels / CHUNK), step, logits)
    logits += load_f32(bias.at[columns], None)[None, :]
    by_head = logits.reshape(len(positions), group, taps)
    powers = jnp.exp(by_head - jnp.max(by_head, axis=2, keepdims=True))
    filters = powers / jnp.sum(powers, axis=2, keepdims=True)
    own = program_id(1) * group + padded_range(group)
    tap = padded_range(taps)
    place = out.at[positions[:, None, None], own[None, :, None], tap[None, None, :]]
    store(place, filters, real[:, :, None] & (own < heads)[None, :, None])


def _products_kernel(
    ids, query, span_key, projection, d_logits, d_query, d_span_key, d_projection,
    *, count, channels, outputs, chunk, splits,
):  # fmt: skip
    """Computes the gradient of logits = (query * span_key) projection.

    A program is (chunk of channels, split of the positions). Padding is masked, since it may hold
    NaN and 0 * NaN is NaN.
    """
    split = program_id(1)
    lanes = padded_range(chunk, program_id(0) * chunk)
    columns = padded_range(max(TENSOR_CORE, outputs))
    inside, used = lanes < channels, columns < outputs
    place = projection.at[lanes[None, :], columns[:, None]]
    transposed = load(place, inside[None, :] & used[:, None])
    steps = math.ceil(math.ceil(count / BLOCK) / splits)

    def step(i, sums):
        positions = block_range(split * steps + i)
        real = positions < count
        if ids is not None:
            real &= load(ids.at[positions], real) != 0
        mask = real[:, None] & used[None, :]
        gradient = load(d_logits.at[positions[:, None], columns[None, :]], mask)
        d_product = dot(gradient, transposed)
        place = (positions[:, None], lanes[None, :])
        mask = real[:, None] & inside[None, :]
        product = load(query.at[place], mask)
        stored = (positions < count)[:, None] & inside[None, :]
        if span_key is not None:
            one, other = product, load(span_key.at[place], mask)
            store(d_span_key.at[place], d_product * one.astype(jnp.float32), stored)
            d_product *= other.astype(jnp.float32)
            product = one * other
        store(d_query.at[place], d_product, stored)
        return sums + dot(product.T, gradient)

    sums = jnp.zeros((len(lanes), len(columns)), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, sums)
    place = d_projection.at[split, lanes[:, None], columns[None, :]]
    store(place, sums, inside[:, None] & used[None, :])
