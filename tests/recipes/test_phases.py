"""Masked words first, replaced tokens after: what learns when, in one compiled step, on any mesh,
resumed to the bit.
"""

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
from convbert_jax.config import ConfigError
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop.networks import MODELS, split
from convbert_jax.models.build import build
from convbert_jax.objectives import masked_lm, replaced_token
from convbert_jax.recipes import tasks
from convbert_jax.training import sharding
from convbert_jax.training.checkpoints.reading import load_arrays
from convbert_jax.training.program import make_program
from convbert_jax.workdir import Workdir
from tests.runs import make_config

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
FIRST = 2


def make(**fields):
    """Two steps of each phase, nothing dropped."""
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
    """The value, and which parts of the model it teaches."""
    config = make(generator__kind=kind, objective__generator_weight=0.5)
    graphdef, init = build(MODELS["replaced_token"], config)
    params, key = jax.jit(init)(jax.random.key(1)), jax.random.key(7)
    settings = {"dtype": jnp.float32, "config": config, "special": SPECIAL}

    @jax.jit
    def learn(params, first):
        def loss(params):
            model = nnx.merge(graphdef, params)
            return replaced_token.loss(
                model, batch, key, train=True, **settings, masked_first=first
            )

        return jax.value_and_grad(loss, has_aux=True)(params)

    @jax.jit
    def encoder_alone(params):
        model = nnx.merge(graphdef, params)
        key_of_masks = jax.random.split(jax.random.split(key)[0], 3)[0]
        masked = masked_lm.hide(batch, key_of_masks, config=config, special=SPECIAL)
        hidden = model.encode(masked.tokens, batch["segment_ids"], batch["type_ids"])
        odds = jax.nn.log_softmax(model.predict(hidden, masked.positions))
        right = jnp.take_along_axis(odds, masked.labels[..., None], -1)[..., 0]
        return -(right * masked.weights).sum() / masked.weights.sum()

    (value, found), gradients = jax.device_get(learn(params, True))
    mean = {name: float(sums[0] / sums[1]) for name, sums in found.items() if sums[1] > 0}
    assert mean["encoder_mlm_loss"] == pytest.approx(float(encoder_alone(params)), rel=1e-5)
    assert value == pytest.approx(0.5 * mean["mlm_loss"] + mean["encoder_mlm_loss"], rel=1e-5)
    assert all(found[n][1] == 0 for n in found if n.startswith("discriminator"))
    taught = {"embeddings", "discriminator", "masked_lm_head"}
    taught |= {"generator", "generator_head"} if kind == "separate" else set()
    assert {part for part, g in gradients.items() if any(map(np.any, jax.tree.leaves(g)))} == taught

    (value, found), gradients = jax.device_get(learn(params, False))
    plain, numbers = jax.jit(
        lambda p: replaced_token.loss(
            nnx.merge(graphdef, p), batch, key, train=True, **settings
        )
    )(params)  # fmt: skip
    assert value == pytest.approx(float(plain), rel=1e-5)
    assert found["encoder_mlm_loss"] == (0.0, 0.0)
    assert found.keys() == numbers.keys()
    for name in (name for name in numbers if not name.startswith("encoder_")):
        np.testing.assert_allclose(found[name], numbers[name], rtol=1e-4)
    taught = taught - {"masked_lm_head"} | {"discriminator_head"}
    assert {part for part, g in gradients.items() if any(map(np.any, jax.tree.leaves(g)))} == taught


def run_steps(config, batch, devices):
    """(losses, what each step counted, versions of the step that were compiled)."""
    mesh = sharding.make_mesh(config.mesh, devices)
    task = tasks.build_task(config, SPECIAL, devices[0])
    losses, numbers = [], []
    with jax.set_mesh(mesh):
        program = make_program(task, config, mesh)
        state = program.init(jax.random.key(0))
        for _ in range(config.train.steps):
            state, found, vitals = program.train_step(state, program.put_batch(batch))
            losses.append(float(vitals.loss))
            numbers.append(task.summarize(jax.device_get(found)))
    return losses, numbers, program.train_step._cache_size()


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({}, True),
        ({"generator__kind": "uniform"}, False),  # it cannot learn
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
    found = [warning for warning in task.health(5_000, values) if "hardly learns" in warning]
    assert len(found) == warned


def test_one_compiled_step_switches_on_any_mesh(batch):
    devices = jax.devices()
    losses, numbers, versions = run_steps(make(train__accumulation=2), batch, devices[:1])
    assert versions == 1
    unknown = [math.isnan(n["discriminator_loss"]) for n in numbers]
    assert unknown == [step < FIRST for step in range(4)]
    assert [math.isnan(n["encoder_mlm_loss"]) for n in numbers] == [not u for u in unknown]
    axes = {"mesh__data": 1, "mesh__fsdp": 2, "mesh__tensor": 2}
    there, _, versions = run_steps(make(train__accumulation=2, **axes), batch, devices[:4])
    assert versions == 1
    np.testing.assert_allclose(there, losses, rtol=2e-4)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    config = make(
        data__source=text,
        model__dropout=0.1,
        train__log_every=1,
        train__eval_every=2,
        train__eval_rows=16,
        checkpoint__every=1,
        checkpoint__keep=4,
        checkpoint__best_metric="encoder_mlm_accuracy",
    )
    return config, recipes.pretrain(config, tmp_path_factory.mktemp("phases") / "run")


def test_held_out_numbers_are_those_of_both_phases_in_both(finished):
    config, result = finished
    held_out = [line for line in result.metrics if line["split"] == "validation"]
    assert [line["step"] for line in held_out] == [2, 4]
    for line in held_out:
        names = set(config.heldout_metrics) - {"discriminator_precision"}  # none may be flagged
        assert not [name for name in names if math.isnan(line[name])]
    assert set(result.evaluation) == set(config.heldout_metrics)


@pytest.mark.parametrize("cut", [1, 2])
def test_resuming_across_the_switch_is_exact(finished, tmp_path, cut):
    config, result = finished
    folder = tmp_path / "run"
    shutil.copytree(result.folder, folder)
    for step in range(cut + 1, 5):
        shutil.rmtree(folder / "checkpoints" / str(step))
    recipes.pretrain(config, folder)
    wanted, found = (load_arrays(Workdir(f).checkpoints, 4)[1] for f in (result.folder, folder))
    assert compare(wanted, found) == []


def test_the_head_of_the_first_phase_stays_behind(finished):
    config, _ = finished
    _, init = build(MODELS["replaced_token"], config)
    params = jax.jit(init)(jax.random.key(0))
    assert "masked_lm_head" in params
    networks = split(config, params)
    assert not networks["main"].has("mlm_head")
    assert networks["generator"].has("mlm_head")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"objective__masked_lm_steps": 4}, r"masked_lm_steps=4 leaves no step of .*steps=4 for"),
        ({"generator__kind": "shared"}, r"masked_lm_steps=2 needs a generator beside the encoder"),
        ({"recipe": "masked_lm"}, r"all steps of config\.recipe='masked_lm' train on masked words"),
        (
            {"recipe": "masked_lm", "objective__sentence_pairs": "next", "data__layout": "pairs"},
            r"masked_lm_steps=2 comes before replaced tokens",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        make(**fields)
