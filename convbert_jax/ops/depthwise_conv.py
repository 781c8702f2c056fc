"""Depthwise convolution over time: one fixed filter per channel, taps as in `dynamic_conv`."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, pallas_tpu_depthwise, taps

Implementation = Literal["auto", "xla", "pallas_tpu"]


def depthwise_conv(
    x: Float[Array, "B L C"],
    filters: Float[Array, "K C"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    dilation: int = 1,
    causal: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B L C"]:
    """out[b, t, c] = sum over i of filters[i, c] * x[b, t + (i - K // 2) * dilation, c].

    Causal: t - (K - 1 - i) * dilation. What lies outside the row reads as 0.

    Args:
      x: inputs.
      filters: one filter of K taps per channel, in correlation order.
      segment_ids: taps never cross a segment boundary; padding (0) is never read and outputs 0.
      dilation: distance between neighboring taps.
      causal: read the position itself and the past only.
      implementation: a key of IMPLEMENTATIONS, or "auto": chosen for the platform (AUTO). One that
        is named never gives way to another.

    Returns:
      [B, L, C] in the dtype of `x`; products and sums are float32.

    Raises:
      ValueError: shapes that do not fit, a dilation below 1, or an implementation that does not
        run on the devices at hand; the message names the argument.
    """
    if x.ndim != 3:
        raise ValueError(f"depthwise_conv: x is {list(x.shape)}, but must be [B, L, C].")
    if filters.ndim != 2 or filters.shape[1] != x.shape[2] or filters.shape[0] < 1:
        raise ValueError(
            f"depthwise_conv: filters is {list(filters.shape)}, but must be [K, {x.shape[2]}]."
        )
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(
            f"depthwise_conv: segment_ids is {list(segment_ids.shape)}, "
            f"but must be {list(x.shape[:2])}."
        )
    if dilation < 1:
        raise ValueError(f"depthwise_conv: dilation is {dilation}, but must be at least 1.")
    function = dispatch.choose("depthwise_conv", implementation, IMPLEMENTATIONS, AUTO)
    offsets = taps.offsets(len(filters), dilation=dilation, causal=causal)
    return function(x, filters, segment_ids, offsets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _depthwise_conv(x, filters, segment_ids, offsets):
    return _filter(x, filters, segment_ids, offsets).astype(x.dtype)


def _forward(x, filters, segment_ids, offsets):
    return _depthwise_conv(x, filters, segment_ids, offsets), (x, filters, segment_ids)


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


_depthwise_conv.defvjp(_forward, _backward)


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


def _on_mesh(x, filters, segment_ids, offsets):
    inside = [tap for tap, offset in enumerate(offsets) if abs(offset) < x.shape[1]]
    offsets = tuple(offsets[tap] for tap in inside)
    return dispatch.over_mesh(
        lambda *arrays: pallas_tpu_depthwise.depthwise_conv(*arrays, offsets),
        (x, filters[jnp.asarray(inside)] if len(inside) < len(filters) else filters, segment_ids),
        (None, -1, None),
    )


# name -> f(x, filters, segment_ids or None, offsets); each owns its gradient.
IMPLEMENTATIONS = {"xla": _depthwise_conv, "pallas_tpu": _on_mesh}
AUTO = {"tpu": "pallas_tpu", "default": "xla"}
