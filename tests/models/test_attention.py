"""Attention against its formula, row by row and segment by segment."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers.attention import attend


def inputs(length=24):
    return jax.random.normal(jax.random.key(0), (3, 2, length, 2, 8))


def plain(query, key, value):
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value)


def test_each_segment_attends_to_itself(packed):
    query, key, value = inputs()
    out = attend(query, key, value, packed)
    for b, start, stop in [(0, 0, 5), (0, 5, 16), (0, 16, 24), (1, 0, 9), (1, 9, 15)]:
        alone = plain(*(np.asarray(x[b, start:stop]) for x in (query, key, value)))
        np.testing.assert_allclose(out[b, start:stop], alone, atol=1e-5)


def test_a_row_of_padding_stays_finite():
    query, key, value = inputs()
    ids = jnp.zeros((2, 24), jnp.int32)

    def total(value):
        return attend(query, key, value, ids).sum()

    assert jnp.isfinite(attend(query, key, value, ids)).all()
    assert jnp.isfinite(jax.grad(total)(value)).all()


def test_the_bottleneck_is_the_mixed_block_without_its_convolution(make_config, packed):
    def build(mixer):
        layer = make_config(mixer=mixer).encoder.stages[0].layer
        return layer.mixer.module(layer.hidden_size, initializers("huggingface", 0.5), nnx.Rngs(0))

    mixed, bottleneck = build("mixed"), build("bottleneck")
    for name in ("query", "key", "value"):
        setattr(bottleneck, name, getattr(mixed, name))
    kernel = mixed.output.kernel[...]  # rows of the attention heads first
    half = len(kernel) // 2
    bottleneck.output.kernel[...] = kernel[:half]
    mixed.output.kernel[...] = kernel.at[half:].set(0.0)
    x = jax.random.normal(jax.random.key(1), (2, 24, 32))
    np.testing.assert_allclose(bottleneck(x, packed), mixed(x, packed), atol=1e-5)


def test_dropout_acts_on_the_weights(packed):
    query, key, value = inputs()
    run = jax.vmap(
        lambda seed: attend(
            query, key, value, packed, dropout_rate=0.2, dropout_key=jax.random.key(seed)
        )
    )
    samples = run(jnp.arange(400))
    exact = attend(query, key, value, packed)
    assert not np.allclose(samples[0], exact, atol=1e-2)
    np.testing.assert_allclose(samples.mean(axis=0)[:, :9], exact[:, :9], atol=0.2)
