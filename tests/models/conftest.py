"""Fixtures: a small config, random weights, packed rows with padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import Config


@pytest.fixture(scope="session")
def make_config():
    """Return make_config(generator={...}, recipe=..., **fields of the model section) -> Config."""

    def make(recipe="replaced_token", generator=None, **model):
        config = Config(recipe=recipe)
        small = dict(
            layers=2, hidden_size=32, embedding_size=16, ffn_size=64, heads=4, positions=48
        )
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, **(small | model)),
            generator=dataclasses.replace(config.generator, **({"size": 0.5} | (generator or {}))),
            tokenizer=dataclasses.replace(config.tokenizer, vocab_size=50),
            data=dataclasses.replace(config.data, length=24),
        )

    return make


@pytest.fixture(scope="module", autouse=True)
def cheap_compilation():
    """Reduce compiler optimization: these tests spend most of their time compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def randomize():
    """Return randomize(build) -> (graphdef, params) of build(rngs), weights large and distinct."""

    def fill(build, scale=0.2):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        rng = np.random.default_rng(0)

        def draw(path, leaf):
            center = 1.0 if path[-1].key == "scale" else 0.0
            return jnp.asarray(center + scale * rng.standard_normal(leaf.shape), jnp.float32)

        return graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state))

    return fill


@pytest.fixture(scope="session")
def packed():
    """Segment ids [2, 24]: a row of three documents, and a row of two with padding."""
    return jnp.asarray([[1] * 5 + [2] * 11 + [3] * 8, [1] * 9 + [2] * 6 + [0] * 9])
