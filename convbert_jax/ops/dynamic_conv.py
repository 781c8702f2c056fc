"""Dynamic convolution over time: each position and head brings its own filter.

Axes legend of the whole package: B batch, L length, C channels, H heads, D head width, K taps,
V vocabulary, E embedding channels, N layers, M masked positions.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import reference, taps, xla

Implementation = Literal["auto", "reference", "xla"]

# name -> f(values, weights, segment_ids or None, offsets); each owns its gradient.
IMPLEMENTATIONS = {"reference": reference.dynamic_conv, "xla": xla.dynamic_conv}

# What "auto" takes on each platform. Kernels enter here by their platform: tpu, cuda, rocm.
AUTO = {"default": "xla"}


def dynamic_conv(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "B L H K"],
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
      weights: one filter for each position and head.
      segment_ids: taps never cross a segment boundary; padding (0) is never read and outputs 0,
        whatever values and weights hold there, NaN included. None: one segment without padding.
      dilation: distance between neighboring taps.
      causal: read the position itself and the past only.
      implementation: a key of IMPLEMENTATIONS, or "auto": chosen for the platform it is lowered
        for.

    Returns:
      [B, L, H, D] in the dtype of `values`; products and sums are float32.

    Raises:
      ValueError: an argument of the wrong shape or value; the message names it.
    """
    _check(values, weights, segment_ids, dilation, implementation)
    offsets = taps.offsets(weights.shape[-1], dilation=dilation, causal=causal)
    if implementation != "auto":
        return IMPLEMENTATIONS[implementation](values, weights, segment_ids, offsets)
    by_platform = {platform: _bind(name, offsets) for platform, name in AUTO.items()}
    return jax.lax.platform_dependent(values, weights, segment_ids, **by_platform)


def _bind(name, offsets):
    return lambda values, weights, ids: IMPLEMENTATIONS[name](values, weights, ids, offsets)


def _check(values, weights, segment_ids, dilation, implementation):
    def refuse(name, is_now, must):
        raise ValueError(f"dynamic_conv: {name} is {is_now}, but must be {must}.")

    if values.ndim != 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        refuse("values", f"{values.dtype}{list(values.shape)}", "floating [B, L, H, D]")
    if (
        weights.ndim != 4
        or weights.shape[:3] != values.shape[:3]
        or weights.shape[3] < 1
        or not jnp.issubdtype(weights.dtype, jnp.floating)
    ):
        expected = ", ".join(str(size) for size in values.shape[:3])
        refuse("weights", f"{weights.dtype}{list(weights.shape)}", f"floating [{expected}, K]")
    if segment_ids is not None and (
        segment_ids.shape != values.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        expected = list(values.shape[:2])
        refuse("segment_ids", f"{segment_ids.dtype}{list(segment_ids.shape)}", f"integer{expected}")
    if dilation < 1:
        refuse("dilation", dilation, "at least 1")
    if implementation not in ("auto", *IMPLEMENTATIONS):
        refuse("implementation", repr(implementation), f"auto, {' or '.join(IMPLEMENTATIONS)}")
