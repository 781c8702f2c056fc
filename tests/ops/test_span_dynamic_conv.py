"""The fused op: XLA's form against the definition, gradients, and bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import xla
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import ROWS, WHOLE
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv
from tests.ops.test_dynamic_conv import segments


def inputs(batch=2, length=20, heads=2, width=8, taps=9):
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (batch, length, heads * width)
    query, span_key, values, cotangent = (jax.random.normal(key, shape) for key in keys[:4])
    projection = jax.random.normal(keys[4], (heads * width, heads * taps)) * 0.3
    return (
        query,
        span_key,
        values,
        projection,
        jax.random.normal(keys[5], (heads * taps,)),
    ), cotangent


def loops(query, span_key, values, projection, bias, heads, ids):
    batch, length, channels = values.shape
    taps, width = projection.shape[1] // heads, channels // heads
    out = np.zeros(values.shape, np.float64)
    for b in range(batch):
        for t in range(length):
            logits = (query[b, t] * span_key[b, t]) @ projection + bias
            for h in range(heads):
                powers = np.exp(logits[h * taps : (h + 1) * taps])
                own = slice(h * width, (h + 1) * width)
                for i, weight in enumerate(powers / powers.sum()):
                    s = t + i - taps // 2
                    if 0 <= s < length and ids[b, s] == ids[b, t] != 0:
                        out[b, t, own] += weight * values[b, s, own]
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_is_the_formula(implementation):
    arrays, _ = inputs()
    ids = segments(2, 20)
    run = functools.partial(
        span_dynamic_conv, heads=2, segment_ids=ids, implementation=implementation
    )
    wanted = loops(*map(np.asarray, arrays), 2, np.asarray(ids))
    np.testing.assert_allclose(jax.jit(run)(*arrays), wanted, atol=1e-5)


def definition(query, span_key, values, projection, bias, heads, ids, offsets):
    """In jax.numpy alone, to be differentiated: nothing of the package is in it."""
    batch, length, channels = values.shape
    logits = jnp.matmul(query * span_key, projection, precision="highest") + bias
    powers = jnp.exp(logits).reshape(batch, length, heads, -1)
    filters = powers / powers.sum(axis=-1, keepdims=True)
    out = jnp.zeros((batch, length, heads, channels // heads))
    for i, offset in enumerate(offsets):
        place = np.arange(length) + offset
        inside, place = (place >= 0) & (place < length), place.clip(0, length - 1)
        visible = jnp.asarray(inside)
        if ids is not None:
            visible = visible & (ids[:, place] == ids) & (ids != 0)
        read = values[:, place].reshape(out.shape)
        shares = jnp.where(visible[..., None], filters[..., i], 0.0)
        out += shares[..., None] * read
    return out.reshape(values.shape)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_definition(packed, implementation):
    arrays, cotangent = inputs()
    ids = segments(2, 20) if packed else None

    def gradients(run):
        return jax.jit(lambda *a: jax.vjp(run, *a)[1](cotangent))(*arrays)

    op = functools.partial(
        span_dynamic_conv, heads=2, segment_ids=ids, implementation=implementation
    )
    wanted = gradients(lambda *a: definition(*a, 2, ids, range(-4, 5)))
    for one, other in zip(gradients(op), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_without_a_key_the_query_alone_makes_the_filters(implementation):
    """As a key of ones would; values and gradients."""
    (query, key, *rest), cotangent = inputs()
    op = functools.partial(
        span_dynamic_conv, heads=2, segment_ids=segments(2, 20), implementation=implementation
    )

    @jax.jit
    def both(query, *rest):
        wanted, back = jax.vjp(lambda q, *r: op(q, jnp.ones_like(key), *r), query, *rest)
        out, our_back = jax.vjp(lambda q, *r: op(q, None, *r), query, *rest)
        return (out, *our_back(cotangent)), (wanted, *back(cotangent))

    for one, other in zip(*both(query, *rest), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_without_values_the_query_is_summed(implementation):
    (query, key, _, *rest), cotangent = inputs()
    op = functools.partial(
        span_dynamic_conv, heads=2, segment_ids=segments(2, 20), implementation=implementation
    )

    @jax.jit
    def both(query, *rest):
        wanted, back = jax.vjp(lambda q, *r: op(q, jnp.ones_like(key), q, *r), query, *rest)
        out, our_back = jax.vjp(lambda q, *r: op(q, None, None, *r), query, *rest)
        return (out, *our_back(cotangent)), (wanted, *back(cotangent))

    for one, other in zip(*both(query, *rest), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_on_a_mesh_it_is_the_same():
    arrays, _ = inputs(batch=8)
    wanted = span_dynamic_conv(*arrays, heads=2)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("data"))
        placed = [jax.device_put(x, place) for x in arrays[:3]]
        out = jax.jit(functools.partial(span_dynamic_conv, heads=2))(*placed, *arrays[3:])
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("data", "tensor")])
def test_parts_of_a_mesh_add_up(axes):
    """As the kernels run: rows split, the projection on every device, its gradient summed once."""
    arrays, cotangent = inputs(batch=8)
    ids = segments(8, 20)

    def gradients(run):
        return jax.jit(lambda *a: jax.vjp(run, *a)[1](cotangent))(*arrays)

    def over_mesh(*arrays):
        return division.over_mesh(
            lambda *a: xla.span_dynamic_conv(*a, 2, tuple(range(-4, 5))),
            (*arrays, ids),
            (ROWS, ROWS, ROWS, WHOLE, WHOLE, ROWS),
            ROWS,
        )

    wanted = gradients(functools.partial(span_dynamic_conv, heads=2, segment_ids=ids))
    mesh = jax.make_mesh((4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        actual = gradients(over_mesh)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("values", {2: jnp.zeros((2, 20))}),
        ("query", {0: jnp.zeros((2, 20, 8))}),
        ("span_key", {1: jnp.zeros((2, 20, 16), jnp.bfloat16)}),
        ("projection", {3: jnp.zeros((16, 17))}),
        ("bias", {4: jnp.zeros(17)}),
        ("heads", {"heads": 3}),
        ("segment_ids", {"segment_ids": jnp.ones((2, 5), jnp.int32)}),
        ("dilation", {"dilation": 0}),
        ("implementation", {"implementation": "cuda"}),
        ("implementation", {"implementation": "pallas_tpu"}),
    ],
)
def test_errors_name_the_argument(name, change):
    arrays = list(inputs()[0])
    arguments = {"heads": 2}
    for key, value in change.items():
        if isinstance(key, int):
            arrays[key] = value
        else:
            arguments[key] = value
    with pytest.raises(ValueError, match=f"span_dynamic_conv: {name} is "):
        span_dynamic_conv(*arrays, **arguments)
