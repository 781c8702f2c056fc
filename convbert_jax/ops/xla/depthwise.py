"""Depthwise convolution in XLA: one shifted multiply-add per tap, also in the gradients."""

import functools

import jax
import jax.numpy as jnp

from convbert_jax.ops import taps


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def depthwise_conv(x, filters, segment_ids, offsets):
    return _filter(x, filters, segment_ids, offsets).astype(x.dtype)


def _forward(x, filters, segment_ids, offsets):
    return depthwise_conv(x, filters, segment_ids, offsets), (x, filters, segment_ids)


def _backward(offsets, saved, cotangent):
    x, filters, segment_ids = saved
    d_x = _filter(cotangent, filters, segment_ids, tuple(-offset for offset in offsets))
    products = _masked(
        [_product(read, cotangent) for read in taps.shifted(x, offsets)],
        segment_ids,
        offsets,
    )
    d_filters = jnp.stack([product.sum(axis=(0, 1)) for product in products])
    return d_x.astype(x.dtype), d_filters.astype(filters.dtype), None


depthwise_conv.defvjp(_forward, _backward)


def _filter(x, filters, segment_ids, offsets):
    products = [_product(read, filters[i]) for i, read in enumerate(taps.shifted(x, offsets))]
    return sum(_masked(products, segment_ids, offsets))


def _product(a, b):
    return a.astype(jnp.float32) * b.astype(jnp.float32)


def _masked(products, segment_ids, offsets):
    if segment_ids is None:
        return products
    allowed = taps.visible(segment_ids, offsets)
    return [
        jnp.where(mask[..., None], product, 0)
        for mask, product in zip(allowed, products, strict=True)
    ]
