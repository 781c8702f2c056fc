"""config.objective.masked_lm_steps: masked-LM first, then replaced tokens, in one program."""

import dataclasses
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax import recipes
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import ConfigError, MeshSection
from convbert_jax.interfaces import SpecialIds
from convbert_jax.interop.networks import split
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS
from convbert_jax.objectives import masked_lm, replaced_token
from convbert_jax.recipes import tasks
from convbert_jax.training import environment, loop
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.training.train_step import make_program
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.runs import make_config

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
FIRST = 2


def make(**fields):
    """Return a config with two steps per phase and no dropout."""
    fixed = {
        "objective__masked_lm_steps": FIRST,
        "model__dropout": 0.0,
        "model__attention_dropout": 0.0,
        "train__steps": 4,
        "train__batch_size": 8,
        "optimizer__warmup_steps": 1,
    }
    return make_config(**fixed | fields)


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(5, 200, (8, 32)).astype(np.int32)
    ids = np.ones_like(tokens)
    ids[0, 20:] = tokens[0, 20:] = 0
    return {"tokens": tokens, "segment_ids": ids, "type_ids": np.zeros_like(tokens)}


@pytest.mark.parametrize("kind", ["separate", "uniform"])
def test_each_phase_by_hand(batch, kind):
    """Checks the loss, and which parameters receive gradients."""
    config = make(generator__kind=kind, objective__generator_weight=0.5)
    graphdef, init = build(MODELS["replaced_token"], config)
    params, key = jax.jit(init)(jax.random.key(1)), jax.random.key(7)
    settings = {"dtype": jnp.float32, "config": config, "special": SPECIAL}

    def loss(params, first=None):
        model = nnx.merge(graphdef, params)
        phase = {} if first is None else {"masked_first": first}
        return replaced_token.loss(model, batch, key, train=True, **settings, **phase)

    def loss_of_encoder(params):
        model = nnx.merge(graphdef, params)
        key_of_masks = jax.random.split(jax.random.split(key)[0], 3)[0]
        masked = masked_lm.hide(batch, key_of_masks, config=config, special=SPECIAL)
        hidden = model.encode(masked.tokens, batch["segment_ids"], batch["type_ids"])
        odds = jax.nn.log_softmax(model.predict(hidden, masked.positions))
        right = jnp.take_along_axis(odds, masked.labels[..., None], -1)[..., 0]
        return -(right * masked.weights).sum() / masked.weights.sum()

    @jax.jit
    def compute(params, phases):
        learn = jax.value_and_grad(loss, has_aux=True)
        return [learn(params, first) for first in phases], loss(params), loss_of_encoder(params)

    (first, second), (plain, numbers), encoder_loss = jax.device_get(
        compute(params, [jnp.bool_(True), jnp.bool_(False)])
    )
    (value, found), gradients = first
    mean = {name: float(sums[0] / sums[1]) for name, sums in found.items() if sums[1] > 0}
    assert mean["encoder_mlm_loss"] == pytest.approx(float(encoder_loss), rel=1e-5)
    assert value == pytest.approx(0.5 * mean["mlm_loss"] + mean["encoder_mlm_loss"], rel=1e-5)
    assert all(found[n][1] == 0 for n in found if n.startswith("discriminator"))
    taught = {"embeddings", "discriminator", "masked_lm_head"}
    taught |= {"generator", "generator_head"} if kind == "separate" else set()
    assert {part for part, g in gradients.items() if any(map(np.any, jax.tree.leaves(g)))} == taught

    (value, found), gradients = second
    assert value == pytest.approx(float(plain), rel=1e-5)
    assert found["encoder_mlm_loss"] == (0.0, 0.0)
    assert found.keys() == numbers.keys()
    for name in (name for name in numbers if not name.startswith("encoder_")):
        np.testing.assert_allclose(found[name], numbers[name], rtol=1e-4)
    taught = taught - {"masked_lm_head"} | {"discriminator_head"}
    assert {part for part, g in gradients.items() if any(map(np.any, jax.tree.leaves(g)))} == taught


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({}, True),
        ({"generator__kind": "uniform"}, False),  # has no parameters to train
        ({"recipe": "masked_lm"}, True),
        ({"recipe": "causal_lm"}, True),
    ],
    ids=str,
)
def test_a_model_of_constant_logits_is_warned_about(fields, warned):
    config = make_config(**fields)
    tokenizer = types.SimpleNamespace(begins_word=np.zeros(200))
    task = tasks.build_task(config, SPECIAL, jax.devices()[0], tokenizer=tokenizer)
    values = dict.fromkeys(config.heldout_metrics, 0.5) | {"replaced_rate": 0.1}
    values |= dict.fromkeys(("mlm_accuracy", "token_accuracy"), 1 / config.tokenizer.vocab_size)
    accuracy = f"{1 / config.tokenizer.vocab_size:.1%}"
    assert len([text for text in task.health(5_000, values) if accuracy in text]) == warned


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The config, the run and its compiled steps."""
    config = make(
        data__source=text,
        model__dropout=0.1,
        train__accumulation=2,
        train__log_every=1,
        train__eval_every=2,
        train__eval_rows=16,
        checkpoint__every=1,
        checkpoint__keep=4,
        checkpoint__best_metric="encoder_mlm_accuracy",
    )
    programs = []

    def keep(*arguments):
        programs.append(make_program(*arguments))
        return programs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_program", keep)
        result = recipes.pretrain(config, tmp_path_factory.mktemp("phases") / "run")
    return config, result, programs


def resume_from_step_1(finished, folder, **sections):
    """Resume before the phase changes; return the run."""
    config, result, _ = finished
    shutil.copytree(result.folder, folder)
    for step in range(2, 5):
        shutil.rmtree(folder / "checkpoints" / str(step))
    return recipes.pretrain(dataclasses.replace(config, **sections), folder)


def losses_of(run) -> list[float]:
    return [line["loss"] for line in run.metrics if line["split"] == "train"]


def test_one_compiled_step_changes_its_phase(finished):
    _, result, (program,) = finished
    assert program.train_step._cache_size() == 1
    train = [line for line in result.metrics if line["split"] == "train"]
    unknown = [math.isnan(line["discriminator_loss"]) for line in train]
    assert unknown == [step < FIRST for step in range(4)]
    assert [math.isnan(line["encoder_mlm_loss"]) for line in train] == [not u for u in unknown]


def test_held_out_numbers_are_those_of_both_phases_in_both(finished):
    config, result, _ = finished
    held_out = [line for line in result.metrics if line["split"] == "validation"]
    assert [line["step"] for line in held_out] == [2, 4]
    for line in held_out:
        # Precision is undefined if no token is predicted as replaced.
        names = set(config.heldout_metrics) - {"discriminator_precision"}
        assert not [name for name in names if math.isnan(line[name])]
    assert set(result.evaluation) == set(config.heldout_metrics)


def test_resuming_across_the_change_is_exact(finished, tmp_path):
    again = resume_from_step_1(finished, tmp_path / "run")
    _, result, _ = finished
    wanted, found = (load_arrays(Workdir(r.folder).checkpoints, 4)[1] for r in (result, again))
    assert compare(wanted, found) == []


def test_it_resumes_on_a_mesh(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "find_devices", lambda _: jax.devices()[:4])
    mesh = MeshSection(data=1, fsdp=2, tensor=2)
    again = resume_from_step_1(finished, tmp_path / "run", mesh=mesh)
    np.testing.assert_allclose(losses_of(again), losses_of(finished[1]), rtol=2e-4)


def test_the_head_of_the_first_phase_stays_behind(finished):
    config, *_ = finished
    _, init = build(MODELS["replaced_token"], config)
    params = jax.jit(init)(jax.random.key(0))
    assert "masked_lm_head" in params
    networks = split(config, params)
    assert not networks["main"].has("mlm_head")
    assert networks["generator"].has("mlm_head")


def test_configs_without_two_phases_are_refused():
    pairs = {"objective__sentence_pairs": "next", "data__layout": "pairs"}
    for fields, mention in (
        ({"objective__masked_lm_steps": 4}, "config.train.steps"),
        ({"generator__kind": "shared"}, "generator"),
        ({"recipe": "masked_lm"}, "masked_lm"),
        ({"recipe": "masked_lm", **pairs}, 2),
    ):
        with refused(ConfigError, "masked_lm_steps", mention):
            make(**fields)
