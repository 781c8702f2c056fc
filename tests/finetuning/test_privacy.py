"""Differentially private fine-tuning: accounting, clipping, sampling, noise, and canaries."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.running import NO_PRIVACY

pytest.importorskip("jax_privacy", reason=NO_PRIVACY)

from convbert_jax.config import ConfigError, from_config_dict, to_dict
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.finetuning import classification, fitting, privacy
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.recipes.finetuning import make_mesh
from convbert_jax.training.train_step import TrainState
from tests.finetuning.conftest import WORDS
from tests.refusals import refused

PRIVATE = {"finetune__seeds": 1, "finetune__privacy_epsilon": 2.0, "finetune__privacy_delta": 1e-3}


def make_plan(make_config, rows, steps, kind="classification", **fields):
    task = types.SimpleNamespace(
        name="toy", train=range(rows), outputs=types.SimpleNamespace(kind=kind)
    )
    return privacy.make_plan(task, make_config(**PRIVATE | fields), steps)


def test_noise_without_subsampling_is_that_of_the_gaussian_mechanism(make_config):
    """T Gaussians compose to one; its epsilon from its Rényi divergence (Mironov 2017, prop. 3)."""
    plan = make_plan(make_config, 8, 5)
    alpha = np.arange(2, 65)
    divergence = 5 * alpha / (2 * plan.noise_multiplier**2)
    bound = np.min(divergence + math.log(1e3) / (alpha - 1))
    assert 0.98 * 2 <= plan.epsilon <= 2
    assert plan.epsilon <= bound <= 1.3 * plan.epsilon  # dp_accounting's conversion is tighter


def test_sampling_lowers_the_noise(make_config):
    noise = [make_plan(make_config, rows, 5).noise_multiplier for rows in (8, 80, 800)]
    assert noise == sorted(noise, reverse=True)
    assert noise[0] > 2 * noise[2]


def test_gradients_of_rows_are_clipped_and_padding_is_ignored():
    def loss(params, batch, key, scale):
        del key
        return scale * jnp.sum(batch["weight"] * (batch["x"] @ params)), {}

    rows = np.array([[3.0, 4.0], [0.3, 0.4], [5.0, 0.0], [9.0, 9.0]] * 2, np.float32)
    weight = np.array([1, 1, 1, 0] * 2, np.float32)
    gradient = privacy.row_gradients(clip=1.0, batch_size=10)(loss)
    (value, _), mean = gradient(
        jnp.ones(2), {"x": rows, "weight": weight}, jax.random.key(0), jnp.float32(1.0)
    )
    np.testing.assert_allclose(mean, np.array([0.6 + 0.3 + 1, 0.8 + 0.4]) * 2 / 10, rtol=1e-6)
    assert value == 0


def start(plan):
    optimizer = optax.chain(privacy.add_noise(), optax.identity())
    state = TrainState(jnp.zeros((), jnp.int32), {}, optimizer.init({}))
    return optimizer, privacy.start(state, plan)


def test_noise_has_the_planned_deviation_and_is_secret(make_config):
    plan = make_plan(make_config, 80, 5, finetune__privacy_clip=0.5)
    optimizer, state = start(plan)
    zeros = {"a": jnp.zeros(20_000), "b": jnp.zeros(100)}
    first, opt_state = optimizer.update(zeros, state.opt_state)
    second, _ = optimizer.update(zeros, opt_state)
    expected = plan.noise_multiplier * 0.5 / 8
    assert np.std(first["a"]) == pytest.approx(expected, rel=0.03)
    assert np.corrcoef(first["a"], second["a"])[0, 1] == pytest.approx(0, abs=0.03)
    assert not np.array_equal(state.opt_state[0].secret, start(plan)[1].opt_state[0].secret)
    unset = optax.chain(privacy.add_noise()).init({})
    assert np.isnan(privacy.add_noise().update(zeros, unset[0])[0]["a"]).all()


def test_batches_are_poisson_samples_that_depend_on_the_secret(make_config):
    plan = make_plan(make_config, 40, 400)
    _, state = start(plan)
    found = [index[0] for _, index in privacy.batches(plan, state, 16)]
    again = [index[0] for _, index in privacy.batches(plan, state, 16)]
    assert all(map(np.array_equal, found, again))
    assert {len(index) % 16 for index in found} == {0}
    drawn = np.zeros((400, 40))
    for step, index in enumerate(found):
        drawn[step, index[index >= 0]] = 1
    sizes = drawn.sum(1)
    assert sizes.mean() == pytest.approx(8, abs=0.6)
    assert sizes.var() == pytest.approx(40 * 0.2 * 0.8, rel=0.35)
    assert drawn.mean(0).std() < 0.04  # each row equally often


def make_canaries(count, seed):
    """Sentences of random words with random labels: only a memory of them predicts the label."""
    random, words = np.random.default_rng(seed), WORDS.split()
    return [
        Example(str(i), (" ".join(random.choice(words, 6)),), int(random.integers(2)))
        for i in range(count)
    ]


def fit_canaries(make_config, vocabulary, epsilon, setting):
    """Train on 24 canaries; return (accuracy on these and on 200 others, the trained run)."""
    inside, outside = make_canaries(24, 1), make_canaries(200, 2)
    source = LabelledTask(
        name="canaries",
        kind="classification",
        texts=1,
        labels=("a", "b"),
        metrics=("accuracy",),
        splits=("train", "inside", "outside"),
        reader={"train": inside, "inside": inside, "outside": outside}.__getitem__,
    )
    config = make_config(
        **PRIVATE | {"finetune__privacy_epsilon": epsilon},
        finetune__batch_size=24,
        finetune__dropout=0.0,
        model__dropout=0.0,
        model__attention_dropout=0.0,
    )
    programs = Programs(config, jnp.float32, make_mesh(config, jax.devices()))
    task = classification.make_task(source, config, vocabulary)
    fitted = fitting.fit(programs, task, config, setting, [0], None, vectorized=False)
    found = {}
    for split in ("inside", "outside"):
        (state,) = fitting.predict(programs, task, config, fitted.params, split, vectorized=False)
        found[split] = task.evaluators[split].finish(state)["accuracy"]
    return found, fitted


def test_canaries_are_memorized_only_without_privacy(make_config, vocabulary):
    """Exposure: how much higher the accuracy is on canaries of the training set than on others."""
    setting = Setting(1e-2, 60.0)
    public, _ = fit_canaries(make_config, vocabulary, 0.0, setting)
    private, fitted = fit_canaries(make_config, vocabulary, 1.0, setting)
    assert public["inside"] == 1
    assert public["outside"] < 0.65
    assert private["inside"] < 0.8
    assert (fitted.plan.epsilon <= 1, fitted.losses[0]) == (True, 0)


def test_a_private_run_that_diverges_is_noticed(make_config, vocabulary):
    """Its loss is not reported, so the parameters must show it."""
    _, fitted = fit_canaries(make_config, vocabulary, 1.0, Setting(1e38, 3.0))
    assert np.isnan(fitted.losses[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finetune.seeds", 2),
        ("finetune.learning_rates", (1e-3, 2e-3)),
        ("finetune.epochs", (1.0, 2.0)),
        ("finetune.swap_pairs", True),
        ("finetune.release_batches", True),
        ("finetune.distill_from", "runs/teacher"),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(make_config, field, value):
    config = make_config(**PRIVATE | {field.replace(".", "__"): value})
    with refused(ConfigError, field=f"config.{field}"):
        from_config_dict(to_dict(config))


@pytest.mark.parametrize(
    ("fields", "rows", "kind", "field"),
    [
        ({}, 7, "classification", "config.finetune.batch_size"),
        ({}, 1_000, "classification", "config.finetune.privacy_delta"),
        ({}, 100, "span", "config.finetune.privacy_epsilon"),
    ],
)
def test_data_that_it_does_not_fit_is_refused(make_config, fields, rows, kind, field):
    with refused(ConfigError, field=field):
        make_plan(make_config, rows, 5, kind, **fields)
    with refused(ConfigError, field="config.finetune.privacy_epsilon"):
        privacy.check(make_config(**PRIVATE), devices=2)
