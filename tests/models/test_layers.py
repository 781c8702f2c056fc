"""Layers against their formulas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models import functions, layers
from convbert_jax.ops import dispatch
from convbert_jax.ops.softmax import softmax


def normal(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_release_initializers_cut_at_two_deviations_and_do_not_rescale():
    starts = layers.initializers("release", 0.02)
    dense = starts.dense(jax.random.key(0), (400, 500))
    assert float(jnp.abs(dense).max()) <= 0.04
    assert float(dense.std()) == pytest.approx(0.88 * 0.02, rel=0.01)
    depthwise = starts.depthwise(9)(jax.random.key(0), (9, 10_000))
    assert float(depthwise.std()) == pytest.approx(0.88 / 9, rel=0.02)
    glorot = starts.glorot(jax.random.key(0), (128, 256))
    assert float(jnp.abs(glorot).max()) == pytest.approx((6 / 384) ** 0.5, rel=0.01)


def test_huggingface_initializers_are_normal_everywhere():
    starts = layers.initializers("huggingface", 0.02)
    for start in (starts.dense, starts.depthwise(9), starts.glorot):
        x = start(jax.random.key(0), (400, 500))
        assert float(x.std()) == pytest.approx(0.02, rel=0.01)
        assert float(jnp.abs(x).max()) > 0.06


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_grouped_dense_is_a_block_diagonal_dense(platform, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    grouped = layers.GroupedDense(6, 8, 2, lambda key, shape: normal(shape), nnx.Rngs(0))
    grouped.bias[...] = normal((8,), 1)
    kernel = np.zeros((6, 8))
    kernel[:3, :4], kernel[3:, 4:] = grouped.kernel[...]
    x = normal((2, 5, 6), 2)
    np.testing.assert_allclose(grouped(x), x @ kernel + grouped.bias[...], atol=1e-5)

    graphdef, _ = nnx.split(grouped)

    def square(x, of_groups):
        made = nnx.merge(graphdef, {"kernel": of_groups, "bias": grouped.bias[...]})
        return (made(x) ** 2).sum()

    d_x, d_kernel = jax.grad(square, (0, 1))(x, grouped.kernel[...])
    cotangent = 2 * (x @ kernel + grouped.bias[...])
    np.testing.assert_allclose(d_x, cotangent @ kernel.T, atol=1e-4)
    whole = np.einsum("abi,abo->io", x, cotangent)
    np.testing.assert_allclose(d_kernel, [whole[:3, :4], whole[3:, 4:]], atol=1e-4)


def test_layer_norm_is_its_formula():
    norm = layers.LayerNorm(6, 1e-12)
    norm.scale[...], norm.bias[...] = normal((6,), 1), normal((6,), 2)

    def formula(x, scale, bias):
        deviation = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-12)
        return (x - x.mean(axis=-1, keepdims=True)) / deviation * scale + bias

    def ours(x, scale, bias):
        graphdef, _ = nnx.split(norm)
        return nnx.merge(graphdef, {"scale": scale, "bias": bias})(x)

    arguments = (normal((2, 5, 6)), norm.scale[...], norm.bias[...])
    np.testing.assert_allclose(ours(*arguments), formula(*arguments), atol=1e-5)
    cotangent = normal((2, 5, 6), 3)
    wanted = jax.vjp(formula, *arguments)[1](cotangent)
    for one, other in zip(jax.vjp(ours, *arguments)[1](cotangent), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_rms_norm_is_its_formula():
    norm = layers.RMSNorm(6, 1e-6)
    norm.scale[...] = normal((6,), 1)

    def formula(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def ours(x, scale):
        graphdef, _ = nnx.split(norm)
        return nnx.merge(graphdef, {"scale": scale})(x)

    arguments = (normal((2, 5, 6)), norm.scale[...])
    np.testing.assert_allclose(ours(*arguments), formula(*arguments), atol=1e-5)
    cotangent = normal((2, 5, 6), 3)
    wanted = jax.vjp(formula, *arguments)[1](cotangent)
    for one, other in zip(jax.vjp(ours, *arguments)[1](cotangent), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    short = normal((4, 6)).astype(jnp.bfloat16)
    assert norm(short).dtype == jnp.bfloat16


@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_bias_it_is_as_with_one_of_zeros(groups):
    made = [
        layers.feed_forward_dense(6, 8, groups, lambda key, shape: normal(shape), nnx.Rngs(0), bias)
        for bias in (True, False)
    ]
    x = normal((2, 5, 6), 2)
    np.testing.assert_array_equal(*(layer(x) for layer in made))
    assert [hasattr(layer, "bias") for layer in made] == [True, False]


def test_layer_norm_in_bfloat16_computes_in_float32():
    norm = layers.LayerNorm(256, 1e-12)
    x = (100.0 + normal((4, 256))).astype(jnp.bfloat16)
    wanted = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), wanted)


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0, 100.0])
def test_on_a_tpu_the_variance_of_bfloat16_is_that_of_its_values(mean, monkeypatch):
    """In one pass over them: a thousandth off, where rounding them moved them by half of it."""
    x = (mean + normal((40, 256))).astype(jnp.bfloat16)
    x = x.at[0].set(mean)  # whose variance is 0, however sums are rounded
    exact = np.float64(x)
    wanted = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-12)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    ones, zeros = jnp.ones(256), jnp.zeros(256)
    found = functions.layer_norm(x, ones, zeros, 1e-12)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(found), wanted, rtol=5e-3, atol=1e-3)
    wide = functions.layer_norm(x.astype(jnp.float32), ones, zeros, 1e-12)
    np.testing.assert_allclose(wide[1:], wanted[1:], atol=2e-5)


def test_gelu_is_exact():
    x = jnp.linspace(-6, 6, 200)
    np.testing.assert_allclose(functions.gelu(x), jax.nn.gelu(x, approximate=False), atol=1e-6)
    slope = jax.vmap(jax.grad(functions.gelu))(x)
    wanted = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x, approximate=False)))(x)
    np.testing.assert_allclose(slope, wanted, atol=1e-6)


@pytest.mark.parametrize("rows", [200, 199, 3, 1])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_dropout_keeps_the_mean(rows, platform, monkeypatch):
    """At a rate of n / 256, of which 0.1 becomes 26; rows that share random words too."""
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    x = jnp.ones((40, rows, 500))
    out = layers.dropout(x, 0.1, jax.random.key(0))
    assert out.shape == x.shape
    dropped = np.asarray(out == 0)
    deviation = 6 * (0.1 * 0.9 / dropped.size) ** 0.5
    assert dropped.mean() == pytest.approx(26 / 256, abs=deviation)
    assert float(out.mean()) == pytest.approx(1.0, abs=2 * deviation)
    np.testing.assert_allclose(out[~dropped], 256 / 230, rtol=1e-6)
    for row in range(1, rows):
        both = (dropped[:, 0] & dropped[:, row]).mean()
        assert both == pytest.approx((26 / 256) ** 2, abs=6 * (0.01 / dropped[:, 0].size) ** 0.5)
    assert layers.dropout(x, 0.1, None) is x
    assert layers.dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize(("rate", "of_256"), [(0.25, 64), (0.001, 1), (0.9999, 255)])
def test_dropout_rates(rate, of_256):
    out = layers.dropout(jnp.ones((2000, 500)), rate, jax.random.key(1))
    share = of_256 / 256
    expected = pytest.approx(share, abs=6 * (share * (1 - share) / 1e6) ** 0.5)
    assert float((out == 0).mean()) == expected


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("mesh", [(4, 2, 1), (2, 2, 2), (1, 1, 8)])
def test_dropout_of_rows_on_several_devices(generator, mesh):
    """No two rows are dropped alike; threefry's numbers are those of one device, also of seeds
    together; no device draws another's rows.
    """
    axes = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(mesh, ("data", "fsdp", "tensor"), axis_types=axes)
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    keys = jax.random.split(jax.random.key(0, impl=generator), 2)
    x = jnp.ones((16, 8, 64))

    @jax.jit
    def gradients(x, keys):
        return jax.vmap(lambda key: jax.grad(lambda x: layers.dropout(x, 0.25, key).sum())(x))(keys)

    alone = np.asarray(gradients(x, keys))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        program = jax.jit(gradients, out_shardings=jax.NamedSharding(mesh, jax.P(None, *rows.spec)))
        lowered = program.lower(jax.device_put(x, rows), keys)
        found = np.asarray(lowered.compile()(jax.device_put(x, rows), keys))
    assert len({row.tobytes() for seed in found for row in seed}) == 32
    assert (found > 0).mean() == pytest.approx(0.75, abs=0.02)
    if generator == "threefry2x32":
        np.testing.assert_array_equal(found, alone)
    else:
        drawn = re.findall(r"rng_bit_generator.*-> \(.*, tensor<(?:2x)?(\d+)x", lowered.as_text())
        assert drawn
        assert {int(size) for size in drawn} == {16 // devices}


def test_filters_of_all_rows_are_dropped_as_one():
    """Their first axis is of heads, which the devices of rows do not divide."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    key = jax.random.key(0, impl="rbg")
    alone = layers.dropout(jnp.ones((8, 31)), 0.25, key)
    with jax.set_mesh(jax.make_mesh((8, 1), ("data", "fsdp"), axis_types=axes)):
        found = jax.jit(layers.dropout, static_argnums=1)(jnp.ones((8, 31)), 0.25, key)
    np.testing.assert_array_equal(found, alone)


def test_dropout_gradient_is_where_it_kept():
    x = normal((20, 50))
    key = jax.random.key(0)
    gradient = jax.grad(lambda x: layers.dropout(x, 0.5, key).sum())(x)
    np.testing.assert_array_equal(gradient != 0, layers.dropout(x, 0.5, key) != 0)


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_is_its_formula(masked):
    logits = 3 * normal((2, 4, 9))
    visible = None
    if masked:
        visible = (normal((2, 4, 9), 1) > 0).at[..., 0].set(True).at[1, 2].set(False)

    def formula(logits):
        kept = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
        weights = jax.nn.softmax(kept)
        return weights if visible is None else jnp.where(visible, weights, 0)

    def ours(logits):
        return softmax(logits, visible, jnp.float32)

    cotangent = normal((2, 4, 9), 2)
    (wanted, back), (actual, our_back) = jax.vjp(formula, logits), jax.vjp(ours, logits)
    np.testing.assert_allclose(actual, wanted, atol=1e-6)
    some = slice(None) if not masked else visible.any(axis=-1)  # autodiff of the formula is NaN
    np.testing.assert_allclose(our_back(cotangent)[0][some], back(cotangent)[0][some], atol=1e-6)
    if masked:
        np.testing.assert_array_equal(actual[1, 2], 0)
        np.testing.assert_array_equal(our_back(cotangent)[0][1, 2], 0)


@pytest.mark.parametrize("hidden", [jnp.nan, jnp.inf, -jnp.inf, 3e38])
def test_what_is_not_visible_may_be_anything(hidden):
    """And what is may be as small as float32 has it, or minus infinity."""
    logits = jnp.array([[hidden, 1.0, 2.0], [hidden, -1e37, -1e37], [hidden, -jnp.inf, 0.0]])
    visible = jnp.array([False, True, True])
    wanted = [[0, 1 / (1 + np.e), np.e / (1 + np.e)], [0, 0.5, 0.5], [0, 0, 1]]
    np.testing.assert_allclose(softmax(logits, visible, jnp.float32), wanted, rtol=1e-6)


def test_softmax_in_bfloat16_computes_in_float32():
    logits = jnp.asarray([80.0, 81.0, 82.5], jnp.bfloat16)
    out = softmax(logits, None, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    wanted = jax.nn.softmax(logits.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, wanted)
    gradient = jax.grad(lambda x: softmax(x, None, jnp.float32)[0])(logits)
    assert gradient.dtype == jnp.bfloat16
