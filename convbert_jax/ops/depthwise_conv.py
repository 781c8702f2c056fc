"""Depthwise convolution over time: one fixed filter per channel, taps as in `dynamic_conv`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, gpu, reference, taps, tpu, xla
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import POSITIONS, WHOLE, Halo


def _on_mesh(function, kernel=True):
    def run(x, filters, segment_ids, offsets):
        return division.over_mesh(
            lambda *arrays: function(*arrays, offsets),
            (x, filters, segment_ids),
            (POSITIONS, WHOLE, POSITIONS),
            POSITIONS,
            halo=Halo(offsets, read=(0, 2)),
            kernel=kernel,
        )

    return run


def tpu_refuses(x, *_) -> str:
    """Why the TPU kernels cannot work on `x`: their 16-bit numbers are bfloat16."""
    if x.dtype in (jnp.bfloat16, jnp.float32):
        return ""
    return f"it computes in bfloat16 and float32, not {x.dtype}"


def gpu_refuses(*_) -> str:
    """Why Triton cannot compile the GPU kernels for the devices at hand."""
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    # AMD's, as "gfx90a", are no number.
    older = capability.replace(".", "").isdigit() and float(capability) < 8
    return f"it needs compute capability 8.0 or newer, not {capability}" if older else ""


def left_on_gpu(x, *_) -> str:
    """Why "auto" leaves the GPU kernels where they were not measured (benchmarks/RESULTS.md)."""
    if x.dtype.itemsize != 2:
        return f"it was measured in bfloat16, not in {x.dtype}"
    if "rocm" in jax.local_devices()[0].client.platform_version.lower():
        return "it was measured on NVIDIA's GPUs alone"
    return ""


# name -> f(x, filters, segment_ids or None, offsets)
IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(_on_mesh(tpu.depthwise_conv), "tpu", tpu_refuses),
    "pallas_gpu": Implementation(
        _on_mesh(gpu.depthwise_conv), "gpu", gpu_refuses, left_by_auto=left_on_gpu
    ),
    "xla": Implementation(_on_mesh(xla.depthwise_conv, kernel=False)),
    "reference": Implementation(_on_mesh(reference.depthwise_conv, kernel=False)),
}


@jax.named_scope("convolution")
def depthwise_conv(
    x: Float[Array, "B L C"],
    filters: Float[Array, "K C"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    dilation: int = 1,
    causal: bool = False,
    implementation: str = "auto",
) -> Float[Array, "B L C"]:
    """out[b, t, c] = sum over i of filters[i, c] * x[b, t + (i - K // 2) * dilation, c].

    Causal: t - (K - 1 - i) * dilation. What lies outside the row reads as 0.

    Args:
      x: inputs.
      filters: one filter of K taps per channel, in correlation order.
      segment_ids: taps never cross a segment boundary; padding (0) is never read and outputs 0.
      dilation: distance between neighboring taps.
      causal: read the position itself and the past only.
      implementation: as in `dispatch.choose`: a key of IMPLEMENTATIONS, or "auto".

    Returns:
      [B, L, C] in the dtype of `x`; products and sums are float32.

    Raises:
      ValueError: shapes that do not fit, a dilation below 1, or an implementation that cannot do
        it on the devices at hand; the message names the argument.
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
    offsets = taps.offsets(len(filters), dilation=dilation, causal=causal)
    arguments = (x, filters, segment_ids, offsets)
    return dispatch.choose("depthwise_conv", implementation, IMPLEMENTATIONS, *arguments)(
        *arguments
    )
