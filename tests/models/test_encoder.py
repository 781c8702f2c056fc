"""How layers are run must not change what they compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageConfig
from convbert_jax.models.encoder import Encoder


@pytest.fixture(scope="module")
def build(randomize, packed):
    """build(config) -> forward(params, key), a function of them that is jitted, and params."""

    @functools.cache
    def build(config, dtype=jnp.float32):
        graphdef, params = randomize(lambda rngs: Encoder(config, rngs))
        x = jax.random.normal(jax.random.key(1), (*packed.shape, config.embedding_size))
        return jax.jit(
            lambda params, key=None: nnx.merge(graphdef, params)(x.astype(dtype), packed, key)
        ), params

    return build


@pytest.mark.parametrize("fields", [{"scan_unroll": 9}, {"remat": "dots"}, {"remat": "full"}])
def test_unrolling_and_rematerialization_change_no_number(make_config, build, fields):
    key = jax.random.key(7)  # dropout must be drawn again in the same places

    def differentiate(config):
        forward, params = build(config)
        return jax.jit(jax.value_and_grad(lambda params: forward(params, key)[:, 3].sum()))(params)

    config = make_config().encoder
    wanted, actual = (differentiate(c) for c in (config, dataclasses.replace(config, **fields)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), actual, wanted
    )


@pytest.mark.parametrize(("both", "own", "found"), [(1, 1, 1), (1, 9, 9), (9, 1, 9)])
def test_a_generator_is_unrolled_with_the_encoder_or_alone(make_config, both, own, found):
    config = make_config(scan_unroll=both, generator={"scan_unroll": own})
    assert config.encoder.scan_unroll == both
    assert config.generator_encoder.scan_unroll == found


def test_stages_in_order_are_one_stack(make_config, randomize, packed):
    config = make_config(layers=3).encoder
    layer = config.stages[0].layer
    split = dataclasses.replace(config, stages=(StageConfig(1, layer), StageConfig(2, layer)))
    graphdef, params = randomize(lambda rngs: Encoder(config, rngs))
    stack = params["stages"]["0"]
    parts = {
        "0": jax.tree.map(lambda x: x[:1], stack),
        "1": jax.tree.map(lambda x: x[1:], stack),
    }
    x = jax.random.normal(jax.random.key(1), (*packed.shape, 16))
    split_graphdef, _ = randomize(lambda rngs: Encoder(split, rngs))

    @functools.partial(jax.jit, static_argnums=0)
    def apply(graphdef, params):
        return nnx.merge(graphdef, params)(x, packed)

    whole = apply(graphdef, params)
    in_parts = apply(split_graphdef, params | {"stages": parts})
    np.testing.assert_allclose(in_parts, whole, atol=1e-5)


def test_layers_of_a_stack_start_differently(make_config):
    @jax.jit
    def start():
        layers = Encoder(make_config().encoder, nnx.Rngs(0)).stages["0"]
        return layers.mixer.query.kernel[...]

    kernel = start()
    assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize("groups", [1, 2])
def test_bfloat16_is_close(make_config, build, groups):
    config = make_config(ffn_groups=groups).encoder
    (exact, params), (rounded, _) = build(config), build(config, jnp.bfloat16)
    out = rounded(params)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact(params), atol=0.1)
    gradients = jax.eval_shape(jax.grad(lambda p: rounded(p).astype(jnp.float32).sum()), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


def test_dropout_only_with_a_key(make_config, build):
    config = make_config().encoder
    run, params = build(config)
    once = run(params)
    np.testing.assert_array_equal(run(params), once)
    dropped, other = run(params, jax.random.key(0)), run(params, jax.random.key(1))
    assert np.abs(dropped - once).max() > 0.1
    assert np.abs(dropped - other).max() > 0.1
    layer = config.stages[0].layer
    mixer = dataclasses.replace(layer.mixer, attention_dropout=0.0)
    none = dataclasses.replace(layer, dropout=0.0, mixer=mixer)
    run, params = build(dataclasses.replace(config, stages=(StageConfig(2, none),)))
    np.testing.assert_allclose(run(params, jax.random.key(0)), once, atol=1e-6)
