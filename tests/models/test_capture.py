"""What layers saw: against a direct computation, of every stage, and free when nobody asks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageConfig
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.pretraining import MaskedLanguageModel, PretrainingModel
from tests.models import mean_mixer

BOTH = ("attention", "filters")


@pytest.fixture(scope="module")
def config(make_config):
    """Two layers of 2 + 2 heads on embeddings as wide as they are: the first layer sees x."""
    return make_config(embedding_size=32, convolution="xla").encoder


@pytest.fixture(scope="module")
def x(packed):
    return jax.random.normal(jax.random.key(1), (*packed.shape, 32))


@pytest.fixture(scope="module")
def stages(config, make_config):
    """stages(*mixers) -> the config with a stage of one layer for each of them."""

    def make(*mixers):
        made = [make_config(embedding_size=32, convolution="xla", mixer=m).encoder for m in mixers]
        one_each = tuple(StageConfig(1, encoder.stages[0].layer) for encoder in made)
        return dataclasses.replace(config, stages=one_each)

    return make


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def directly(x, mixer, ids, heads):
    """Maps and filters of one layer in numpy, from its input and its parameters."""
    x, ids = np.asarray(x, np.float64), np.asarray(ids)
    mixer = jax.tree.map(lambda p: np.asarray(p, np.float64), mixer)
    batch, length, _ = x.shape

    def project(name):
        return x @ mixer[name]["kernel"] + mixer[name]["bias"]

    query, key = (project(name).reshape(batch, length, heads, -1) for name in ("query", "key"))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    own = np.where(ids == 0, ids.max(axis=1, keepdims=True), ids)
    visible = (own[:, :, None] == ids[:, None, :]) & (ids != 0)[:, None, :]
    maps = softmax(np.where(visible[:, None], scores, -np.inf))
    taps, read = mixer["key_conv"]["depthwise"], np.zeros_like(x)
    for i, factors in enumerate(taps):
        for t in range(length):
            s = t + i - len(taps) // 2
            if 0 <= s < length:
                same = (ids[:, s] == ids[:, t]) & (ids[:, t] != 0)
                read[:, t] += same[:, None] * factors * x[:, s]
    span_key = read @ mixer["key_conv"]["pointwise"] + mixer["key_conv"]["bias"]
    logits = query.reshape(span_key.shape) * span_key @ mixer["conv_kernel"]["kernel"]
    logits += mixer["conv_kernel"]["bias"]
    return maps, softmax(logits.reshape(batch, length, heads, -1)), visible


@pytest.mark.parametrize("fields", [{}, {"remat": "dots"}, {"scan_unroll": 2}], ids=str)
def test_maps_and_filters_of_each_layer(config, randomize, packed, x, fields):
    config = dataclasses.replace(config, **fields)
    graphdef, params = randomize(lambda rngs: Encoder(config, rngs))

    @jax.jit
    def run(params):
        encoder = nnx.merge(graphdef, params)
        return encoder(x, packed), *encoder(x, packed, capture=BOTH)

    plain, hidden, (seen,) = run(params)
    np.testing.assert_array_equal(hidden, plain)
    assert seen["attention"].shape == (2, 2, 2, 24, 24)
    assert seen["filters"].shape == (2, 2, 24, 2, 9)
    one = dataclasses.replace(config, stages=(StageConfig(1, config.stages[0].layer),))
    one_graphdef, _ = randomize(lambda rngs: Encoder(one, rngs))
    layers = params["stages"]["0"]
    first = {"stages": {"0": jax.tree.map(lambda p: p[:1], layers)}}
    inputs = [x, jax.jit(lambda params: nnx.merge(one_graphdef, params)(x, packed))(first)]
    for i, given in enumerate(inputs):
        mixer = jax.tree.map(lambda p, i=i: p[i], layers["mixer"])
        maps, filters, visible = directly(given, mixer, packed, heads=2)
        np.testing.assert_allclose(seen["attention"][i], maps, atol=2e-5)
        np.testing.assert_allclose(seen["filters"][i], filters, atol=2e-5)
        np.testing.assert_array_equal(np.where(visible[:, None], 0, seen["attention"][i]), 0)
    np.testing.assert_allclose(seen["attention"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(seen["filters"].sum(-1), 1, atol=1e-5)


def test_every_stage_gives_what_it_has(stages, packed, x):
    encoder = Encoder(stages("mixed", "attention", mean_mixer.NAME), nnx.Rngs(0))
    hidden, seen = jax.jit(lambda x: encoder(x, packed, capture=BOTH))(x)
    assert hidden.shape == x.shape
    assert [{name: a.shape for name, a in stage.items()} for stage in seen] == [
        {"attention": (1, 2, 2, 24, 24), "filters": (1, 2, 24, 2, 9)},
        {"attention": (1, 2, 4, 24, 24)},
        {},
    ]
    _, seen = jax.jit(lambda x: encoder(x, packed, capture="filters"))(x)
    assert [set(stage) for stage in seen] == [{"filters"}, set(), set()]
    _, (*_, seen) = jax.jit(lambda x: encoder(x, packed, capture="shares"))(x)
    same = packed[:, :, None] == packed[:, None, :]
    np.testing.assert_allclose(seen["shares"][0], same / same.sum(-1, keepdims=True), atol=1e-6)


def test_what_is_offered_is_known_before_anything_is_computed(stages):
    encoder = nnx.eval_shape(
        lambda: Encoder(
            stages("mixed", "attention", "light", "dynamic", "dilated", mean_mixer.NAME),
            nnx.Rngs(0),
        )
    )
    attention = {"attention", "scores"}
    expected = [{*attention, "filters"}, attention, {"filters"}, {"filters"}, set(), {"shares"}]
    assert [set(offer) for offer in encoder.offers()] == expected


def test_light_filters_are_the_same_at_all_positions(stages, packed, x):
    encoder = Encoder(stages("light"), nnx.Rngs(0))
    _, (seen,) = jax.jit(lambda x: encoder(x, packed, capture="filters"))(x)
    assert seen["filters"].shape == (1, 2, 24, 4, 9)
    parameter = np.asarray(encoder.stages["0"].mixer.filters[...])[0]
    np.testing.assert_allclose(
        seen["filters"][0], np.broadcast_to(softmax(parameter), (2, 24, 4, 9)), atol=1e-6
    )


def test_what_no_layer_has_is_an_error(stages, packed, x):
    encoder = Encoder(stages("attention"), nnx.Rngs(0))
    message = r"capture is \['attention', 'filters'\], but no layer has \['filters'\]; these layers"
    with pytest.raises(ValueError, match=message + r" have \['attention', 'hidden', 'scores'\]"):
        encoder(x, packed, capture=BOTH)


@pytest.mark.parametrize("key", [None, jax.random.key(3)], ids=["eval", "dropout"])
def test_nobody_pays_who_does_not_ask(config, packed, x, key):
    """The program without a capture is a scan over layers called as if there were none."""
    graphdef, params = nnx.split(Encoder(config, nnx.Rngs(0)))

    def ours(params, x):
        return nnx.merge(graphdef, params)(x, packed, key)

    def bare(params, x):
        encoder = nnx.merge(graphdef, params)
        keys = None if key is None else jax.random.split(jax.random.fold_in(key, 0), 2)

        def run(x, layer_and_key):
            layer, layer_key = layer_and_key
            return layer(x, packed, layer_key), None

        return jax.lax.scan(run, x, (encoder.stages["0"], keys))[0]

    assert str(jax.make_jaxpr(ours)(params, x)) == str(jax.make_jaxpr(bare)(params, x))


def test_dropout_is_not_in_what_was_seen(config, packed, x):
    encoder = Encoder(config, nnx.Rngs(0))
    run = jax.jit(lambda key: encoder(x, packed, key, capture="attention"))
    _, (dropped,) = run(jax.random.key(0))
    _, (seen,) = run(None)
    np.testing.assert_allclose(dropped["attention"][0], seen["attention"][0], atol=1e-6)
    np.testing.assert_allclose(dropped["attention"].sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [(PretrainingModel, "replaced_token"), (MaskedLanguageModel, "masked_lm")],
)
def test_a_model_hands_it_on(make_config, packed, model, recipe):
    model = model(make_config(recipe), nnx.Rngs(0))
    tokens, types = jnp.ones_like(packed), jnp.zeros_like(packed)

    @jax.jit
    def run():
        given = (tokens, packed, types)
        return model.encode(*given), *model.encode(*given, capture=BOTH)

    plain, hidden, (seen,) = run()
    np.testing.assert_array_equal(hidden, plain)
    assert set(seen) == set(BOTH)
    bfloat16 = jax.eval_shape(
        lambda: model.encode(tokens, packed, types, dtype=jnp.bfloat16, capture=BOTH)
    )
    assert bfloat16[0].dtype == jnp.bfloat16
    assert {a.dtype for a in bfloat16[1][0].values()} == {jnp.dtype(jnp.float32)}
