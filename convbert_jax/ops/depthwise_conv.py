"""Depthwise convolution over time: one fixed filter per channel."""

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
    """Returns why the TPU kernels do not support `x`, or "": bfloat16 is their only 16-bit type."""
    if x.dtype in (jnp.bfloat16, jnp.float32):
        return ""
    return f"supports bfloat16 and float32, not {x.dtype}"


def gpu_refuses(*_) -> str:
    """Returns why Triton cannot compile the GPU kernels for the available devices, or ""."""
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    # AMD capabilities, such as "gfx90a", are not numbers.
    older = capability.replace(".", "").isdigit() and float(capability) < 8
    return f"requires compute capability 8.0 or newer, not {capability}" if older else ""


def left_on_gpu(x, *_) -> str:
    """Returns why "auto" skips the GPU kernels, or "": benchmarks cover NVIDIA and 16 bits only."""
    if x.dtype.itemsize != 2:
        return f"was benchmarked in bfloat16, not in {x.dtype}"
    if "rocm" in jax.local_devices()[0].client.platform_version.lower():
        return "was benchmarked on NVIDIA GPUs only"
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
    """Computes out[b, t, c] = sum over i of filters[i, c] * x[b, t + (i - K // 2) * dilation, c].

    If causal, tap i reads t - (K - 1 - i) * dilation. Positions outside the row read as 0.

    Args:
      x: inputs.
      filters: one filter of K taps per channel, in correlation order.
      segment_ids: taps never cross a segment boundary; padding (0) is never read and outputs 0.
      dilation: distance between neighboring taps.
      causal: read only the position itself and earlier ones.
      implementation: a key of IMPLEMENTATIONS, or "auto"; see `dispatch.choose`.

    Returns:
      [B, L, C] in the dtype of `x`; products and sums are float32.

    Raises:
      ValueError: shapes do not match, the dilation is below 1, or the implementation does not
        support this call on the available devices.
    """
    if x.ndim != 3:
        raise ValueError(f"depthwise_conv: x must be [B, L, C], got {list(x.shape)}.")
    if filters.ndim != 2 or filters.shape[1] != x.shape[2] or filters.shape[0] < 1:
        raise ValueError(
            f"depthwise_conv: filters must be [K, {x.shape[2]}], got {list(filters.shape)}."
        )
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(
            f"depthwise_conv: segment_ids must be {list(x.shape[:2])}, "
            f"got {list(segment_ids.shape)}."
        )
    if dilation < 1:
        raise ValueError(f"depthwise_conv: dilation must be at least 1, got {dilation}.")
    offsets = taps.offsets(len(filters), dilation=dilation, causal=causal)
    arguments = (x, filters, segment_ids, offsets)
    return dispatch.choose("depthwise_conv", implementation, IMPLEMENTATIONS, *arguments)(
        *arguments
    )
