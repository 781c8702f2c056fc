"""The implementations for TPU: rows laid out for the kernels in pallas_tpu_plain.py, _span.py."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import bands, pallas_tpu_plain, pallas_tpu_span, taps, xla_span
from convbert_jax.ops.pallas_tpu_rows import Rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dynamic_conv(
    values: Float[Array, "B L H D"],
    weights: Float[Array, "B L H K"],
    segment_ids: Int[Array, "B L"] | None,
    offsets: tuple[int, ...],
    interpret: object = False,
) -> Float[Array, "B L H D"]:
    """out[b, t, h] = sum over i of weights[b, t, h, i] * values[b, t + offsets[i], h].

    Args:
      interpret: as in `pallas_call`: run without a TPU.
    """

    def one(values, weights, segment_ids, offsets):
        rows = _Rows(values.shape, offsets)
        out = pallas_tpu_plain.forward(
            rows.out(values), rows.out(weights), rows.ids(segment_ids), rows.bands,
            interpret=interpret,
        )  # fmt: skip
        return rows.back(out).reshape(values.shape)

    groups = bands.groups(offsets)
    if len(groups) == 1 and groups[0][0] == 0:
        return one(values, weights, segment_ids, offsets)
    weights = _visible(weights, segment_ids, offsets)
    values = _real(values, segment_ids)
    total = 0.0
    for base, part, chosen in _parts(groups):
        read = taps.shifted(values, (base,))[0]
        total = total + one(read, weights[..., chosen], None, part).astype(jnp.float32)
    return total.astype(values.dtype)


def _forward(values, weights, segment_ids, offsets, interpret):
    out = dynamic_conv(values, weights, segment_ids, offsets, interpret)
    return out, (values, weights, segment_ids)


def _backward(offsets, interpret, saved, cotangent):
    values, weights, segment_ids = saved

    def one(values, weights, segment_ids, offsets):
        rows = _Rows(values.shape, offsets)
        d_values, d_weights = pallas_tpu_plain.backward(
            rows.out(values), rows.out(weights), rows.ids(segment_ids), rows.out(cotangent),
            rows.bands, interpret=interpret,
        )  # fmt: skip
        return rows.back(d_values).reshape(values.shape), rows.back(d_weights).reshape(
            weights.shape
        )

    groups = bands.groups(offsets)
    if len(groups) == 1 and groups[0][0] == 0:
        return *one(values, weights, segment_ids, offsets), None
    cotangent = _real(cotangent, segment_ids)
    weights = _visible(weights, segment_ids, offsets)
    clean = _real(values, segment_ids)
    d_values, d_weights = 0.0, []
    for base, part, chosen in _parts(groups):
        read = taps.shifted(clean, (base,))[0]
        d_read, d_part = one(read, weights[..., chosen], None, part)
        d_values = d_values + taps.shifted(d_read, (-base,))[0].astype(jnp.float32)
        d_weights.append(d_part)
    d_weights = _visible(jnp.concatenate(d_weights, axis=-1), segment_ids, offsets)
    return d_values.astype(values.dtype), d_weights, None


dynamic_conv.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def span_dynamic_conv(
    query: Float[Array, "B L C"],
    span_key: Float[Array, "B L C"],
    values: Float[Array, "B L C"],
    kernel: Float[Array, "C HK"],
    bias: Float[Array, " HK"],
    segment_ids: Int[Array, "B L"] | None,
    heads: int,
    offsets: tuple[int, ...],
    interpret: object = False,
) -> Float[Array, "B L C"]:
    """LConv(values, softmax((query * span_key) kernel + bias)), as `xla_span.span_dynamic_conv`.

    Filters too long for one band take their logits and softmax from XLA.
    """
    batch, length, channels = values.shape
    if len(bands.groups(offsets)) > 1:
        weights = xla_span.weights(query, span_key, kernel, bias, heads)
        by_head = values.reshape(batch, length, heads, -1)
        out = dynamic_conv(by_head, weights, segment_ids, offsets, interpret)
        return out.reshape(values.shape)
    rows = _Rows((batch, length, heads, channels // heads), offsets)
    out = pallas_tpu_span.forward(
        rows.out(query), rows.out(span_key), rows.out(values), kernel, bias,
        rows.ids(segment_ids), rows.bands, interpret=interpret,
    )  # fmt: skip
    return rows.back(out)


def _span_forward(query, span_key, values, kernel, bias, segment_ids, heads, offsets, interpret):
    saved = query, span_key, values, kernel, bias, segment_ids
    return span_dynamic_conv(*saved, heads, offsets, interpret), saved


def _span_backward(heads, offsets, interpret, saved, cotangent):
    query, span_key, values, kernel, bias, segment_ids = saved
    batch, length, channels = values.shape
    if len(bands.groups(offsets)) > 1:

        def by_parts(query, span_key, values, kernel, bias):
            weights = xla_span.weights(query, span_key, kernel, bias, heads)
            by_head = values.reshape(batch, length, heads, -1)
            out = dynamic_conv(by_head, weights, segment_ids, offsets, interpret)
            return out.reshape(values.shape)

        return *jax.vjp(by_parts, *saved[:5])[1](cotangent), None
    rows = _Rows((batch, length, heads, channels // heads), offsets)
    *gradients, d_kernel, d_bias = pallas_tpu_span.backward(
        rows.out(query), rows.out(span_key), rows.out(values), kernel, bias,
        rows.ids(segment_ids), rows.out(cotangent), rows.bands, interpret=interpret,
    )  # fmt: skip
    return *map(rows.back, gradients), d_kernel, d_bias, None


span_dynamic_conv.defvjp(_span_forward, _span_backward)


class _Rows(Rows):
    """With the geometry of a convolution over them."""

    def __init__(self, shape: tuple[int, int, int, int], offsets: tuple[int, ...]):
        batch, length, heads, width = shape
        super().__init__(batch, length)
        self.bands = bands.Bands(self.length_together, heads, width, offsets, self.period)

    def ids(self, segment_ids: Int[Array, "B L"] | None) -> Int[Array, "rows L"] | None:
        return None if segment_ids is None else self.out(segment_ids)[..., 0]


def _parts(groups):
    """(base, offsets, slice of the taps) of each group."""
    first = 0
    for base, offsets in groups:
        yield base, offsets, slice(first, first + len(offsets))
        first += len(offsets)


def _visible(weights, segment_ids, offsets):
    if segment_ids is None:
        return weights
    allowed = jnp.stack(taps.visible(segment_ids, offsets), axis=-1)
    return jnp.where(allowed[:, :, None], weights, 0)


def _real(array, segment_ids):
    return array if segment_ids is None else jnp.where(segment_ids[..., None, None] != 0, array, 0)
