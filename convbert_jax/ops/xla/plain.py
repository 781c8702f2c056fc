"""Dynamic convolution in XLA: one shifted multiply-add per tap, which XLA fuses into one loop.

No array of size [B, L, H, D, K] is stored, in the gradient neither. The gradient is written by hand
in the same form; autodiff of the shifts would add K padded arrays one by one.
"""

import functools

import jax
import jax.numpy as jnp

from convbert_jax.ops import taps


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dynamic_conv(values, filters, segment_ids, offsets):
    products = (
        _product(read, filters[..., i]) for i, read in enumerate(taps.shifted(values, offsets))
    )
    return _sum(products, segment_ids, offsets).astype(values.dtype)


def _forward(values, filters, segment_ids, offsets):
    out = dynamic_conv(values, filters, segment_ids, offsets)
    return out, (values, filters, segment_ids)


def _backward(offsets, saved, cotangent):
    values, filters, segment_ids = saved
    # A position gets gradients from every position that read it, so offsets are negated.
    back = tuple(-offset for offset in offsets)
    given = taps.shifted(filters, back)
    products = (
        _product(reader, given[i][..., i]) for i, reader in enumerate(taps.shifted(cotangent, back))
    )
    d_values = _sum(products, segment_ids, back)
    d_filters = _dots(taps.shifted(values, offsets), cotangent)
    if segment_ids is not None:
        allowed = jnp.stack(taps.visible(segment_ids, offsets), axis=-1)
        d_filters = jnp.where(allowed[:, :, None], d_filters, 0)
    return d_values.astype(values.dtype), d_filters.astype(filters.dtype), None


dynamic_conv.defvjp(_forward, _backward)


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


def _sum(products, segment_ids, offsets):
    """Sums the products of visible taps. Uses `where`, since 0 * NaN is NaN."""
    if segment_ids is None:
        return sum(products)
    allowed = taps.visible(segment_ids, offsets)
    return sum(
        jnp.where(mask[..., None, None], product, 0)
        for mask, product in zip(allowed, products, strict=True)
    )
