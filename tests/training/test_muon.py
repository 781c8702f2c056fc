"""Muon against its definition, computed by singular values and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import Config, OptimizerSection, from_config_dict, to_config_dict
from convbert_jax.models.build import build
from convbert_jax.models.pretraining import MaskedLanguageModel
from convbert_jax.training.muon import find_matrices, scale_by_muon
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.training.state import flatten

ADAM = functools.partial(optax.scale_by_adam, b1=0.9, b2=0.999, eps=1e-6)


def layers(*arrays: np.ndarray) -> dict:
    """Parameters of one stage, a kernel each, as a model has them."""
    kernels = {f"d{i}": {"kernel": jnp.asarray(x, jnp.float32)} for i, x in enumerate(arrays)}
    return {"encoder": {"stages": {"0": kernels}}}


def first_update(params, gradient):
    optimizer = scale_by_muon(ADAM())
    return optimizer.update(gradient, optimizer.init(params), params)[0]


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Jordan et al. (2024): five times X <- a X + (b X X' + c (X X')^2) X."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def test_three_updates_by_hand():
    rng = np.random.default_rng(0)
    p = rng.normal(size=(2, 24, 40))
    optimizer = scale_by_muon(ADAM())
    params = layers(p)
    state, momentum = optimizer.init(params), np.zeros_like(p)
    for step in range(1, 4):
        g = rng.normal(size=p.shape)
        updates, state = jax.jit(optimizer.update)(layers(g), state, params)
        momentum = 0.95 * momentum + 0.05 * g
        # Nesterov with the bias taken out: the momentum as it will be one step on.
        ahead = 0.95 * momentum / (1 - 0.95 ** (step + 1)) + 0.05 * g / (1 - 0.95**step)
        expected = [0.2 * np.sqrt(40) * newton_schulz(m) for m in ahead]
        actual = updates["encoder"]["stages"]["0"]["d0"]["kernel"]
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-4)


@settings(max_examples=20)
@given(
    layers_=st.integers(1, 3), inputs=st.integers(2, 40), outputs=st.integers(2, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_singular_values_come_near_one_and_directions_stay(layers_, inputs, outputs, seed):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(layers_, inputs, outputs))
    # Far from singular: five steps do not bring the smallest values up to 1.
    u, values, v = np.linalg.svd(g, full_matrices=False)
    g = u * np.clip(values, 0.2 * values.max(), None)[:, None, :] @ v
    update = first_update(layers(g), layers(g))["encoder"]["stages"]["0"]["d0"]["kernel"]
    update = np.asarray(update, np.float64) / (0.2 * np.sqrt(max(inputs, outputs)))
    for one, u_, v_ in zip(update, u, v, strict=True):
        inner = u_.T @ one @ v_.T
        off = inner - np.diag(np.diag(inner))
        assert np.abs(off).max() < 2e-3
        assert (np.diag(inner) > 0.6).all()
        assert (np.diag(inner) < 1.3).all()


def test_each_layer_and_group_for_itself():
    rng = np.random.default_rng(1)
    g = rng.normal(size=(3, 2, 16, 24)).astype(np.float32)
    whole = first_update(layers(g), layers(g))["encoder"]["stages"]["0"]["d0"]["kernel"]
    for layer in range(3):
        for group in range(2):
            one = g[layer, group][None]
            alone = first_update(layers(one), layers(one))
            alone = alone["encoder"]["stages"]["0"]["d0"]["kernel"][0]
            np.testing.assert_allclose(whole[layer, group], alone, rtol=1e-4, atol=1e-5)


def test_the_rest_is_adams():
    rng = np.random.default_rng(2)
    shapes = {
        "embeddings": {"word": {"embedding": (50, 8)}},
        "head": {"output": {"kernel": (8, 8), "bias": (8,)}},
        "encoder": {"stages": {"0": {"d": {"kernel": (2, 8, 8), "bias": (2, 8)},
                                     "conv": {"depthwise": (2, 3, 8), "pointwise": (2, 8, 8)}}}},
    }  # fmt: skip
    draw = functools.partial(
        jax.tree.map,
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    params, gradient = draw(shapes), draw(shapes)
    ours = flatten(first_update(params, gradient))
    adam = ADAM()
    theirs = flatten(adam.update(gradient, adam.init(params), params)[0])
    matrices = {name for name, found in flatten(find_matrices(params)).items() if found}
    assert matrices == {"encoder/stages/0/d/kernel", "encoder/stages/0/conv/pointwise"}
    for name, update in ours.items():
        same = np.allclose(update, theirs[name], rtol=1e-6)
        assert same == (name not in matrices), name


@pytest.mark.parametrize(
    ("mixer", "fields", "filters"),
    [
        ("dynamic", (), {"conv_kernel"}),
        ("span_dynamic", (), {"conv_kernel/kernel"}),
        ("mixed", ("filters=dynamic",), {"conv_kernel/kernel"}),
        ("light", (), set()),
        ("mixed", ("filters=light",), set()),
    ],
)
def test_what_makes_filters_of_tokens_is_a_matrix_in_every_mixer(mixer, fields, filters):
    config = to_config_dict(Config(recipe="masked_lm")).unlock()
    config.model.update(
        {"layers": 2, "hidden_size": 32, "embedding_size": 16, "ffn_size": 64, "heads": 4}
    )
    config.model.mixer, config.model.mixer_fields = mixer, fields
    config.tokenizer.vocab_size = 50
    _, init = build(MaskedLanguageModel, from_config_dict(config))
    found = flatten(find_matrices(jax.eval_shape(init, jax.random.key(0))))
    of_filters = {
        name.rpartition("mixer/")[2]
        for name, is_one in found.items()
        if is_one and "/conv_" in name
    }
    assert of_filters & {"conv_kernel", "conv_kernel/kernel", "conv_filters"} == filters


def test_an_update_is_as_large_as_adams():
    """So that a rate of AdamW suits: the root mean square of a first update of Adam is 1, in the
    long run 0.2 to 0.4.
    """
    rng = np.random.default_rng(3)
    for shape in ((1, 64, 64), (1, 64, 256), (1, 256, 64), (1, 128, 18)):
        g = rng.normal(size=shape)
        update = first_update(layers(g), layers(g))["encoder"]["stages"]["0"]["d0"]["kernel"]
        assert 0.12 < float(jnp.sqrt((update**2).mean())) < 0.3


@pytest.mark.parametrize("change", [{}, {"bias_correction": False}, {"weight_decay": 0.0}])
def test_a_run_may_change_its_other_settings(change):
    params = layers(np.ones((1, 4, 4)))
    one = make_optimizer(OptimizerSection(method="muon"), 9).init(params)
    other = make_optimizer(OptimizerSection(method="muon", **change), 9).init(params)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_a_gradient_of_nothing_moves_nothing():
    params = layers(np.ones((1, 4, 6)))
    update = first_update(params, layers(np.zeros((1, 4, 6))))
    np.testing.assert_array_equal(update["encoder"]["stages"]["0"]["d0"]["kernel"], 0.0)
