"""Depthwise convolution: values and gradients against a dynamic one of constant filters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import reference
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.taps import offsets as offsets_of


def by_reference(x, filters, ids):
    """Every channel a head of width 1 whose filter is the same at every position."""
    everywhere = jnp.broadcast_to(filters.T, (*x.shape, len(filters)))
    offsets = offsets_of(len(filters))
    return reference.dynamic_conv(x[..., None], everywhere, ids, offsets)[..., 0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("taps", "length"), [(1, 5), (2, 6), (3, 1), (9, 7), (9, 30)])
def test_values_and_gradients(taps, length, packed):
    keys = jax.random.split(jax.random.key(0), 3)
    x, cotangent = (jax.random.normal(k, (2, length, 6)) for k in keys[:2])
    filters = jax.random.normal(keys[2], (taps, 6))
    ids = None
    if packed:
        row = [1] * (length // 2) + [2] * (length - length // 2)
        ids = jnp.asarray([row, [1] * (length // 3) + [0] * (length - length // 3)])

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x, filters):
        out, back = jax.vjp(function, x, filters)
        return out, *back(cotangent)

    ours = run(lambda x, f: depthwise_conv(x, f, segment_ids=ids), x, filters)
    wanted = run(lambda x, f: by_reference(x, f, ids), x, filters)
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_is_the_convolution_of_xla():
    x = jax.random.normal(jax.random.key(0), (2, 20, 8))
    filters = jax.random.normal(jax.random.key(1), (9, 8))
    wanted = jax.lax.conv_general_dilated(
        x, filters[:, None], (1,), "SAME", feature_group_count=8,
        dimension_numbers=("NHC", "HIO", "NHC"),
    )  # fmt: skip
    np.testing.assert_allclose(depthwise_conv(x, filters), wanted, atol=1e-5)


def test_nan_in_other_segments_never_leaks():
    x = jax.random.normal(jax.random.key(0), (1, 12, 4))
    filters = jax.random.normal(jax.random.key(1), (9, 4))
    ids = jnp.asarray([[1] * 4 + [2] * 5 + [0] * 3])
    dirty = jnp.where((ids == 2)[..., None], x, jnp.nan)

    def total(x):
        return jnp.sum(jnp.square(depthwise_conv(x, filters, segment_ids=ids)[:, 4:9]))

    np.testing.assert_array_equal(jax.grad(total)(dirty), jax.grad(total)(x))
    assert jnp.isfinite(total(dirty))


def test_bfloat16_stays_close():
    x = jax.random.normal(jax.random.key(0), (2, 20, 8))
    filters = jax.random.normal(jax.random.key(1), (9, 8))
    out = depthwise_conv(x.astype(jnp.bfloat16), filters.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), depthwise_conv(x, filters), atol=0.1)


@pytest.mark.parametrize(
    ("name", "x", "filters", "ids"),
    [
        ("x", (4, 3), (9, 3), None),
        ("filters", (2, 4, 3), (9, 4), None),
        ("segment_ids", (2, 4, 3), (9, 3), (2, 5)),
    ],
)
def test_errors_name_the_argument(name, x, filters, ids):
    ids = None if ids is None else jnp.ones(ids, jnp.int32)
    with pytest.raises(ValueError, match=f"depthwise_conv: {name} is "):
        depthwise_conv(jnp.zeros(x), jnp.zeros(filters), segment_ids=ids)
