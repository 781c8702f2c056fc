"""No mixer lets a token depend on padding or on another document; values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config.mixers import MIXERS
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import initializers
from convbert_jax.models.pretraining import PretrainingModel
from tests.models.definitions import KINDS


@pytest.fixture(scope="module")
def make_run(make_config, randomize):
    """make_run(part, kind) -> f(x [B, L, C], segment_ids), a mixer or a whole encoder."""

    @functools.cache
    def make(part, kind, mask_convolution=True):
        config = make_config(
            embedding_size=32, mask_convolution=mask_convolution, **KINDS[kind]
        ).encoder
        layer = config.stages[0].layer
        starts = initializers(layer.initializers, 0.02)
        build = {
            "mixer": lambda rngs: layer.mixer.module(32, starts, rngs),
            "encoder": lambda rngs: Encoder(config, rngs),
        }[part]
        graphdef, params = randomize(build)
        return jax.jit(lambda x, ids: nnx.merge(graphdef, params)(x, ids))

    return make


def states(length=24):
    return jax.random.normal(jax.random.key(1), (2, length, 32))


cases = pytest.mark.parametrize(
    ("part", "kind"),
    [*(("mixer", kind) for kind in KINDS), ("encoder", "mixed"), ("encoder", "light")],
)


@cases
def test_more_padding_changes_nothing(make_run, part, kind):
    run = make_run(part, kind)
    x, ids = states(), jnp.asarray([[1] * 15, [1] * 9 + [0] * 6])
    out = run(x[:, :15], ids)
    padded = run(x, jnp.pad(ids, ((0, 0), (0, 9))))[:, :15]
    real = np.asarray(ids != 0)
    np.testing.assert_allclose(padded[real], out[real], atol=1e-5)


@cases
def test_no_gradient_from_padding_or_another_document(make_run, packed, part, kind):
    run = make_run(part, kind)

    def total(x):
        return jnp.sum(jnp.square(run(x, packed)) * (packed == 2)[..., None] * states())

    gradient = jax.jit(jax.grad(total))(states())
    outside = np.asarray(packed != 2)
    np.testing.assert_array_equal(gradient[outside], 0)
    assert jnp.abs(gradient[~outside]).min(axis=-1).all()


@cases
def test_packed_is_alone(make_run, packed, part, kind):
    run = make_run(part, kind)
    out = run(states(), packed)
    for b, start, stop in [(0, 0, 5), (0, 5, 16), (1, 9, 15)]:
        alone = run(states()[b : b + 1, start:stop], jnp.ones((1, stop - start), jnp.int32))
        np.testing.assert_allclose(out[b, start:stop], alone[0], atol=1e-5)


def test_without_masked_convolution_padding_leaks_as_in_the_release(make_run):
    run = make_run("mixer", "mixed", mask_convolution=False)
    x, ids = states(), jnp.ones((2, 15), jnp.int32)
    change = jnp.abs(run(x, jnp.pad(ids, ((0, 0), (0, 9))))[:, :15] - run(x[:, :15], ids))
    np.testing.assert_allclose(change[:, :11], 0, atol=1e-5)
    assert change[:, 11:].max() > 1e-2  # the last four tokens read what follows


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_whole_model(make_config, randomize, packed, mixer):
    """Positions too: documents packed in one row get the logits they get alone."""
    config = make_config(mixer=mixer)
    graphdef, params = randomize(lambda rngs: PretrainingModel(config, rngs))
    tokens = jax.random.randint(jax.random.key(1), packed.shape, 0, 50)

    @jax.jit
    def run(tokens, ids):
        return nnx.merge(graphdef, params).discriminate(tokens, ids, jnp.zeros_like(ids))

    out = run(tokens, packed)
    for b, start, stop in [(0, 5, 16), (1, 9, 15)]:
        alone = run(tokens[b : b + 1, start:stop], jnp.ones((1, stop - start), jnp.int32))
        np.testing.assert_allclose(out[b, start:stop], alone[0], atol=1e-5)
