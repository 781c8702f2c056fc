"""Embeddings, heads and pre-training models against their formulas in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models import build
from convbert_jax.models.embeddings import Embeddings, positions
from convbert_jax.models.networks import MaskedLanguageModel, PretrainingModel
from tests.models.definitions import check_gradients, dense, gelu, layer_norm
from tests.refusals import refused

POSITIONS = jnp.asarray([[0, 3, 3, 20], [1, 2, 9, 10]])


@pytest.fixture(scope="module")
def tokens(packed):
    return jax.random.randint(jax.random.key(0), packed.shape, 0, 50)


@pytest.fixture(scope="module")
def small(make_config):
    """Return small(**fields) -> a config with one small layer."""
    return functools.partial(make_config, layers=1, mixer="separable")


def exactly(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def words(p, hidden, table):
    """Compute the logits of a masked language modeling head."""
    x = layer_norm(gelu(dense(hidden, p["dense"])), p["norm"])
    return x @ table["word"]["embedding"].T + p["output_bias"]


def pick(hidden):
    return np.take_along_axis(np.asarray(hidden, np.float64), POSITIONS[..., None], 1)


# --- Embeddings ---


@pytest.mark.parametrize(
    ("segment_ids", "expected"),
    [
        ([1, 1, 1, 0, 0], [0, 1, 2, 3, 4]),  # as in the official code
        ([1, 1, 2, 2, 2], [0, 1, 0, 1, 2]),
        ([1, 2, 3, 0, 0], [0, 0, 0, 1, 2]),
        ([3, 3, 1, 1, 0], [0, 1, 0, 1, 2]),
        ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
        ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
    ],
)
def test_positions_restart_with_each_segment(segment_ids, expected):
    np.testing.assert_array_equal(positions(jnp.asarray([segment_ids]))[0], expected)


def test_embeddings_are_the_norm_of_a_sum(make_config, randomize, packed, tokens):
    start = jax.nn.initializers.normal(1.0)
    graphdef, params = randomize(
        lambda rngs: Embeddings(make_config().embeddings, start, rngs), scale=1.0
    )
    types = jax.random.randint(jax.random.key(1), packed.shape, 0, 2)
    # Padding continues the count; no position exceeds 15.
    places = np.asarray([[*range(5), *range(11), *range(8)], [*range(9), *range(15)]])
    cotangent = np.asarray(jax.random.normal(jax.random.key(2), (*packed.shape, 16)))

    @jax.jit
    def program(params, x, bias):
        embed = lambda params: nnx.merge(graphdef, params)(tokens, packed, types)  # noqa: E731
        out, back = jax.vjp(embed, params)
        return out, back(cotangent)[0], nnx.merge(graphdef, params).attend(x, bias)

    x, bias = jax.random.normal(jax.random.key(3), (2, 3, 16)), jnp.arange(50.0)
    out, gradient, logits = program(params, x, bias)
    p = exactly(params)

    def define(p):
        at = {"word": np.asarray(tokens), "position": places, "type": np.asarray(types)}
        return layer_norm(sum(p[name]["embedding"][at[name]] for name in at), p["norm"])

    np.testing.assert_allclose(out, define(p), atol=1e-5)
    check_gradients(gradient, lambda p: (define(p) * cotangent).sum(), (params,))
    assert not gradient["position"]["embedding"][16:].any()
    table = p["word"]["embedding"]
    np.testing.assert_allclose(logits, np.float64(x) @ table.T + np.float64(bias), atol=1e-4)
    embeddings = nnx.merge(graphdef, params)
    short = jax.eval_shape(embeddings.attend, x.astype(jnp.bfloat16), bias)
    assert short.dtype == jnp.float32
    long = jnp.ones((1, 49), jnp.int32)
    with refused(ValueError, 49, 48):
        embeddings(long, long, long)


# --- Models ---


def test_a_model_to_pre_train_is_the_sum_of_its_parts(make_config, randomize, packed, tokens):
    """Documents packed in one row get the same logits as alone."""
    config = make_config()
    graphdef, params = randomize(lambda rngs: PretrainingModel(config, rngs))
    alone = [tokens[0, 5:16], tokens[1, 9:15]]
    rows = jnp.stack([*tokens, *(jnp.pad(part, (0, 24 - len(part))) for part in alone)])
    ids = jnp.stack([*packed, *((jnp.arange(24) < len(part)).astype(int) for part in alone)])
    types, everywhere = jnp.zeros_like(rows), jnp.broadcast_to(jnp.arange(24), rows.shape)

    @jax.jit
    def program(params, key):
        model = nnx.merge(graphdef, params)
        given = rows, ids, types
        hidden, (seen,) = model.encode(*given, capture=("attention", "filters"))
        read = model.embed(*given)
        of_generator = model.generator(read, ids)
        dropped = jax.vmap(lambda key: model.discriminate(*given, key=key))(key)
        return {
            "hidden": hidden,
            "seen": seen,
            "encoded": model.discriminator(read, ids),
            "of_generator": of_generator,
            "words": model.generate(*given, everywhere),
            "detected": model.discriminate(*given),
            "dropped": dropped,
        }

    found = program(params, jax.random.split(jax.random.key(0)))
    p = exactly(params)
    np.testing.assert_allclose(found["hidden"], found["encoded"], atol=1e-5)
    assert {name: part.shape[:2] for name, part in found["seen"].items()} == {
        "attention": (2, 4),
        "filters": (2, 4),
    }
    wanted = words(p["generator_head"], exactly(found["of_generator"]), p["embeddings"])
    np.testing.assert_allclose(found["words"], wanted, atol=1e-4)
    head = p["discriminator_head"]
    wanted = dense(gelu(dense(exactly(found["hidden"]), head["dense"])), head["output"])[..., 0]
    np.testing.assert_allclose(found["detected"], wanted, atol=1e-4)
    for name in ("words", "detected"):
        for row, (b, start, stop) in enumerate([(0, 5, 16), (1, 9, 15)], 2):
            own = found[name][row, : stop - start]
            np.testing.assert_allclose(found[name][b, start:stop], own, atol=2e-5)
    first, second = found["dropped"]
    assert np.abs(first - second).max() > 1e-4
    assert np.abs(first - found["detected"]).max() > 1e-4


# config.generator -> parameters with a gradient from the generator loss, from the discriminator's
GENERATORS = {
    "tied": (
        {},
        {"embeddings", "generator", "generator_head"},
        {"embeddings", "discriminator", "discriminator_head"},
    ),
    "untied": (
        {"tie_embeddings": False},
        {"generator_embeddings", "generator", "generator_head"},
        {"embeddings", "discriminator", "discriminator_head"},
    ),
    "shared": (
        {"kind": "shared"},
        {"embeddings", "discriminator", "generator_head"},
        {"embeddings", "discriminator", "discriminator_head"},
    ),
    "uniform": (
        {"kind": "uniform"},
        set(),
        {"embeddings", "discriminator", "discriminator_head"},
    ),
    "disentangled": (
        {"disentangle_embeddings": True},
        {"embeddings", "generator", "generator_head"},
        {"own_embeddings", "discriminator", "discriminator_head"},
    ),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_each_kind_of_generator_learns_by_its_own_parameters(
    small, randomize, packed, tokens, kind
):
    fields, of_generator, of_discriminator = GENERATORS[kind]
    graphdef, params = randomize(lambda rngs: PretrainingModel(small(generator=fields), rngs))
    assert params.keys() == of_generator | of_discriminator | {"embeddings"}
    types = jnp.zeros_like(tokens)

    def losses(params, weights):
        model = nnx.merge(graphdef, params)
        mlm = model.generate(tokens, packed, types, POSITIONS)
        detected = model.discriminate(tokens, packed, types)
        total = weights[0] * jnp.square(mlm).mean() + weights[1] * jnp.square(detected).mean()
        encoder = model.discriminator if kind == "shared" else getattr(model, "generator", None)
        table = model.generator_embeddings if kind == "untied" else model.embeddings
        hidden = encoder and encoder(table(tokens, packed, types), packed)
        return total, (mlm, detected, hidden)

    run = jax.jit(jax.grad(losses, has_aux=True))
    weights = ([1.0, 0.0], [0.0, 50.0], [1.0, 50.0])
    (first, (mlm, detected, hidden)), (second, _), (both, _) = (
        run(params, jnp.asarray(each)) for each in weights
    )
    for gradient, learns in ((first, of_generator), (second, of_discriminator)):
        for name, part in gradient.items():
            if name in learns:
                assert all(np.any(leaf) for leaf in jax.tree.leaves(part)), name
            else:
                assert not any(np.any(leaf) for leaf in jax.tree.leaves(part)), name
    total = jax.tree.map(jnp.add, first, second)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(check, both, total)

    p = exactly(params)
    if kind == "uniform":
        np.testing.assert_array_equal(mlm, np.zeros((2, 4, 50)))
    else:
        table = p["generator_embeddings" if kind == "untied" else "embeddings"]
        np.testing.assert_allclose(mlm, words(p["generator_head"], pick(hidden), table), atol=1e-4)
    if kind == "disentangled":  # the model reads the sum of both tables
        moved = params | {
            name: jax.tree.map(lambda leaf, by=by: leaf + by, params[name])
            for name, by in (("embeddings", 0.25), ("own_embeddings", -0.25))
        }
        _, (_, again, _) = run(moved, jnp.asarray(weights[0]))
        np.testing.assert_allclose(again, detected, atol=1e-4)


def test_disentangled_embeddings_start_as_tied_ones(small):
    tied, apart = (small(generator={"disentangle_embeddings": on}) for on in (False, True))
    params = build(PretrainingModel, apart)[1](jax.random.key(0))
    before = jax.eval_shape(build(PretrainingModel, tied)[1], jax.random.key(0))
    own = params.pop("own_embeddings")
    assert not any(map(np.any, jax.tree.leaves(own)))
    # words, 48 positions, 2 types and a layer norm, each with 16 channels
    assert sum(leaf.size for leaf in jax.tree.leaves(own)) == (50 + 48 + 2 + 2) * 16
    assert jax.tree.structure(params) == jax.tree.structure(before)


def test_a_masked_language_model_and_its_pairs(small, randomize, packed, tokens):
    config = small("masked_lm")
    objective = dataclasses.replace(config.objective, sentence_pairs="next")
    config = dataclasses.replace(config, objective=objective)
    graphdef, params = randomize(lambda rngs: MaskedLanguageModel(config, rngs))
    assert set(params) == {"embeddings", "encoder", "head", "pair_head"}
    types = jnp.zeros_like(tokens)

    @jax.jit
    def program(params):
        model, given = nnx.merge(graphdef, params), (tokens, packed, types)
        hidden, (seen,) = model.encode(*given, capture="hidden")
        read = model.embed(*given)
        both = model.predict(hidden, POSITIONS), model.judge(hidden)
        return hidden, seen, model.encoder(read, packed), model.generate(*given, POSITIONS), both

    hidden, seen, encoded, logits, (again, judged) = program(params)
    np.testing.assert_allclose(hidden, encoded, atol=1e-5)
    np.testing.assert_array_equal(seen["hidden"][-1], hidden)
    np.testing.assert_array_equal(logits, again)
    p = exactly(params)
    np.testing.assert_allclose(logits, words(p["head"], pick(hidden), p["embeddings"]), atol=1e-4)
    pooled = np.tanh(dense(exactly(hidden)[:, 0], p["pair_head"]["dense"]))
    np.testing.assert_allclose(judged, dense(pooled, p["pair_head"]["output"]), atol=1e-5)


@pytest.mark.parametrize("recipe", ["replaced_token", "masked_lm"])
def test_states_are_in_the_dtype_of_the_computation_and_logits_in_float32(
    make_config, randomize, packed, tokens, recipe
):
    cls = PretrainingModel if recipe == "replaced_token" else MaskedLanguageModel
    for fields in ({"size": 0.25}, {"size": 0.25, "release_heads": False}):
        config = make_config(recipe, fields)
        graphdef, params = randomize(lambda rngs, config=config: cls(config, rngs))

        def run(graphdef=graphdef, params=params):
            model, given = nnx.merge(graphdef, params), (tokens, packed, jnp.zeros_like(tokens))
            hidden, (seen,) = model.encode(
                *given, dtype=jnp.bfloat16, capture=("attention", "filters")
            )
            found = {"hidden": hidden, **seen, "read": model.embed(*given, dtype=jnp.bfloat16)}
            found["words"] = model.generate(*given, POSITIONS, dtype=jnp.bfloat16)
            if recipe == "replaced_token":
                found["detected"] = model.discriminate(*given, dtype=jnp.bfloat16)
            return found

        found = jax.eval_shape(run)
        half = {name for name, part in found.items() if part.dtype == jnp.bfloat16}
        assert half == {"hidden", "read"}
        assert all(found[name].dtype == jnp.float32 for name in found.keys() - half)
        assert found["hidden"].shape == (2, 24, 32)
        assert found["words"].shape == (2, 4, 50)
        assert recipe == "masked_lm" or found["detected"].shape == (2, 24)


def test_parameters_start_as_plain_float32_dicts_by_the_key_alone(small):
    _, init = build(PretrainingModel, small())

    def check(tree):
        if isinstance(tree, dict):
            assert type(tree) is dict
            assert all(type(key) is str for key in tree)
            return [check(child) for child in tree.values()]
        assert tree.dtype == jnp.float32

    once, again, other = map(jax.jit(init), (jax.random.key(seed) for seed in (0, 0, 1)))
    check(once)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    table = once["embeddings"]["word"]["embedding"]
    assert not np.allclose(table, other["embeddings"]["word"]["embedding"])
