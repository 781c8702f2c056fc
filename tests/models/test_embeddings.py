"""Positions of packed documents, the sum of three tables, tied logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models.embeddings import Embeddings, positions


@pytest.mark.parametrize(
    ("segment_ids", "expected"),
    [
        ([1, 1, 1, 0, 0], [0, 1, 2, 3, 4]),  # as the release counts
        ([1, 1, 2, 2, 2], [0, 1, 0, 1, 2]),
        ([1, 2, 3, 0, 0], [0, 0, 0, 1, 2]),
        ([3, 3, 1, 1, 0], [0, 1, 0, 1, 2]),
        ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
        ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
    ],
)
def test_positions_restart_with_each_segment(segment_ids, expected):
    np.testing.assert_array_equal(positions(jnp.asarray([segment_ids]))[0], expected)


def make(make_config):
    config = make_config().embeddings
    return Embeddings(config, jax.nn.initializers.normal(1.0), nnx.Rngs(0))


def test_is_the_norm_of_a_sum(make_config, packed):
    """Vector by vector in float64; the scale and bias of the norm are not the first ones."""
    embeddings = make(make_config)
    rng = np.random.default_rng(0)
    scale, bias = rng.normal(size=(2, 16)).astype(np.float32)
    embeddings.norm.scale[...], embeddings.norm.bias[...] = jnp.asarray(scale), jnp.asarray(bias)
    tables = embeddings.word, embeddings.position, embeddings.type
    word, position, kind = (np.asarray(table.embedding[...], np.float64) for table in tables)
    tokens, types = rng.integers(0, 50, packed.shape), rng.integers(0, 2, packed.shape)
    ids = [[*range(5), *range(11), *range(8)], [*range(9), *range(15)]]  # padding goes on counting
    actual = embeddings(jnp.asarray(tokens), packed, jnp.asarray(types))
    for row, column in np.ndindex(2, 24):
        x = word[tokens[row, column]] + position[ids[row][column]] + kind[types[row, column]]
        x = (x - sum(x) / 16) / math.sqrt(sum((x - sum(x) / 16) ** 2) / 16 + 1e-12)
        np.testing.assert_allclose(actual[row, column], x * scale + bias, atol=1e-5)


def test_gradient_reaches_each_table(make_config, packed):
    embeddings = make(make_config)
    graphdef, params = nnx.split(embeddings)
    tokens = jax.random.randint(jax.random.key(0), packed.shape, 0, 50)
    types = jnp.zeros_like(tokens)
    cotangent = jax.random.normal(jax.random.key(1), (*packed.shape, 16))

    def total(params):
        return jnp.sum(nnx.merge(graphdef, params)(tokens, packed, types) * cotangent)

    gradients = nnx.to_pure_dict(jax.grad(total)(params))
    per_token = jnp.sum(gradients["word"]["embedding"], axis=0)
    np.testing.assert_allclose(gradients["type"]["embedding"].sum(axis=0), per_token, atol=1e-4)
    np.testing.assert_allclose(gradients["position"]["embedding"].sum(axis=0), per_token, atol=1e-4)
    assert not gradients["type"]["embedding"][1].any()
    assert not gradients["position"]["embedding"][16:].any()  # no position beyond 15 occurs


def test_attend_is_the_product_with_the_table_plus_the_bias(make_config):
    embeddings = make(make_config)
    h = jax.random.normal(jax.random.key(0), (2, 3, 16))
    table = np.asarray(embeddings.word.embedding[...], np.float64)
    bias = jax.random.normal(jax.random.key(1), (len(table),))
    products = [[[sum(x * row) for row in table] for x in vectors] for vectors in np.float64(h)]
    np.testing.assert_allclose(embeddings.attend(h, bias), products + np.float64(bias), atol=1e-5)
    assert embeddings.attend(h.astype(jnp.bfloat16), bias).dtype == jnp.float32


def test_rows_longer_than_the_table_are_refused(make_config):
    ids = jnp.ones((1, 49), jnp.int32)
    with pytest.raises(ValueError, match=r"Rows of 49 tokens .* position table of 48"):
        make(make_config)(ids, ids, ids)
