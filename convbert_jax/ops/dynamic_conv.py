"""Dynamic convolution over time: one filter per position and head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import depthwise_conv, dispatch, gpu, reference, taps, tpu, xla
from convbert_jax.ops.depthwise_conv import gpu_refuses, left_on_gpu, tpu_refuses
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import HEADS, POSITIONS, POSITIONS_AND_HEADS, Halo


def _on_mesh(function, kernel=True):
    def run(values, filters, segment_ids, offsets):
        return division.over_mesh(
            lambda *arrays: function(*arrays, offsets),
            (values, filters, segment_ids),
            (POSITIONS_AND_HEADS, POSITIONS_AND_HEADS, POSITIONS),
            POSITIONS_AND_HEADS,
            halo=Halo(offsets, read=(0, 2)),
            kernel=kernel,
        )

    return run


# name -> f(values, filters [B, L, H, K], segment_ids or None, offsets)
IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(_on_mesh(tpu.dynamic_conv), "tpu", tpu_refuses),
    "pallas_gpu": Implementation(
        _on_mesh(gpu.dynamic_conv), "gpu", gpu_refuses, left_by_auto=left_on_gpu
    ),
    "xla": Implementation(_on_mesh(xla.dynamic_conv, kernel=False)),
    "reference": Implementation(_on_mesh(reference.dynamic_conv, kernel=False)),
}


def _by_channel(depthwise):
    """Expresses the light convolution by `depthwise`: all channels of a head share its filter."""

    def run(values, filters, segment_ids, offsets):
        x = values.reshape(*values.shape[:2], -1)
        of_channels = jnp.repeat(filters.T, values.shape[3], axis=1)
        return depthwise(x, of_channels, segment_ids, offsets).reshape(values.shape)

    return run


def _light_on_tpu(values, filters, segment_ids, offsets):
    """Runs the banded kernel if it is cheaper, else the depthwise kernel."""
    if not tpu.light_suits(offsets):
        depthwise = depthwise_conv.IMPLEMENTATIONS["pallas_tpu"].function
        return _by_channel(depthwise)(values, filters, segment_ids, offsets)
    return division.over_mesh(
        lambda *arrays: tpu.light_conv(*arrays, offsets),
        (values, filters, segment_ids),
        (POSITIONS_AND_HEADS, jax.P(HEADS), POSITIONS),
        POSITIONS_AND_HEADS,
        halo=Halo(offsets, read=(0, 2)),
    )


# LightConv, one filter per head for all positions: f(values, filters [H, K], segment_ids or None,
# offsets)
LIGHT_IMPLEMENTATIONS = {
    name: Implementation(
        _light_on_tpu if name == "pallas_tpu" else _by_channel(one.function),
        one.platform,
        one.refuses,
        one.left_by_auto,
    )
    for name, one in depthwise_conv.IMPLEMENTATIONS.items()
}


@jax.named_scope("convolution")
def dynamic_conv(
    values: Float[Array, "B L H D"],
    filters: Float[Array, "*BL H K"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    dilation: int = 1,
    causal: bool = False,
    implementation: str = "auto",
) -> Float[Array, "B L H D"]:
    """Computes out[b, t, h] = sum over i of filters[b, t, h, i] * values[b, t + offset(i), h].

    Tap i reads position t + (i - K // 2) * dilation (correlation order, no flip; for even K one
    more tap on the left), or t - (K - 1 - i) * dilation if causal. Positions outside the row read
    as 0. This is LConv of ConvBERT §2.2 (Wu et al. 2019, §3); filters are already normalized.

    Args:
      values: inputs; the D channels of a head share a filter.
      filters: one filter per position and head, or [H, K] for all positions (LightConv), which
        is not broadcast in memory.
      segment_ids: taps never cross a segment boundary. Padding (0) is never read and outputs 0,
        even if values or filters are NaN there. None: one segment without padding.
      dilation: distance between neighboring taps.
      causal: read only the position itself and earlier ones.
      implementation: a key of IMPLEMENTATIONS, or "auto"; see `dispatch.choose`.

    Returns:
      [B, L, H, D] in the dtype of `values`; products and sums are float32.

    Raises:
      ValueError: an argument has the wrong shape or value, or the implementation does not support
        this call on the available devices.
    """
    _check(values, filters, segment_ids, dilation)
    offsets = taps.offsets(filters.shape[-1], dilation=dilation, causal=causal)
    arguments = (values, filters, segment_ids, offsets)
    table = LIGHT_IMPLEMENTATIONS if filters.ndim == 2 else IMPLEMENTATIONS
    return dispatch.choose("dynamic_conv", implementation, table, *arguments)(*arguments)


def _check(values, filters, segment_ids, dilation):
    def refuse(name, is_now, must):
        raise ValueError(f"dynamic_conv: {name} must be {must}, got {is_now}.")

    if values.ndim != 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        refuse("values", f"{values.dtype}{list(values.shape)}", "floating [B, L, H, D]")
    if (
        filters.shape[:-1] not in (values.shape[:3], values.shape[2:3])
        or filters.shape[-1] < 1
        or not jnp.issubdtype(filters.dtype, jnp.floating)
    ):
        expected = ", ".join(str(size) for size in values.shape[:3])
        refuse(
            "filters",
            f"{filters.dtype}{list(filters.shape)}",
            f"floating [{expected}, K] or [{values.shape[2]}, K]",
        )
    if segment_ids is not None and (
        segment_ids.shape != values.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        expected = list(values.shape[:2])
        refuse("segment_ids", f"{segment_ids.dtype}{list(segment_ids.shape)}", f"integer{expected}")
    if dilation < 1:
        refuse("dilation", dilation, "at least 1")
