"""Dynamic convolution fused with the computation of its filters from a span or a token.

On accelerators moving the filters through memory costs more than computing them. The kernels
therefore compute projection, softmax and convolution on chip, and the backward pass recomputes the
filters instead of reading them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, gpu, reference, taps, tpu, xla
from convbert_jax.ops.depthwise_conv import gpu_refuses, left_on_gpu, tpu_refuses
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import POSITIONS, WHOLE, Halo


def _on_mesh(function, kernel=True):
    def run(*arguments):
        *arrays, heads, offsets = arguments
        values = 0 if arrays[2] is None else 2
        # The logits of a head need the channels of all heads, so `tensor` cannot split heads.
        return division.over_mesh(
            lambda *arrays: function(*arrays, heads, offsets),
            arrays,
            (POSITIONS, POSITIONS, POSITIONS, WHOLE, WHOLE, POSITIONS),
            POSITIONS,
            halo=Halo(offsets, read=(values, 5)),
            kernel=kernel,
        )

    return run


def _with_values(implementation):
    """Wraps an implementation that requires values: None becomes the query."""

    def run(query, span_key, values, *rest):
        return implementation(query, span_key, query if values is None else values, *rest)

    return run


# name -> f(query, span_key or None, values or None, projection, bias, segment_ids or None, heads,
# offsets)
IMPLEMENTATIONS = {
    "pallas_tpu": Implementation(_on_mesh(tpu.span_dynamic_conv), "tpu", tpu_refuses),
    "pallas_gpu": Implementation(
        _with_values(_on_mesh(gpu.span_dynamic_conv)), "gpu", gpu_refuses, left_on_gpu
    ),
    "xla": Implementation(_with_values(_on_mesh(xla.span_dynamic_conv, kernel=False))),
    "reference": Implementation(_with_values(_on_mesh(reference.span_dynamic_conv, kernel=False))),
}


@jax.named_scope("convolution")
def span_dynamic_conv(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"] | None,
    values: Float[Array, "B L C"] | None,
    projection: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    *,
    heads: int,
    segment_ids: Int[Array, "B L"] | None = None,
    dilation: int = 1,
    causal: bool = False,
    implementation: str = "auto",
) -> Float[Array, "B L C"]:
    """Computes LConv(values, softmax(W_f (query * span_key))) (ConvBERT eq. 4), C = heads * D.

    The query is not scaled. The softmax runs over all K taps of each head in float32, without
    dropout, as in the official code; the weights of invisible taps are then set to 0.

    Args:
      query, span_key: the filter of a position depends on their product. Without a span key it
        depends on the query alone: dynamic convolution of Wu et al. 2019, §3.
      values: inputs, as in `dynamic_conv`; None: the query, as in DynamicConv.
      projection, bias: W_f, maps all C channels to the K taps of head 0, of head 1, ...
      heads: H; divides C and the columns of `projection`.
      segment_ids, dilation, causal, implementation: as in `dynamic_conv`.

    Returns:
      [B, L, C] in the dtype of the query.

    Raises:
      ValueError: an argument has the wrong shape or value, or the implementation does not support
        this call on the available devices.
    """
    _check(query, span_key, values, projection, bias, heads, segment_ids, dilation)
    offsets = taps.offsets(projection.shape[1] // heads, dilation=dilation, causal=causal)
    arguments = (query, span_key, values, projection, bias, segment_ids, heads, offsets)
    return dispatch.choose("span_dynamic_conv", implementation, IMPLEMENTATIONS, *arguments)(
        *arguments
    )


def span_filters(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"] | None,
    projection: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    *,
    heads: int,
    dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "B L H K"]:
    """Returns the filters of `span_dynamic_conv`, before invisible taps are set to 0."""
    return xla.span_filters(query, span_key, projection, bias, heads, dtype)


def _check(query, span_key, values, projection, bias, heads, segment_ids, dilation):
    def refuse(name, is_now, must):
        raise ValueError(f"span_dynamic_conv: {name} must be {must}, got {is_now}.")

    values = query if values is None else values
    if values.ndim != 3 or not jnp.issubdtype(values.dtype, jnp.floating):
        refuse("values", f"{values.dtype}{list(values.shape)}", "floating [B, L, C]")
    for name, array in (("query", query), ("span_key", span_key)):
        if array is None and name == "span_key":
            continue
        if array.shape != values.shape or array.dtype != values.dtype:
            expected = f"{values.dtype}{list(values.shape)} like values"
            refuse(name, f"{array.dtype}{list(array.shape)}", expected)
    channels = values.shape[2]
    if heads < 1 or channels % heads:
        refuse("heads", heads, f"a divisor of the {channels} channels")
    if (
        projection.ndim != 2
        or projection.shape[0] != channels
        or projection.shape[1] % heads
        or not projection.size
    ):
        refuse("projection", list(projection.shape), f"[{channels}, {heads} * K]")
    if bias.shape != projection.shape[1:]:
        refuse("bias", list(bias.shape), list(projection.shape[1:]))
    if segment_ids is not None and (
        segment_ids.shape != values.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        expected = f"integer{list(values.shape[:2])}"
        refuse("segment_ids", f"{segment_ids.dtype}{list(segment_ids.shape)}", expected)
    if dilation < 1:
        refuse("dilation", dilation, "at least 1")
