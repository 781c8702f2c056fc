"""Convolutions over time: depthwise, dynamic, light and span-based dynamic.

A depthwise filter belongs to a channel, a light filter to a head, and a dynamic filter to a
position and head. The span-based op computes its filters too: on accelerators moving filters
through memory costs more than computing them, so the kernels compute projection, softmax and
convolution on chip, and the backward pass recomputes the filters instead of reading them.

The `*_step` functions compute one position of a causal convolution, for decoding. A filter of K
taps reads the new position and the (K - 1) * dilation positions before it. The decoder keeps only
this window of P = (K - 1) * dilation + 1 positions of each row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, gpu, partitioning, reference, tpu, xla
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.partitioning import (
    HEADS,
    POSITIONS,
    POSITIONS_AND_HEADS,
    REPLICATED,
    Halo,
)


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
      implementation: a key of the op's table in IMPLEMENTATIONS, or "auto"; see `dispatch.choose`.

    Returns:
      [B, L, C] in the dtype of `x`; products and sums are float32.

    Raises:
      ValueError: shapes do not match, the dilation is below 1, or the implementation does not
        support this call on the available devices.
    """
    op = "depthwise_conv"
    if x.ndim != 3:
        _refuse(op, "x", list(x.shape), "[B, L, C]")
    if filters.ndim != 2 or filters.shape[1] != x.shape[2] or filters.shape[0] < 1:
        _refuse(op, "filters", list(filters.shape), f"[K, {x.shape[2]}]")
    _check_segments(op, segment_ids, x.shape[:2], dilation)
    offsets = xla.tap_offsets(len(filters), dilation=dilation, causal=causal)
    return _run(op, implementation, x, filters, segment_ids, offsets)


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
      dilation, causal, implementation: as in `depthwise_conv`.

    Returns:
      [B, L, H, D] in the dtype of `values`; products and sums are float32.

    Raises:
      ValueError: an argument has the wrong shape or value, or the implementation does not support
        this call on the available devices.
    """
    op = "dynamic_conv"
    if values.ndim != 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        _refuse(op, "values", f"{values.dtype}{list(values.shape)}", "floating [B, L, H, D]")
    if (
        filters.shape[:-1] not in (values.shape[:3], values.shape[2:3])
        or filters.shape[-1] < 1
        or not jnp.issubdtype(filters.dtype, jnp.floating)
    ):
        expected = ", ".join(str(size) for size in values.shape[:3])
        expected = f"floating [{expected}, K] or [{values.shape[2]}, K]"
        _refuse(op, "filters", f"{filters.dtype}{list(filters.shape)}", expected)
    _check_segments(op, segment_ids, values.shape[:2], dilation)
    offsets = xla.tap_offsets(filters.shape[-1], dilation=dilation, causal=causal)
    table = "light_conv" if filters.ndim == 2 else op
    return _run(op, implementation, values, filters, segment_ids, offsets, table=table)


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
    op, given = "span_dynamic_conv", query if values is None else values
    if given.ndim != 3 or not jnp.issubdtype(given.dtype, jnp.floating):
        _refuse(op, "values", f"{given.dtype}{list(given.shape)}", "floating [B, L, C]")
    for name, array in (("query", query), ("span_key", query if span_key is None else span_key)):
        if array.shape != given.shape or array.dtype != given.dtype:
            expected = f"{given.dtype}{list(given.shape)} like values"
            _refuse(op, name, f"{array.dtype}{list(array.shape)}", expected)
    channels = given.shape[2]
    if heads < 1 or channels % heads:
        _refuse(op, "heads", heads, f"a divisor of the {channels} channels")
    if (
        projection.ndim != 2
        or projection.shape[0] != channels
        or projection.shape[1] % heads
        or not projection.size
    ):
        _refuse(op, "projection", list(projection.shape), f"[{channels}, {heads} * K]")
    if bias.shape != projection.shape[1:]:
        _refuse(op, "bias", list(bias.shape), list(projection.shape[1:]))
    _check_segments(op, segment_ids, given.shape[:2], dilation)
    offsets = xla.tap_offsets(projection.shape[1] // heads, dilation=dilation, causal=causal)
    arrays = (query, span_key, values, projection, bias, segment_ids)
    return _run(op, implementation, *arrays, heads, offsets)


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


def dynamic_conv_step(
    window: Float[Array, "B P H D"], filters: Float[Array, "*B H K"], *, dilation: int = 1
) -> Float[Array, "B H D"]:
    """Returns the output of causal `dynamic_conv` at the last position of the window.

    Args:
      window: inputs of the last P positions; 0 before the start of the row.
      filters: filters of this position, or [H, K] for all positions and rows.
      dilation: distance between neighboring taps.

    Raises:
      ValueError: the window does not have P positions.
    """
    reads = _window_reads("dynamic_conv_step", window, filters.shape[-1], dilation)
    shares = jnp.moveaxis(filters, -1, -2)[..., None].astype(jnp.float32)  # [..., K, H, 1]
    return (reads * shares).sum(axis=1).astype(window.dtype)


def depthwise_conv_step(
    window: Float[Array, "B P C"], filters: Float[Array, "K C"], *, dilation: int = 1
) -> Float[Array, "B C"]:
    """Returns the output of causal `depthwise_conv` at the last position of the window."""
    reads = _window_reads("depthwise_conv_step", window, len(filters), dilation)
    return (reads * filters.astype(jnp.float32)).sum(axis=1).astype(window.dtype)


def _window_reads(op, window, taps, dilation):
    """Returns the inputs of all taps, in float32."""
    positions = (taps - 1) * dilation + 1
    if window.shape[1] != positions:
        raise ValueError(
            f"{op}: window is {list(window.shape)} but must have {positions} positions for "
            f"{taps} taps with dilation {dilation}."
        )
    return window[:, ::dilation].astype(jnp.float32)


def _refuse(op, name, actual, expected):
    raise ValueError(f"{op}: {name} must be {expected}, got {actual}.")


def _check_segments(op, segment_ids, shape, dilation):
    if segment_ids is not None and (
        segment_ids.shape != shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        actual = f"{segment_ids.dtype}{list(segment_ids.shape)}"
        _refuse(op, "segment_ids", actual, f"integer{list(shape)}")
    if dilation < 1:
        _refuse(op, "dilation", dilation, "at least 1")


def _run(op, implementation, *arguments, table=None):
    table = IMPLEMENTATIONS[table or op]
    return dispatch.choose(op, implementation, table, *arguments)(*arguments)


# --- Implementations on a mesh ---


def _on_mesh(function, specs, out_spec, read=(0, 2), kernel=True):
    """Partitions an implementation over the mesh.

    Args:
      function: called with an array or None for each spec, then static values, the last of which
        are the offsets.
      read: indices of the arrays that the taps read.
    """

    def run(*arguments):
        static = arguments[len(specs) :]
        return partitioning.shard_map_op(
            lambda *arrays: function(*arrays, *static),
            arguments[: len(specs)],
            specs,
            out_spec,
            halo=Halo(static[-1], read=read),
            kernel=kernel,
        )

    return run


def _depthwise(function, kernel=True):
    return _on_mesh(function, (POSITIONS, REPLICATED, POSITIONS), POSITIONS, kernel=kernel)


def _dynamic(function, kernel=True):
    specs = POSITIONS_AND_HEADS, POSITIONS_AND_HEADS, POSITIONS
    return _on_mesh(function, specs, POSITIONS_AND_HEADS, kernel=kernel)


def _light(depthwise):
    """Expresses light convolution by `depthwise`: all channels of a head share its filter."""

    def run(values, filters, segment_ids, offsets):
        x = values.reshape(*values.shape[:2], -1)
        of_channels = jnp.repeat(filters.T, values.shape[3], axis=1)
        return depthwise(x, of_channels, segment_ids, offsets).reshape(values.shape)

    return run


def _light_on_tpu(values, filters, segment_ids, offsets):
    """Runs the banded kernel if it is cheaper, else the depthwise kernel."""
    if tpu.light_suits(offsets):
        specs = POSITIONS_AND_HEADS, jax.P(HEADS), POSITIONS
        light = _on_mesh(tpu.light_conv, specs, POSITIONS_AND_HEADS)
    else:
        light = _light(_depthwise(tpu.depthwise_conv))
    return light(values, filters, segment_ids, offsets)


def _span(function, kernel=True):
    # The logits of a head need the channels of all heads, so `tensor` cannot split heads.
    specs = POSITIONS, POSITIONS, POSITIONS, REPLICATED, REPLICATED, POSITIONS

    def run(*arguments):
        values = 0 if arguments[2] is None else 2
        on_mesh = _on_mesh(function, specs, POSITIONS, read=(values, 5), kernel=kernel)
        return on_mesh(*arguments)

    return run


def _with_values(span):
    """Wraps an implementation that requires values: None becomes the query."""

    def run(query, span_key, values, *rest):
        return span(query, span_key, query if values is None else values, *rest)

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


def _table(pallas_tpu, pallas_gpu, in_xla, in_reference):
    return {
        "pallas_tpu": Implementation(pallas_tpu, "tpu", tpu_refuses),
        "pallas_gpu": Implementation(pallas_gpu, "gpu", gpu_refuses, left_on_gpu),
        "xla": Implementation(in_xla),
        "reference": Implementation(in_reference),
    }


# op -> name -> Implementation; `function` is called with
#   depthwise_conv: x, filters, segment_ids or None, offsets
#   dynamic_conv: values, filters [B, L, H, K], segment_ids or None, offsets
#   light_conv: values, filters [H, K], segment_ids or None, offsets
#   span_dynamic_conv: query, span_key or None, values or None, projection, bias,
#     segment_ids or None, heads, offsets
IMPLEMENTATIONS = {
    "depthwise_conv": _table(
        _depthwise(tpu.depthwise_conv),
        _depthwise(gpu.depthwise_conv),
        _depthwise(xla.depthwise_conv, kernel=False),
        _depthwise(reference.depthwise_conv, kernel=False),
    ),
    "dynamic_conv": _table(
        _dynamic(tpu.dynamic_conv),
        _dynamic(gpu.dynamic_conv),
        _dynamic(xla.dynamic_conv, kernel=False),
        _dynamic(reference.dynamic_conv, kernel=False),
    ),
    "light_conv": _table(
        _light_on_tpu,
        _light(_depthwise(gpu.depthwise_conv)),
        _light(_depthwise(xla.depthwise_conv, kernel=False)),
        _light(_depthwise(reference.depthwise_conv, kernel=False)),
    ),
    "span_dynamic_conv": _table(
        _span(tpu.span_dynamic_conv),
        _with_values(_span(gpu.span_dynamic_conv)),
        _with_values(_span(xla.span_dynamic_conv, kernel=False)),
        _with_values(_span(reference.span_dynamic_conv, kernel=False)),
    ),
}
