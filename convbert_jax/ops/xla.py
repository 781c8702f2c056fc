"""Convolutions in XLA operations, for all platforms: one shifted multiply-add per tap.

XLA fuses the taps into one loop. No array of size [B, L, H, D, K] is stored, in the gradients
neither. They are written by hand in the same form; autodiff of the shifts would add K padded arrays
one by one.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from convbert_jax.ops import partitioning
from convbert_jax.ops.nn import softmax
from convbert_jax.ops.products import dense


def tap_offsets(taps: int, *, dilation: int = 1, causal: bool = False) -> tuple[int, ...]:
    """Returns the offset that each tap reads at, relative to its position (correlation order).

    Centered: tap i reads at (i - taps // 2) * dilation, so an even filter has one more tap on the
    left. Causal: the last tap reads the position itself, the others earlier positions.
    """
    center = taps - 1 if causal else taps // 2
    return tuple((i - center) * dilation for i in range(taps))


def shift(x: Array, steps: Sequence[int]) -> list[Array]:
    """Returns `x` shifted along axis 1 by each step: position t holds x[:, t + step], 0 outside."""
    length = x.shape[1]
    left, right = max(0, -min(steps)), max(0, *steps)
    padded = jnp.pad(x, ((0, 0), (left, right)) + ((0, 0),) * (x.ndim - 2))
    return [padded[:, left + step : left + step + length] for step in steps]


def visible_taps(segment_ids: Int[Array, "B L"], steps: Sequence[int]) -> list[Bool[Array, "B L"]]:
    """Returns for each step whether position t + step is in the row and in the segment of t.

    Padding (segment 0) neither sees nor is seen.
    """
    real = segment_ids != 0
    return [(other == segment_ids) & real for other in shift(segment_ids, steps)]


def _mask(products, segment_ids, offsets):
    """Yields products, 0 for invisible taps. Uses `where`, since 0 * NaN is NaN."""
    if segment_ids is None:
        yield from products
        return
    for mask, product in zip(visible_taps(segment_ids, offsets), products, strict=True):
        yield jnp.where(mask[(..., *[None] * (product.ndim - 2))], product, 0)


# --- Depthwise convolution ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def depthwise_conv(x, filters, segment_ids, offsets):
    return _depthwise(x, filters, segment_ids, offsets).astype(x.dtype)


def _depthwise_forward(x, filters, segment_ids, offsets):
    return depthwise_conv(x, filters, segment_ids, offsets), (x, filters, segment_ids)


def _depthwise_backward(offsets, saved, cotangent):
    x, filters, segment_ids = saved
    d_x = _depthwise(cotangent, filters, segment_ids, tuple(-offset for offset in offsets))
    products = [_multiply(read, cotangent) for read in shift(x, offsets)]
    products = list(_mask(products, segment_ids, offsets))
    d_filters = jnp.stack([product.sum(axis=(0, 1)) for product in products])
    return d_x.astype(x.dtype), d_filters.astype(filters.dtype), None


depthwise_conv.defvjp(_depthwise_forward, _depthwise_backward)


def _depthwise(x, filters, segment_ids, offsets):
    products = [_multiply(read, filters[i]) for i, read in enumerate(shift(x, offsets))]
    return sum(list(_mask(products, segment_ids, offsets)))


def _multiply(a, b):
    return a.astype(jnp.float32) * b.astype(jnp.float32)


# --- Dynamic convolution ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dynamic_conv(values, filters, segment_ids, offsets):
    products = (_product(read, filters[..., i]) for i, read in enumerate(shift(values, offsets)))
    return sum(_mask(products, segment_ids, offsets)).astype(values.dtype)


def _dynamic_forward(values, filters, segment_ids, offsets):
    out = dynamic_conv(values, filters, segment_ids, offsets)
    return out, (values, filters, segment_ids)


def _dynamic_backward(offsets, saved, cotangent):
    values, filters, segment_ids = saved
    # A position gets gradients from every position that read it, so offsets are negated.
    back = tuple(-offset for offset in offsets)
    given = shift(filters, back)
    products = (
        _product(reader, given[i][..., i]) for i, reader in enumerate(shift(cotangent, back))
    )
    d_values = sum(_mask(products, segment_ids, back))
    d_filters = _dots(shift(values, offsets), cotangent)
    if segment_ids is not None:
        allowed = jnp.stack(visible_taps(segment_ids, offsets), axis=-1)
        d_filters = jnp.where(allowed[:, :, None], d_filters, 0)
    return d_values.astype(values.dtype), d_filters.astype(filters.dtype), None


dynamic_conv.defvjp(_dynamic_forward, _dynamic_backward)


def _product(values, filters):
    return values.astype(jnp.float32) * filters.astype(jnp.float32)[..., None]


def _dots(reads, cotangent):
    """Returns the dot products [B, L, H, K] of each tap's input and the cotangent over the width D.

    One reduction covers all taps: XLA:CPU would pass separate ones to a library that needs its
    operands in memory, K shifted copies of the values.
    """
    cotangent = cotangent.astype(jnp.float32)
    products = tuple(read.astype(jnp.float32) * cotangent for read in reads)
    zeros = (jnp.float32(0),) * len(products)
    sums = jax.lax.reduce(products, zeros, _add, (3,))
    return jnp.stack(sums, axis=-1)


def _add(left, right):
    return tuple(one + other for one, other in zip(left, right, strict=True))


# --- Span-based dynamic convolution: projection, softmax and dynamic convolution in turn ---


def span_dynamic_conv(query, span_key, values, projection, bias, segment_ids, heads, offsets):
    filters = span_filters(query, span_key, projection, bias, heads, query.dtype)
    by_head = values.reshape(*values.shape[:2], heads, -1)
    return dynamic_conv(by_head, filters, segment_ids, offsets).reshape(values.shape)


def span_filters(query, span_key, projection, bias, heads, dtype):
    """Returns filters [B, L, H, K] in `dtype`: float32 softmax over all taps, visible or not."""
    products = query if span_key is None else query * span_key
    logits = dense(partitioning.constrain_activations(products), projection, bias, jnp.float32)
    return softmax(logits.reshape(*query.shape[:2], heads, -1), None, dtype)
