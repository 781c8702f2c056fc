"""The pre-training step on meshes, and its metrics. test_meshes.py compares gradients."""

import dataclasses
import functools
import typing

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from convbert_jax import recipes
from convbert_jax.config import Config, MeshSection, from_config_dict, to_dict
from convbert_jax.config.run import Recipe
from convbert_jax.interfaces import SpecialIds
from convbert_jax.recipes import planning
from convbert_jax.training import memory, partitioning
from convbert_jax.training.train_step import make_program
from tests.batches import metrics_of
from tests.models.mean_mixer import NAME

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)


def small_config(**objective) -> Config:
    values = to_dict(Config())
    values["model"] |= {
        "layers": 2,
        "hidden_size": 64,
        "embedding_size": 32,
        "heads": 4,
        "ffn_size": 128,
        "ffn_groups": 2,
        "positions": 64,
    }
    values["generator"]["size"] = 0.5
    values["tokenizer"]["vocab_size"] = 512
    values["data"]["length"] = 32
    values["train"] |= {"batch_size": 16, "steps": 100}
    values["optimizer"]["warmup_steps"] = 1
    values["objective"] |= objective
    return from_config_dict(values)


def batch_of(config: Config):
    """Make packed rows of two documents and some padding."""
    rows, length = config.train.batch_size, config.data.length
    tokens = np.random.default_rng(0).integers(5, 512, (rows, length)).astype(np.int32)
    segments = np.ones((rows, length), np.int32)
    segments[:, 20:] = 2
    segments[: rows // 2, 28:] = 0
    tokens[:, [0, 20]], tokens[:, 19] = SPECIAL.cls, SPECIAL.sep
    return {"tokens": tokens, "segment_ids": segments, "type_ids": np.zeros_like(tokens)}


def staged_config() -> Config:
    """Return a config with three kinds of layers, one custom, wide enough to be sharded."""
    values = to_dict(small_config())
    values["model"] |= {"layers": 3, "hidden_size": 128, "embedding_size": 128}
    values["model"]["stages"] = [
        {"layers": 1, "mixer": NAME, "mixer_fields": ["gain=0.5"]},
        {"layers": 1, "kernel_size": 3},
        {"layers": 1, "mixer": "attention", "kernel_size": 5},
    ]
    values["generator"]["size"] = 1.0
    return from_config_dict(values)


@functools.cache
def two_steps(mesh_sizes: MeshSection, devices: int, make_config=small_config):
    """Return loss, gradient norm and parameters after two steps, and held-out sums."""
    config = make_config()
    task = recipes.build_task(config, SPECIAL, jax.devices()[0])
    mesh = partitioning.make_mesh(mesh_sizes, jax.devices()[:devices])
    program = make_program(task, config, mesh)
    with jax.set_mesh(mesh):
        current = program.init(jax.random.key(1))
        batch = program.put_batch(batch_of(config))
        for _ in range(2):
            current, metrics, vitals = program.train_step(current, batch)
        held_out = program.eval_step(current.params, batch, jax.random.key(2))
    return jax.device_get((vitals, current.params, metrics, held_out))


def sent_in_bfloat16() -> Config:
    config = small_config()
    train = dataclasses.replace(config.train, gradient_dtype="bfloat16")
    return dataclasses.replace(config, train=train)


def test_gradients_sent_in_bfloat16_are_those_of_one_device_but_for_their_rounding():
    mesh = MeshSection(data=1, fsdp=2, tensor=2, sequence=2)
    one = two_steps(MeshSection(data=1), 1)
    # On one device the program is the same.
    jax.tree.map(
        np.testing.assert_array_equal, two_steps(MeshSection(data=1), 1, sent_in_bfloat16), one
    )
    (vitals, params, *_), (wanted, expected, *_) = two_steps(mesh, 8, sent_in_bfloat16), one
    np.testing.assert_allclose(vitals.loss, wanted.loss, rtol=1e-3)
    np.testing.assert_allclose(vitals.grad_norm, wanted.grad_norm, rtol=1e-2)
    assert vitals.grad_norm != wanted.grad_norm
    moved = [  # an Adam step changes parameters by about the learning rate, for any gradient
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True)
    ]
    assert max(moved) < 5e-4


@pytest.mark.parametrize("recipe", [name for name in typing.get_args(Recipe) if name != "finetune"])
def test_every_recipe_can_send_gradients_in_bfloat16(recipe):
    """Traced only: rows are sharded, and each recipe reads tables through per-device copies."""
    values = to_dict(sent_in_bfloat16()) | {"recipe": recipe}
    values["parallel"] |= {"batch_tokens": 512, "max_length": 16}
    values["model"] |= {"ffn_groups": 1, "embedding_size": 64}
    config = from_config_dict(values)
    mesh = partitioning.make_mesh(MeshSection(data=4, fsdp=2), jax.devices())
    shards = memory.count_shards(mesh)
    task = planning.make_task(config, jax.devices()[0], shards=shards)
    program = make_program(task, config, mesh)
    batch = planning.make_batch(config, shards)
    with jax.set_mesh(mesh):
        text = str(program.train_step.trace(program.abstract, batch).jaxpr)
    assert "bf16[8,512,64]" in text  # one per device, before the sum


def test_stages_with_a_mixer_from_outside_are_divided():
    config = staged_config()
    mesh = partitioning.make_mesh(MeshSection(data=2, fsdp=2, tensor=2), jax.devices())
    program = make_program(recipes.build_task(config, SPECIAL, jax.devices()[0]), config, mesh)
    for network in ("discriminator", "generator"):
        kernels = [
            program.shardings.params[network]["stages"][stage]["mixer"]["output"]["kernel"].spec
            for stage in "012"
        ]
        assert kernels == [P(None, "fsdp", "tensor"), *[P(None, "tensor", "fsdp")] * 2]


def test_sums_of_a_batch_are_summarized():
    vitals, _, metrics, held_out = two_steps(MeshSection(data=1), 1)
    task = recipes.build_task(small_config(), SPECIAL, jax.devices()[0])
    losses = task.summarize(metrics)
    total = losses["mlm_loss"] + 50 * losses["discriminator_loss"]
    assert vitals.loss == pytest.approx(total, rel=1e-5)
    for values in (losses, metrics_of(task.evaluator, [held_out])):
        assert set(task.show) <= set(values)
        assert 0.3 < values["discriminator_auc"] < 0.8
        assert values["replaced_rate"] == pytest.approx(
            0.15 * (1 - values["sampled_accuracy"]), abs=0.05
        )


def test_release_auc_counts_padding_as_found():
    from sklearn.metrics import roc_auc_score

    config = small_config(release_metrics=True)
    task = recipes.build_task(config, SPECIAL, jax.devices()[0])
    params = task.init(jax.random.key(0))
    held_out = jax.jit(task.evaluate)(params, batch_of(config), jax.random.key(1))
    values = metrics_of(task.evaluator, [jax.device_get(held_out)])
    scores = jax.device_get(held_out["discriminator_auc"])
    fake, real = scores.positive.ravel(), scores.counted.ravel()
    probabilities = jax.nn.sigmoid(scores.values.ravel())
    assert not real.all()
    # In the official code padding has label 0 and probability 0.
    expected = roc_auc_score(fake & real, probabilities * real)
    assert values["release_auc"] == pytest.approx(expected, abs=1e-6)
    expected = roc_auc_score(fake[real], probabilities[real])
    assert values["discriminator_auc"] == pytest.approx(expected, abs=1e-6)
    assert values["release_auc"] > values["discriminator_auc"]
    losses = np.logaddexp(0, scores.values) - scores.positive * scores.values
    of_rows = np.average(losses, axis=1, weights=scores.counted)
    assert values["release_discriminator_loss"] == pytest.approx(of_rows.mean(), rel=1e-5)
    over_all = np.average(losses, weights=scores.counted)
    assert values["discriminator_loss"] == pytest.approx(over_all, rel=1e-5)


def test_masked_lm_recipe():
    config = dataclasses.replace(small_config(), recipe="masked_lm")
    task = recipes.build_task(config, SPECIAL, jax.devices()[0])
    params = task.init(jax.random.key(0))
    loss, metrics = jax.jit(task.loss)(params, batch_of(config), jax.random.key(1))
    assert float(loss) == pytest.approx(np.log(512), rel=0.05)
    assert set(task.summarize(jax.device_get(metrics))) == {"loss", "mlm_loss", "mlm_accuracy"}
