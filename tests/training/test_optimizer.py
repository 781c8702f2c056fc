"""Optimizer against a numpy version of the official code's `model/optimization.py`."""

import dataclasses
import functools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import Config, OptimizerSection, from_config_dict, to_config_dict
from convbert_jax.config.training import Schedule
from convbert_jax.models import build
from convbert_jax.models.networks import MaskedLanguageModel
from convbert_jax.training.optimizer import (
    layer_multipliers,
    make_injected_lr_optimizer,
    make_optimizer,
    make_schedule,
    muon_mask,
    scale_by_muon,
)
from convbert_jax.training.partitioning import flatten_params

RELEASE = OptimizerSection(
    learning_rate=3e-3, warmup_steps=4, bias_correction=False, decay_during_warmup=True
)
SHAPES = {
    "embeddings": {"word": {"embedding": (5, 3)}, "norm": {"scale": (3,), "bias": (3,)}},
    "encoder": {"dense": {"kernel": (3, 4), "bias": (4,)}},
    "head": {"output_bias": (5,)},
}


def draw(seed: int, size: float = 1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (size * rng.normal(size=shape)).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def numpy_run(section: OptimizerSection, steps: int, gradients: list[dict]) -> dict:
    """Runs Adam with decoupled weight decay in float64, one parameter at a time."""
    params = {name: np.float64(p) for name, p in flatten_params(draw(0)).items()}
    m = {name: np.zeros_like(p) for name, p in params.items()}
    v = {name: np.zeros_like(p) for name, p in params.items()}
    for step, tree in enumerate(gradients):
        grads = {name: np.float64(g) for name, g in flatten_params(tree).items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        warmup = min(1.0, step / section.warmup_steps)
        start = 0 if section.decay_during_warmup else section.warmup_steps
        left = 1.0 - max(0, step - start) / (steps - start)
        decay = section.decay_to + (1.0 - section.decay_to) * left
        rate = section.learning_rate * warmup * decay
        for name, p in params.items():
            g = grads[name]
            if section.clip_norm:
                g = g * section.clip_norm / max(norm, section.clip_norm)
            m[name] = section.beta1 * m[name] + (1 - section.beta1) * g
            v[name] = section.beta2 * v[name] + (1 - section.beta2) * g**2
            mean, square = m[name], v[name]
            if section.bias_correction:
                mean = mean / (1 - section.beta1 ** (step + 1))
                square = square / (1 - section.beta2 ** (step + 1))
            update = mean / (np.sqrt(square) + section.epsilon)
            embedding = name.endswith("/embedding") and not section.decay_embeddings
            if not re.search("norm|bias", name) and not embedding:
                update = update + section.weight_decay * p
            params[name] = p - rate * update
    return params


@pytest.mark.parametrize(
    "section",
    [
        RELEASE,
        OptimizerSection(learning_rate=3e-3, warmup_steps=4, decay_to=0.1, decay_embeddings=False),
        OptimizerSection(learning_rate=3e-3, warmup_steps=1, weight_decay=0.3, clip_norm=1e-3),
        OptimizerSection(learning_rate=3e-3, warmup_steps=2, clip_norm=0.0, weight_decay=0.0),
    ],
    ids=["official", "default", "strong", "off"],
)
def test_updates_follow_the_formulas(section):
    steps = 12
    optimizer = make_optimizer(section, steps)
    params = jax.tree.map(jnp.asarray, draw(0))
    state = optimizer.init(params)
    gradients = [draw(step + 1, size=0.05 if step % 2 else 5.0) for step in range(steps)]
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    expected = numpy_run(section, steps, gradients)
    for name, value in flatten_params(params).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=1e-7, err_msg=name)


def test_release_schedule():
    """Zero at step 0; 1% below the nominal peak after warm-up; zero at the end."""
    section = OptimizerSection(learning_rate=3e-4, warmup_steps=10_000, decay_during_warmup=True)
    schedule = make_schedule(section, 1_000_000)
    assert float(schedule(0)) == 0.0
    assert float(schedule(5_000)) == pytest.approx(3e-4 * 0.995 * 0.5, rel=1e-6)
    assert float(schedule(10_000)) == pytest.approx(3e-4 * 0.99, rel=1e-6)
    assert float(schedule(1_000_000)) == 0.0


@settings(deadline=None, max_examples=25)
@given(
    steps=st.integers(1, 10**6),
    warmup=st.floats(0, 1),
    decay_to=st.floats(0, 1),
    at=st.floats(0, 1),
    during=st.booleans(),
)
def test_schedule_stays_between_zero_and_peak(steps, warmup, decay_to, at, during):
    section = OptimizerSection(
        learning_rate=1.0,
        warmup_steps=int(warmup * steps),
        decay_to=decay_to,
        decay_during_warmup=during,
    )
    schedule = make_schedule(section, steps)
    assert 0.0 <= float(schedule(int(at * steps))) <= 1.0
    assert float(schedule(steps)) == pytest.approx(
        1.0 if steps == section.warmup_steps and not during else decay_to, abs=1e-6
    )


def test_without_a_warm_up_every_rate_is_a_number():
    """For every schedule, as in fine-tuning with few steps."""
    for name in typing.get_args(Schedule):
        schedule = make_schedule(OptimizerSection(schedule=name), 8, warmup_steps=0)
        rates = np.asarray(schedule(np.arange(8)))
        assert np.isfinite(rates).all()
        assert (rates > 0).all()


@settings(deadline=None, max_examples=20)
@given(warmup=st.integers(1, 500), at=st.integers(0, 1000))
def test_other_schedules_by_hand(warmup, at):
    rising = min(1.0, at / warmup)

    def rate(**fields):
        section = OptimizerSection(learning_rate=2.0, warmup_steps=warmup, **fields)
        return float(make_schedule(section, 1000)(at))

    assert rate(schedule="constant") == pytest.approx(2 * rising, rel=1e-5)
    falling = np.sqrt(warmup / max(at, warmup))
    assert rate(schedule="inverse_sqrt") == pytest.approx(2 * rising * falling, rel=1e-5)
    turn = np.pi * max(0, at - warmup) / (1000 - warmup)
    cosine = 0.1 + 0.9 * (1 + np.cos(turn)) / 2
    wanted = pytest.approx(2 * rising * cosine, rel=1e-4, abs=1e-6)
    assert rate(schedule="cosine", decay_to=0.1) == wanted


def test_adafactor_follows_its_paper():
    """Algorithm 4 of Shazeer & Stern (2018) in float64, factored and not; decoupled decay."""
    section = OptimizerSection(
        method="adafactor", schedule="constant", learning_rate=0.01, warmup_steps=0,
        clip_norm=0.0, weight_decay=0.1,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = {"dense": {"kernel": rng.normal(size=(130, 140)), "bias": rng.normal(size=140)}}
    optimizer = make_optimizer(section, 10)
    ours = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state = optimizer.init(ours)
    sizes = [leaf.size for leaf in jax.tree.leaves(state)]
    assert sum(sizes) < 2 * (130 + 140) + 140 + 20  # a row and a column vector instead of a matrix
    theirs = flatten_params(params)
    rows, columns, whole = np.zeros(130), np.zeros(140), np.zeros(140)

    def clipped(update, p):
        update = update / max(1.0, np.sqrt((update**2).mean()))
        return update * max(1e-3, np.sqrt((p**2).mean()))

    for step in range(3):
        gradient = jax.tree.map(lambda p: rng.normal(size=p.shape), params)
        flat = flatten_params(gradient)
        beta = 1 - (step + 1.0) ** -0.8
        kernel, bias = flat["dense/kernel"], flat["dense/bias"]
        rows = beta * rows + (1 - beta) * (kernel**2 + 1e-30).mean(1)
        columns = beta * columns + (1 - beta) * (kernel**2 + 1e-30).mean(0)
        whole = beta * whole + (1 - beta) * (bias**2 + 1e-30)
        square = np.outer(rows, columns) / rows.mean()
        p = theirs["dense/kernel"]
        theirs["dense/kernel"] = p - 0.01 * (clipped(kernel / np.sqrt(square), p) + 0.1 * p)
        p = theirs["dense/bias"]
        theirs["dense/bias"] = p - 0.01 * clipped(bias / np.sqrt(whole), p)
        updates, state = jax.jit(optimizer.update)(
            jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), gradient), state, ours
        )
        ours = jax.tree.map(jnp.add, ours, updates)
    for name, value in flatten_params(ours).items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_state_has_one_structure_for_all_settings():
    """The optimizer settings of a run can change on resume."""
    muon = OptimizerSection(method="muon")
    for first, params, changes in (
        (OptimizerSection(), draw(0), [{"bias_correction": False, "decay_during_warmup": True},
                                       {"clip_norm": 0.0, "weight_decay": 0.0}]),
        (muon, layers(np.ones((1, 4, 4))), [{"bias_correction": False}, {"weight_decay": 0.0}]),
    ):  # fmt: skip
        sections = [first, *(dataclasses.replace(first, **change) for change in changes)]
        states = [make_optimizer(section, 9).init(params) for section in sections]
        assert len({jax.tree.structure(state) for state in states}) == 1


def test_layer_wise_rates_of_the_official_code():
    """`model/optimization.py`: 12 layers, decay 0.8; stages continue the layer count."""
    shapes = {
        "embeddings": {"word": {"embedding": (5, 3)}},
        "encoder": {
            "embeddings_project": {"kernel": (3, 4)},
            "stages": {
                "0": {"mixer": {"query": {"kernel": (8, 4, 4), "bias": (8, 4)}}},
                "1": {"mixer": {"query": {"kernel": (4, 4, 4), "bias": (4, 4)}}},
            },
        },
        "head": {"output": {"kernel": (4, 2)}},
    }
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    rates = flatten_params(layer_multipliers(params, 0.8))
    assert rates["head/output/kernel"] == 1.0
    assert rates["embeddings/word/embedding"] == pytest.approx(0.8**14)
    assert rates["encoder/embeddings_project/kernel"] == pytest.approx(0.044, abs=5e-4)
    layers = np.concatenate(
        [rates[f"encoder/stages/{stage}/mixer/query/kernel"].ravel() for stage in (0, 1)]
    )
    np.testing.assert_allclose(layers, [0.8 ** (14 - (i + 1)) for i in range(12)], rtol=1e-6)
    assert layers[11] == pytest.approx(0.64)
    assert layers[0] == pytest.approx(0.055, abs=5e-4)
    assert rates["encoder/stages/0/mixer/query/bias"].shape == (8, 1)
    assert all(np.all(rate == 1) for rate in jax.tree.leaves(layer_multipliers(params, 1.0)))


def test_an_optimizer_with_an_injected_rate_does_the_same():
    """Compares the injected learning rate, as in fine-tuning, with a compiled schedule."""
    whole, injected = make_optimizer(RELEASE, 10), make_injected_lr_optimizer(RELEASE, 1.0)
    params, schedule = draw(0), make_schedule(RELEASE, 10)
    states = whole.init(params), injected.init(params)
    for step in range(3):
        gradients = draw(step + 1)
        update, first = whole.update(gradients, states[0], params)
        part, second = injected.update(gradients, states[1], params, learning_rate=schedule(step))
        states = first, second
        for ours, theirs in zip(jax.tree.leaves(part), jax.tree.leaves(update), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# Muon against its definition, by singular values in float64

ADAM = functools.partial(optax.scale_by_adam, b1=0.9, b2=0.999, eps=1e-6)


def layers(*arrays: np.ndarray) -> dict:
    """Returns the parameters of one stage with one kernel, in the layout of a model."""
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
    """Two layers with two groups: each matrix is orthogonalized separately."""
    rng = np.random.default_rng(0)
    p = rng.normal(size=(2, 2, 24, 40))
    optimizer = scale_by_muon(ADAM())
    params = layers(p)
    state, momentum = optimizer.init(params), np.zeros_like(p)
    for step in range(1, 4):
        g = rng.normal(size=p.shape)
        updates, state = jax.jit(optimizer.update)(layers(g), state, params)
        momentum = 0.95 * momentum + 0.05 * g
        # Bias-corrected Nesterov momentum.
        ahead = 0.95 * momentum / (1 - 0.95 ** (step + 1)) + 0.05 * g / (1 - 0.95**step)
        matrices = [0.2 * np.sqrt(40) * newton_schulz(m) for m in ahead.reshape(4, 24, 40)]
        actual = updates["encoder"]["stages"]["0"]["d0"]["kernel"]
        expected = np.reshape(matrices, p.shape)
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-4)


@settings(max_examples=6)
@given(
    layers_=st.integers(1, 3), inputs=st.integers(2, 40), outputs=st.integers(2, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_singular_values_come_near_one_and_directions_stay(layers_, inputs, outputs, seed):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(layers_, inputs, outputs))
    # Well-conditioned: five iterations do not bring the smallest singular values to 1.
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
    ours = flatten_params(first_update(params, gradient))
    adam = ADAM()
    theirs = flatten_params(adam.update(gradient, adam.init(params), params)[0])
    matrices = {name for name, found in flatten_params(muon_mask(params)).items() if found}
    assert matrices == {"encoder/stages/0/d/kernel", "encoder/stages/0/conv/pointwise"}
    for name, update in ours.items():
        same = np.allclose(update, theirs[name], rtol=1e-6)
        assert same == (name not in matrices), name


@pytest.mark.parametrize(
    ("mixer", "fields", "filters"),
    [
        ("dynamic", (), {"conv_kernel"}),
        ("mixed", ("filters=dynamic",), {"conv_kernel/kernel"}),
        ("light", (), set()),
    ],
)
def test_a_kernel_that_makes_filters_of_tokens_is_a_matrix(mixer, fields, filters):
    config = to_config_dict(Config(recipe="masked_lm")).unlock()
    config.model.update(
        {"layers": 2, "hidden_size": 32, "embedding_size": 16, "ffn_size": 64, "heads": 4}
    )
    config.model.mixer, config.model.mixer_fields = mixer, fields
    config.tokenizer.vocab_size = 50
    _, init = build(MaskedLanguageModel, from_config_dict(config))
    found = flatten_params(muon_mask(jax.eval_shape(init, jax.random.key(0))))
    of_filters = {
        name.rpartition("mixer/")[2]
        for name, is_one in found.items()
        if is_one and "/conv_" in name
    }
    assert of_filters & {"conv_kernel", "conv_kernel/kernel", "conv_filters"} == filters


def test_a_gradient_of_nothing_moves_nothing():
    params = layers(np.ones((1, 4, 6)))
    update = first_update(params, layers(np.zeros((1, 4, 6))))
    np.testing.assert_array_equal(update["encoder"]["stages"]["0"]["d0"]["kernel"], 0.0)
