"""The models as the objectives see them: shapes, tied tables, every kind of generator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models.build import build
from convbert_jax.models.pretraining import MaskedLanguageModel, PretrainingModel

POSITIONS = jnp.asarray([[0, 3, 3, 20], [1, 2, 9, 10]])


@pytest.fixture(scope="module")
def tokens(packed):
    return jax.random.randint(jax.random.key(0), packed.shape, 0, 50)


@pytest.fixture(scope="module")
def start(randomize):
    def start(config, model=PretrainingModel):
        return randomize(lambda rngs: model(config, rngs))

    return start


@pytest.mark.parametrize(
    "generator",
    [
        {},
        {"tie_embeddings": False},
        {"kind": "shared"},
        {"kind": "uniform"},
        {"size": 0.25},  # one nominal head: the release's wide heads
        {"size": 0.25, "release_heads": False},
    ],
    ids=str,
)
def test_kinds_of_generator(make_config, start, packed, tokens, generator):
    graphdef, params = start(make_config(generator=generator))
    kind = generator.get("kind", "separate")
    assert ("generator" in params) == (kind == "separate")
    assert ("generator_head" in params) == (kind != "uniform")
    assert ("generator_embeddings" in params) == (not generator.get("tie_embeddings", True))

    @jax.jit
    def run(params):
        model = nnx.merge(graphdef, params)
        types = jnp.zeros_like(tokens)
        mlm = model.generate(tokens, packed, types, POSITIONS, dtype=jnp.bfloat16)
        return mlm, model.discriminate(tokens, packed, types, dtype=jnp.bfloat16)

    mlm, detection = run(params)
    assert (mlm.shape, mlm.dtype) == ((2, 4, 50), jnp.float32)
    assert (detection.shape, detection.dtype) == ((2, 24), jnp.float32)
    assert mlm.any() == (kind != "uniform")
    np.testing.assert_array_equal(mlm[0, 1], mlm[0, 2])  # the same position twice


def differentiate(graphdef, params, packed, tokens):
    """Gradients of the parameters by weights of the generator and the discriminator."""

    @jax.jit
    @jax.grad
    def run(params, generator_weight, discriminator_weight):
        model = nnx.merge(graphdef, params)
        types = jnp.zeros_like(tokens)
        mlm = model.generate(tokens, packed, types, POSITIONS)
        detection = model.discriminate(tokens, packed, types)
        return generator_weight * mlm[..., 7].sum() + discriminator_weight * detection.sum()

    return functools.partial(run, params)


def test_the_table_is_one_leaf_with_both_gradients(make_config, start, packed, tokens):
    graphdef, params = start(make_config())
    tables = [leaf for leaf in jax.tree.leaves(params) if leaf.shape == (50, 16)]
    assert len(tables) == 1
    run = differentiate(graphdef, params, packed, tokens)
    both, first, second = run(1.0, 50.0), run(1.0, 0.0), run(0.0, 50.0)
    one, other = (x["embeddings"]["word"]["embedding"] for x in (first, second))
    assert jnp.abs(one).max() > 0
    assert jnp.abs(other).max() > 0
    total = jax.tree.map(jnp.add, first, second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), both, total)


def test_an_untied_generator_leaves_the_embeddings_alone(make_config, start, packed, tokens):
    graphdef, params = start(make_config(generator={"tie_embeddings": False}))
    assert params["generator_embeddings"]["word"]["embedding"].shape == (50, 16)
    gradient = differentiate(graphdef, params, packed, tokens)(1.0, 0.0)
    assert not gradient["embeddings"]["word"]["embedding"].any()
    assert gradient["generator_embeddings"]["word"]["embedding"].any()


def test_disentangled_embeddings_learn_apart(make_config, start, packed, tokens):
    """E of the masked words alone, what is added to it of the replaced tokens alone."""
    graphdef, params = start(make_config(generator={"disentangle_embeddings": True}))
    run = differentiate(graphdef, params, packed, tokens)
    for weights, learns, stays in (
        ((1.0, 0.0), "embeddings", "own_embeddings"),
        ((0.0, 50.0), "own_embeddings", "embeddings"),
    ):
        gradient = run(*weights)
        assert all(map(np.any, jax.tree.leaves(gradient[learns])))
        assert not any(map(np.any, jax.tree.leaves(gradient[stays])))

    @jax.jit
    def discriminate(params):
        model = nnx.merge(graphdef, params)
        return model.discriminate(tokens, packed, jnp.zeros_like(tokens))

    # Of the sum: what one table gains the other may lose.
    moved = dict(params)
    moved["embeddings"] = jax.tree.map(lambda a: a + 0.25, params["embeddings"])
    moved["own_embeddings"] = jax.tree.map(lambda a: a - 0.25, params["own_embeddings"])
    np.testing.assert_allclose(discriminate(params), discriminate(moved), atol=1e-4)


def test_disentangled_embeddings_start_as_tied_ones(make_config, packed, tokens):
    tied = make_config()
    apart = make_config(generator={"disentangle_embeddings": True})
    (graphdef, init), (other, init_tied) = (build(PretrainingModel, c) for c in (apart, tied))
    params, before = (jax.jit(f)(jax.random.key(0)) for f in (init, init_tied))
    own = params["own_embeddings"]
    assert not any(map(np.any, jax.tree.leaves(own)))
    # words, 48 positions, 2 types and a layer norm, of 16 channels
    assert sum(leaf.size for leaf in jax.tree.leaves(own)) == (50 + 48 + 2 + 2) * 16
    rest = {name: tree for name, tree in params.items() if name != "own_embeddings"}
    assert jax.tree.structure(rest) == jax.tree.structure(before)
    types = jnp.zeros_like(tokens)
    outputs = [
        jax.jit(lambda p, g=g: nnx.merge(g, p).discriminate(tokens, packed, types))(p)
        for g, p in ((graphdef, params), (other, rest))
    ]
    np.testing.assert_array_equal(*outputs)


def test_generate_reads_its_positions(make_config, start, packed, tokens):
    graphdef, params = start(make_config())
    model = nnx.merge(graphdef, params)
    types = jnp.zeros_like(tokens)
    everywhere = jnp.broadcast_to(jnp.arange(24), (2, 24))
    generate = jax.jit(functools.partial(model.generate, tokens, packed, types))
    all_logits, some = generate(everywhere), generate(POSITIONS)
    rows = jnp.arange(2)[:, None]
    np.testing.assert_allclose(some, all_logits[rows, POSITIONS], atol=1e-5)


def test_dropout_needs_a_key(make_config, start, packed, tokens):
    graphdef, params = start(make_config())
    types = jnp.zeros_like(tokens)

    @jax.jit
    def run(key):
        return nnx.merge(graphdef, params).discriminate(tokens, packed, types, key=key)

    np.testing.assert_array_equal(run(None), run(None))
    assert jnp.abs(run(jax.random.key(0)) - run(jax.random.key(1))).max() > 1e-4


def test_masked_language_model(make_config, start, packed, tokens):
    graphdef, params = start(make_config(recipe="masked_lm"), MaskedLanguageModel)
    assert set(params) == {"embeddings", "encoder", "head"}
    model = nnx.merge(graphdef, params)
    types = jnp.zeros_like(tokens)
    logits = jax.eval_shape(model.generate, tokens, packed, types, POSITIONS)
    assert (logits.shape, logits.dtype) == ((2, 4, 50), jnp.float32)
    states = jax.eval_shape(
        functools.partial(model.encode, dtype=jnp.bfloat16), tokens, packed, types
    )
    assert (states.shape, states.dtype) == ((2, 24, 32), jnp.bfloat16)


def test_parameters_start_as_plain_float32_dicts_with_string_keys(make_config):
    _, init = build(PretrainingModel, make_config())
    params = jax.eval_shape(init, jax.random.key(0))

    def check(tree):
        if isinstance(tree, dict):
            assert type(tree) is dict
            assert all(type(key) is str for key in tree)
            return [check(child) for child in tree.values()]
        assert tree.dtype == jnp.float32

    check(params)


def test_starts_depend_on_the_key_alone(make_config):
    _, init = build(PretrainingModel, make_config())
    init = jax.jit(init)
    once, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    table = once["embeddings"]["word"]["embedding"]
    assert not np.allclose(table, other["embeddings"]["word"]["embedding"])
