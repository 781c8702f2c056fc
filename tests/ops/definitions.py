"""Reference ops in numpy and float64 with hand-written gradients, and test inputs.

B batch, L positions, S positions of keys, C channels, H heads, D head width, K taps. Each
definition returns the output and the gradients of all arrays for a cotangent of the output.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax.ops import convolution

F32, BF16 = "float32", "bfloat16"


def normal(seed, *shapes, dtype=F32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def segments(batch, length, seed=0):
    """Return rows of a few documents of random lengths; the last row ends in padding."""
    starts = np.random.default_rng(seed).random((batch, length)) < 4 / length
    ids = 1 + np.cumsum(starts, axis=1)
    ids[-1, length - length // 3 :] = 0
    return ids.astype(np.int32)


def offsets_of(taps, dilation=1, causal=False):
    """Offset read by each tap; offset 0 is the last tap if causal, else tap K // 2."""
    return tuple((tap - (taps - 1 if causal else taps // 2)) * dilation for tap in range(taps))


def make_mesh(devices=None, **sizes):
    """Make a mesh of the given or of simulated devices; `sizes` maps axes to sizes."""
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


@functools.partial(jax.jit, static_argnums=0)
def run(function, arrays, cotangent):
    """Return the output and all gradients; None for an array that is None."""
    out, back = jax.vjp(function, *arrays)
    return out, *back(cotangent)


def assert_close(actual, expected, tolerance):
    """Check that arrays are finite and close, relative to the maximum of each or 1."""
    for one, other in zip(actual, expected, strict=True):
        if other is None:
            assert one is None
            continue
        one = np.asarray(one, np.float64)
        assert np.isfinite(one).all()
        bound = tolerance * max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def _exact(arrays):
    return [None if x is None else np.asarray(x, np.float64) for x in arrays]


def _dynamic(values, filters, cotangent, ids, offsets):
    """Convolve values [B, L, H, D] with filters [B, L, H, K]."""
    length = values.shape[1]
    ids = np.ones(values.shape[:2]) if ids is None else np.asarray(ids)
    out, d_values, d_filters = (np.zeros(x.shape) for x in (values, values, filters))
    for tap, offset in enumerate(offsets):
        first = min(max(0, -offset), length)
        last = max(first, min(length, length - offset))
        to, of = slice(first, last), slice(first + offset, last + offset)
        seen = ((ids[:, to] == ids[:, of]) & (ids[:, to] != 0))[..., None]
        weight = (filters[:, to, :, tap] * seen)[..., None]
        out[:, to] += weight * values[:, of]
        d_values[:, of] += weight * cotangent[:, to]
        d_filters[:, to, :, tap] = (values[:, of] * cotangent[:, to]).sum(-1) * seen
    return out, d_values, d_filters


def _light(values, filters, cotangent, ids, offsets):
    everywhere = np.broadcast_to(filters, (*values.shape[:2], *filters.shape))
    *found, d_filters = _dynamic(values, everywhere, cotangent, ids, offsets)
    return *found, d_filters.sum((0, 1))


def _depthwise(x, filters, cotangent, ids, offsets):
    """Every channel is a head of width 1."""
    found = _light(x[..., None], filters.T, cotangent[..., None], ids, offsets)
    return found[0][..., 0], found[1][..., 0], found[2].T


def _span(query, span_key, values, projection, bias, cotangent, ids, offsets):
    key = np.ones_like(query) if span_key is None else span_key
    by_head = (*query.shape[:2], len(bias) // len(offsets), -1)
    powers = np.exp((query * key) @ projection + bias).reshape(by_head)
    filters = powers / powers.sum(-1, keepdims=True)
    heads = (x.reshape(by_head) for x in (query if values is None else values, cotangent))
    summed, cotangent = heads
    out, d_values, d_filters = _dynamic(summed, filters, cotangent, ids, offsets)
    d_logits = filters * (d_filters - (filters * d_filters).sum(-1, keepdims=True))
    d_logits = d_logits.reshape(*query.shape[:2], -1)
    d_products, d_values = d_logits @ projection.T, d_values.reshape(query.shape)
    return (
        out.reshape(query.shape),
        d_products * key + (d_values if values is None else 0),
        None if span_key is None else d_products * query,
        None if values is None else d_values,
        np.einsum("blc,blk->ck", query * key, d_logits),
        d_logits.sum((0, 1)),
    )


def _spanned(*arrays, heads, **options):
    return convolution.span_dynamic_conv(*arrays, heads=heads, **options)


def _by_heads(x, filters, *, heads, **options):
    return convolution.dynamic_conv(x, filters, **options)


def _by_channels(x, filters, *, heads, **options):
    return convolution.depthwise_conv(x, filters, **options)


_DEFINITIONS = {
    "dynamic": _dynamic,
    "light": _light,
    "depthwise": _depthwise,
    "span": _span,
    "token": _span,  # filters and values from the token: no span key, no values
    "key": _span,  # filters from the token, separate values
}
OPS = {
    "dynamic": _by_heads,
    "light": _by_heads,
    "depthwise": _by_channels,
    "span": _spanned,
    "token": _spanned,
    "key": _spanned,
}


def draw(op, batch, length, heads, width, taps, dtype=F32, seed=0):
    """Return the arrays of a convolution, and a cotangent of its output."""
    rows, by_head = (batch, length, heads * width), (batch, length, heads, width)
    if op in ("dynamic", "light"):
        shape = (batch, length, heads, taps) if op == "dynamic" else (heads, taps)
        values, logits, cotangent = normal(seed, by_head, shape, by_head)
        arrays = [values, jax.nn.softmax(logits)]
    elif op == "depthwise":
        *arrays, cotangent = normal(seed, rows, (taps, rows[2]), rows)
    else:
        projection = (rows[2], heads * taps)
        *arrays, cotangent = normal(seed, rows, rows, rows, projection, projection[1:], rows)
        arrays[3] *= 0.7 * rows[2] ** -0.5
        arrays[1] = arrays[1] if op == "span" else None
        arrays[2] = None if op == "token" else arrays[2]
    arrays = [None if x is None else x.astype(dtype) for x in arrays]
    return arrays, cotangent.astype(dtype)


def convolve(op, arrays, cotangent, ids, offsets):
    """Evaluate the definition of a convolution: its output and the gradients of all arrays."""
    return _DEFINITIONS[op](*_exact([*arrays, cotangent]), ids, offsets)


def spoil(arrays, ids):
    """Put NaN into the padding of all arrays with positions [B, L, ...]."""
    if ids is None:
        return arrays
    padding = jnp.asarray(ids == 0)

    def put(x):
        if x is None or x.ndim < 3:
            return x
        return jnp.where(padding.reshape(*padding.shape, *[1] * (x.ndim - 2)), jnp.nan, x)

    return [put(x) for x in arrays]


def visible(ids, key_ids, shape, causal, window=0):
    """Mask [B or 1, 1, L, S]. Padding sees the segment with the largest id; none sees padding."""
    away = np.subtract.outer(np.arange(shape[0]), np.arange(shape[1]))
    near = np.abs(away) <= (window or max(shape))
    seen = np.ones((1, *shape), bool)
    if ids is not None:
        own = np.where(ids == 0, ids.max(axis=1, keepdims=True), ids)
        seen = (own[:, :, None] == key_ids[:, None]) & (key_ids != 0)[:, None]
    return (seen & near & ((away >= 0) | (not causal)))[:, None]


def attend(query, key, value, cotangent, seen, keep=1.0):
    """Attention with dropout factors `keep` [B, H, L, S]: 0, or the scale of a kept weight."""
    query, key, value, cotangent = (
        x.swapaxes(1, 2) for x in _exact([query, key, value, cotangent])
    )
    keep, scale = np.asarray(keep, np.float64), query.shape[-1] ** -0.5
    scores = np.where(seen, query @ key.swapaxes(2, 3) * scale, -np.inf)
    powers = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)
    d_weights = cotangent @ value.swapaxes(2, 3) * keep
    d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    kept = weights * keep
    found = kept @ value, d_scores @ key, d_scores.swapaxes(2, 3) @ query
    return [x.swapaxes(1, 2) for x in (*found, kept.swapaxes(2, 3) @ cotangent)]
