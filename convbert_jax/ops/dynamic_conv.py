"""Dynamic convolution over time: each position and head brings its own filter.

Axes legend of the whole package: B batch, L length, C channels, H heads, D head width, K taps,
V vocabulary, E embedding channels, N layers, M masked positions.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import (
    depthwise_conv,
    dispatch,
    pallas_gpu,
    pallas_tpu,
    reference,
    taps,
    xla,
)

Implementation = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"]


def _on_mesh(kernel):
    def run(values, weights, segment_ids, offsets):
        return dispatch.over_mesh(
            lambda *arrays: kernel(*arrays, offsets), (values, weights, segment_ids), (2, 2, None)
        )

    return run


def _at_every_position(function):
    """For weights [H, K]: the same filters everywhere."""

    def run(values, weights, segment_ids, offsets):
        weights = jnp.broadcast_to(weights, (*values.shape[:2], *weights.shape))
        return function(values, weights, segment_ids, offsets)

    return run


def _of_every_channel(function):
    """For weights [H, K]: a depthwise convolution, each channel with the filter of its head."""

    def run(values, weights, segment_ids, offsets):
        batch, length, heads, width = values.shape
        x = values.reshape(batch, length, heads * width)
        out = function(x, jnp.repeat(weights.T, width, axis=1), segment_ids, offsets)
        return out.reshape(values.shape)

    return run


# name -> f(values, weights [B, L, H, K], segment_ids or None, offsets); each owns its gradient.
IMPLEMENTATIONS = {
    "reference": reference.dynamic_conv,
    "xla": xla.dynamic_conv,
    "pallas_tpu": _on_mesh(pallas_tpu.dynamic_conv),
    "pallas_gpu": _on_mesh(pallas_gpu.dynamic_conv),
}

# The same for weights [H, K].
LIGHT_IMPLEMENTATIONS = {
    "reference": _at_every_position(reference.dynamic_conv),
    "xla": _of_every_channel(depthwise_conv.IMPLEMENTATIONS["xla"]),
    "pallas_tpu": _of_every_channel(depthwise_conv.IMPLEMENTATIONS["pallas_tpu"]),
    "pallas_gpu": _at_every_position(IMPLEMENTATIONS["pallas_gpu"]),
}

# What "auto" takes. The GPU kernels have not run on a GPU yet, so they are taken by name only.
AUTO = {"tpu": "pallas_tpu", "default": "xla"}


def dynamic_conv(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "*BL H K"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    dilation: int = 1,
    causal: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B L H D"]:
    """out[b, t, h] = sum over i of weights[b, t, h, i] * values[b, t + offset(i), h].

    Tap i reads position t + (i - K // 2) * dilation (correlation order, no flip; for even K one
    more tap on the left), causal: t - (K - 1 - i) * dilation. What lies outside the row reads as 0.
    This is LConv of ConvBERT §2.2 (Wu et al. 2019, §3) with weights that were already normalized.

    Args:
      values: what is summed, shared filter over the D channels of a head.
      weights: one filter for each position and head, or [H, K] for all positions (LightConv).
      segment_ids: taps never cross a segment boundary; padding (0) is never read and outputs 0,
        whatever values and weights hold there, NaN included. None: one segment without padding.
      dilation: distance between neighboring taps.
      causal: read the position itself and the past only.
      implementation: a key of IMPLEMENTATIONS, or "auto": chosen for the platform (AUTO). One that
        is named never gives way to another.

    Returns:
      [B, L, H, D] in the dtype of `values`; products and sums are float32.

    Raises:
      ValueError: an argument of the wrong shape or value, or an implementation that does not run
        on the devices at hand; the message names it.
    """
    _check(values, weights, segment_ids, dilation)
    implementations = LIGHT_IMPLEMENTATIONS if weights.ndim == 2 else IMPLEMENTATIONS
    function = dispatch.choose("dynamic_conv", implementation, implementations, AUTO)
    offsets = taps.offsets(weights.shape[-1], dilation=dilation, causal=causal)
    return function(values, weights, segment_ids, offsets)


def _check(values, weights, segment_ids, dilation):
    def refuse(name, is_now, must):
        raise ValueError(f"dynamic_conv: {name} is {is_now}, but must be {must}.")

    if values.ndim != 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        refuse("values", f"{values.dtype}{list(values.shape)}", "floating [B, L, H, D]")
    if (
        weights.shape[:-1] not in (values.shape[:3], values.shape[2:3])
        or weights.shape[-1] < 1
        or not jnp.issubdtype(weights.dtype, jnp.floating)
    ):
        expected = ", ".join(str(size) for size in values.shape[:3])
        refuse(
            "weights",
            f"{weights.dtype}{list(weights.shape)}",
            f"floating [{expected}, K] or [{values.shape[2]}, K]",
        )
    if segment_ids is not None and (
        segment_ids.shape != values.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        expected = list(values.shape[:2])
        refuse("segment_ids", f"{segment_ids.dtype}{list(segment_ids.shape)}", f"integer{expected}")
    if dilation < 1:
        refuse("dilation", dilation, "at least 1")
