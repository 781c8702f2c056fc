"""Layers against their formulas: values and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models import layers
from convbert_jax.ops import dispatch, nn
from convbert_jax.ops.nn import softmax

BF16 = jnp.bfloat16


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check(function, formula, *arguments, atol=1e-4):
    """Compare values and gradients of all arguments, in one program."""

    @jax.jit
    def both(cotangent, *arguments):
        results = []
        for each in (function, formula):
            out, back = jax.vjp(each, *arguments)
            results.append((out, back(cotangent)))
        return results

    cotangent = normal(jax.eval_shape(formula, *arguments).shape, 9)
    found, wanted = both(cotangent, *arguments)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), found[1], wanted[1])


def module_of(module, names):
    """Return a function of x and of the parameters `names` of a module."""
    graphdef, _ = nnx.split(module)
    return lambda x, *values: nnx.merge(graphdef, dict(zip(names, values, strict=True)))(x)


def test_initializers_have_their_distributions():
    """As in the official code: truncated at two standard deviations without rescaling.

    Truncation leaves 0.88 of the standard deviation.
    """
    release = layers.initializers("release", 0.02)
    dense = release.dense(jax.random.key(0), (400, 500))
    assert float(jnp.abs(dense).max()) <= 0.04
    assert float(dense.std()) == pytest.approx(0.88 * 0.02, rel=0.01)
    depthwise = release.depthwise(9)(jax.random.key(0), (400, 500))
    assert float(depthwise.std()) == pytest.approx(0.88 / 9, rel=0.02)
    glorot = layers.initializers("glorot", 0.5)
    for start in (release.glorot, glorot.glorot, glorot.dense):
        x = start(jax.random.key(0), (128, 256))
        assert float(jnp.abs(x).max()) == pytest.approx((6 / 384) ** 0.5, rel=0.01)
    np.testing.assert_array_equal(glorot.depthwise(9)(jax.random.key(0), (400, 500)), depthwise)
    plain = layers.initializers("huggingface", 0.02)
    for start in (plain.dense, plain.depthwise(9), plain.glorot):
        x = start(jax.random.key(0), (400, 500))
        assert float(x.std()) == pytest.approx(0.02, rel=0.01)
        assert float(jnp.abs(x).max()) > 0.06


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_grouped_dense_is_a_block_diagonal_dense(platform, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    grouped = layers.GroupedDense(6, 8, 2, lambda key, shape: normal(shape), nnx.Rngs(0))

    def formula(x, kernel, bias):
        blocks = jax.scipy.linalg.block_diag(*kernel)
        return x @ blocks + bias

    arguments = normal((2, 5, 6), 2), grouped.kernel[...], normal((8,), 1)
    assert arguments[1].shape == (2, 3, 4)
    check(module_of(grouped, ("kernel", "bias")), formula, *arguments)


def test_norms_are_their_formulas():
    x, scale, bias = normal((2, 5, 6)), normal((6,), 1), normal((6,), 2)

    def layer_norm(x, scale, bias):
        deviation = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 0.1)
        return (x - x.mean(axis=-1, keepdims=True)) / deviation * scale + bias

    def rms_norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale

    check(module_of(layers.LayerNorm(6, 0.1), ("scale", "bias")), layer_norm, x, scale, bias)
    check(module_of(layers.RMSNorm(6, 0.1), ("scale",)), rms_norm, x, scale)
    for norm in (layers.LayerNorm(256, 1e-12), layers.RMSNorm(256, 1e-6)):
        short = (100.0 + normal((4, 256))).astype(BF16)  # computed in float32
        assert norm(short).dtype == BF16
        np.testing.assert_array_equal(norm(short), norm(short.astype(jnp.float32)).astype(BF16))


@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_bias_it_is_as_with_one_of_zeros(groups):
    made = [
        layers.feed_forward_dense(6, 8, groups, lambda key, shape: normal(shape), nnx.Rngs(0), bias)
        for bias in (True, False)
    ]
    x = normal((2, 5, 6), 2)
    np.testing.assert_array_equal(*(layer(x) for layer in made))
    assert [hasattr(layer, "bias") for layer in made] == [True, False]


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_on_a_tpu_the_variance_of_bfloat16_is_that_of_its_values(mean, monkeypatch):
    """The variance is computed in one pass over the values."""
    x = (mean + normal((40, 256))).astype(BF16)
    x = x.at[0].set(mean)  # variance 0, regardless of rounding
    exact = np.float64(x)
    wanted = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-12)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    ones, zeros = jnp.ones(256), jnp.zeros(256)
    found = nn.layer_norm(x, ones, zeros, 1e-12)
    assert found.dtype == BF16
    np.testing.assert_allclose(np.float64(found), wanted, rtol=5e-3, atol=1e-3)
    wide = nn.layer_norm(x.astype(jnp.float32), ones, zeros, 1e-12)
    np.testing.assert_allclose(wide[1:], wanted[1:], atol=2e-5)


def test_gelu_is_exact():
    x = jnp.linspace(-6, 6, 200)
    check(nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), x, atol=1e-6)


# --- Softmax ---


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_is_its_formula(masked):
    logits, visible = 3 * normal((2, 4, 9)), None
    if masked:
        visible = (normal((2, 4, 9), 1) > 0).at[..., 0].set(True)

    def formula(logits):
        kept = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
        return jax.nn.softmax(kept)

    check(lambda logits: softmax(logits, visible, jnp.float32), formula, logits, atol=1e-6)


@pytest.mark.parametrize("hidden", [jnp.nan, jnp.inf, -jnp.inf, 3e38])
def test_what_is_not_visible_may_be_anything(hidden):
    """Visible logits may be the lowest float32 numbers or minus infinity."""
    logits = jnp.array([[hidden, 1.0, 2.0], [hidden, -1e37, -1e37], [hidden, -jnp.inf, 0.0]])
    visible = jnp.array([False, True, True])
    wanted = [[0, 1 / (1 + np.e), np.e / (1 + np.e)], [0, 0.5, 0.5], [0, 0, 1]]
    np.testing.assert_allclose(softmax(logits, visible, jnp.float32), wanted, rtol=1e-6)
    nothing = jax.vjp(lambda x: softmax(x, ~jnp.ones(3, bool), jnp.float32), logits)
    np.testing.assert_array_equal(nothing[0], 0)
    np.testing.assert_array_equal(nothing[1](jnp.ones((3, 3)))[0], 0)


def test_softmax_in_bfloat16_computes_in_float32():
    logits = jnp.asarray([80.0, 81.0, 82.5], BF16)
    out = softmax(logits, None, BF16)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, jax.nn.softmax(logits.astype(jnp.float32)).astype(BF16))
    gradient = jax.grad(lambda x: softmax(x, None, jnp.float32)[0])(logits)
    assert gradient.dtype == BF16


# --- Dropout ---


@pytest.mark.parametrize(
    ("rows", "rate", "of_256", "platform"),
    [(7, 0.1, 26, "cpu"), (8, 0.1, 26, "tpu"), (1, 0.25, 64, "cpu"), (3, 0.001, 1, "tpu"),
     (4, 0.9999, 255, "cpu")],
)  # fmt: skip
def test_dropout_keeps_the_mean_and_its_gradient_is_where_it_kept(
    rows, rate, of_256, platform, monkeypatch
):
    """Rates of n / 256, also in rows that share random words.

    Bounds are six standard deviations: a correct generator exceeds them in fewer than one of
    10^8 draws.
    """
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    x = jnp.ones((400, rows, 500))

    @jax.jit
    def run(x):
        out, back = jax.vjp(lambda x: layers.dropout(x, rate, jax.random.key(0)), x)
        return out, back(jnp.ones_like(x))[0]

    out, gradient = run(x)
    np.testing.assert_array_equal(out, gradient)  # x and the cotangent are ones
    dropped, share = np.asarray(out == 0), of_256 / 256
    deviation = 6 * (share * (1 - share) / dropped.size) ** 0.5
    assert dropped.mean() == pytest.approx(share, abs=deviation)
    np.testing.assert_allclose(out[~dropped], 256 / (256 - of_256), rtol=1e-6)
    for row in range(1, rows):
        both = (dropped[:, 0] & dropped[:, row]).mean()
        assert both == pytest.approx(share**2, abs=6 * (share**2 / dropped[:, 0].size) ** 0.5)
    assert layers.dropout(x, rate, None) is x
    assert layers.dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("mesh", [(4, 2, 1), (2, 2, 2), (1, 1, 8)])
def test_dropout_of_rows_on_several_devices(generator, mesh):
    """Masks differ between rows, and no device draws the rows of another device.

    With threefry the masks match one device, also when vmapped over seeds.
    """
    axes = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(mesh, ("data", "fsdp", "tensor"), axis_types=axes)
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    keys = jax.random.split(jax.random.key(0, impl=generator), 2)
    x = jnp.ones((16, 8, 64))

    @jax.jit
    def gradients(x, keys):
        return jax.vmap(lambda key: jax.grad(lambda x: layers.dropout(x, 0.25, key).sum())(x))(keys)

    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        program = jax.jit(gradients, out_shardings=jax.NamedSharding(mesh, jax.P(None, *rows.spec)))
        lowered = program.lower(jax.device_put(x, rows), keys)
        found = np.asarray(lowered.compile()(jax.device_put(x, rows), keys))
    assert len({row.tobytes() for seed in found for row in seed}) == 32
    assert (found > 0).mean() == pytest.approx(0.75, abs=0.02)
    if generator == "threefry2x32":
        np.testing.assert_array_equal(found, gradients(x, keys))
    else:
        drawn = re.findall(r"rng_bit_generator.*-> \(.*, tensor<(?:2x)?(\d+)x", lowered.as_text())
        assert drawn
        assert {int(size) for size in drawn} == {16 // devices}


def test_filters_of_all_rows_are_dropped_as_one():
    """The first axis of filters is heads, which the batch axes do not shard."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    key = jax.random.key(0, impl="rbg")
    alone = layers.dropout(jnp.ones((8, 31)), 0.25, key)
    with jax.set_mesh(jax.make_mesh((8, 1), ("data", "fsdp"), axis_types=axes)):
        found = jax.jit(layers.dropout, static_argnums=1)(jnp.ones((8, 31)), 0.25, key)
    np.testing.assert_array_equal(found, alone)
