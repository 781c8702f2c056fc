"""LoRA: outputs, trained parameters, seeds in one program, devices, resume, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config import Config, ConfigError, checks
from convbert_jax.finetuning import classification, fitting, lora, run, run_files
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import abstract_params
from convbert_jax.recipes.finetuning import make_mesh
from convbert_jax.training.optimizer import layer_multipliers
from convbert_jax.training.partitioning import count_params, flatten_params
from convbert_jax.workdir import Workdir
from tests.finetuning.test_multilabel import open_source
from tests.refusals import refused

SETTING = Setting(1e-2, 1.0)
ALL = ("mixer", "feed_forward")


def make(config, make_task, seed=9):
    """Return programs, the toy task and base weights from a seed that no run uses."""
    programs = Programs(config, jnp.float32, make_mesh(config, jax.devices()))
    task = make_task(config)
    weights = programs.new_params(task, seed)
    del weights["head"]
    return programs, task, weights


@pytest.fixture(scope="module")
def toy(make_config, make_task):
    config = make_config(
        finetune__lora_rank=3, finetune__lora_targets=ALL, model__ffn_groups=2, finetune__buckets=()
    )
    programs, task, weights = make(config, make_task)
    alone = [fit(programs, task, config, [seed], weights) for seed in (0, 1)]
    return config, programs, task, weights, alone


def fit(programs, task, config, seeds, weights, vectorized=False, setting=SETTING):
    return fitting.fit(programs, task, config, setting, seeds, weights, vectorized=vectorized)


def logits(programs, task, config, fitted, vectorized=False):
    found = fitting.predict(
        programs,
        task,
        config,
        fitted.params,
        "validation",
        vectorized=vectorized,
        frozen=fitted.frozen,
    )
    return [collected.predicted()["logits"] for collected in found]


def logits_without(config, make_programs, task, params):
    """Predict without LoRA, from complete parameters."""
    config = replace(config, {"finetune.lora_rank": 0})
    params = fitting.widen_head(params, len(task.outputs.labels), task.width)
    found = fitting.predict(
        make_programs(config), task, config, params, "validation", vectorized=False
    )
    return found[0].predicted()["logits"]


def test_first_outputs_are_those_of_the_base_weights(toy, make_programs):
    config, programs, task, weights, _ = toy
    start = programs.new_factors(task, 0)
    wide = fitting.widen_head(start, len(task.outputs.labels), task.width)
    found = fitting.predict(
        programs,
        task,
        config,
        wide,
        "validation",
        vectorized=False,
        frozen=programs.put_frozen(weights),
    )
    complete = {**weights, "head": programs.new_head(task, 0)}
    expected = logits_without(config, make_programs, task, complete)
    np.testing.assert_allclose(found[0].predicted()["logits"], expected, atol=1e-6)


def test_merged_weights_have_the_outputs_of_the_factors(toy, make_programs):
    config, programs, task, _, alone = toy
    params = fitting.take_run(alone[0], task, 0, vectorized=False)
    found = logits_without(config, make_programs, task, params)
    expected = logits(programs, task, config, alone[0])[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_only_targets_and_the_head_change(toy):
    """With both parts as targets, every matrix of a layer changes, also grouped ones."""
    _, _, task, weights, alone = toy
    params = fitting.take_run(alone[0], task, 0, vectorized=False)
    params, before = flatten_params(params), flatten_params(weights)
    changed = {path for path in before if not np.array_equal(params[path], before[path])}
    assert changed == {path for path in before if "stages" in path and path.endswith("kernel")}


def test_trained_values(make_config, make_task):
    """Rank times inputs plus outputs of query and value in two layers; moments have the same."""
    config = make_config(finetune__lora_rank=3)
    programs, task, _ = make(config, make_task)
    state = programs.of(task, 2).abstract
    head = count_params(state.params["head"])
    assert count_params(state.params) - head == 2 * 2 * 2 * 3 * (16 + 16)
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(state.params)])


def test_runs_together_equal_runs_alone(toy):
    config, programs, task, weights, alone = toy
    together = fit(programs, task, config, [0, 1], weights, vectorized=True)
    for number, expected in enumerate(alone):
        found = fitting.take_run(together, task, number, vectorized=True)
        expected = fitting.take_run(expected, task, 0, vectorized=False)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_four_devices_train_what_one_trains(make_config, make_task):
    """Base weights are sharded, and shared by both seeds."""
    found = []
    for mesh in ({"mesh__data": 1}, {"mesh__data": 2, "mesh__fsdp": 2}):
        config = make_config(
            **mesh,
            model__hidden_size=128,
            model__heads=4,
            model__ffn_size=256,
            finetune__buckets=(),
            finetune__lora_rank=2,
        )
        programs, task, weights = make(config, make_task)
        with jax.set_mesh(make_mesh(config, jax.devices())):
            fitted = fit(programs, task, config, [0, 1], weights, vectorized=True)
            found.append(logits(programs, task, config, fitted, vectorized=True))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    kernel = fitted.frozen[0]["encoder"]["stages"]["0"]["mixer"]["query"]["kernel"]
    assert kernel.shape == (2, 128, 128)
    assert kernel.addressable_shards[0].data.size == kernel.size // 2


def test_a_resumed_run_is_identical(toy, vocabulary, tmp_path, monkeypatch):
    config, programs, task, weights, _ = toy
    config = replace(
        config,
        {
            "finetune.epochs": (2.0,),
            "finetune.vectorize_seeds": "true",
            "finetune.save_models": False,
        },
    )

    def start(folder, **fields):
        changed = replace(config, fields)
        arguments = programs, vocabulary, weights
        return run.finetune(changed, Workdir(folder), [lambda: task], *arguments)[0]

    expected = start(tmp_path / "whole")
    keep = run_files.Unfinished.keep_if_due

    def dies_after(self, state, done):
        keep(self, state, done)
        if done == 6:
            self.close()
            raise KeyboardInterrupt

    monkeypatch.setattr(run_files.Unfinished, "keep_if_due", dies_after)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "killed", **{"finetune.checkpoint_minutes": 1e-9})
    monkeypatch.setattr(run_files.Unfinished, "keep_if_due", keep)
    found = start(tmp_path / "killed")
    assert [r.loss for r in found.runs] == [r.loss for r in expected.runs]


def test_a_high_rank_learns(make_config, vocabulary, tmp_path):
    """The encoder has random weights. The rate and the number of epochs were chosen to pass."""
    config = make_config(
        finetune__seeds=1,
        finetune__buckets=(),
        finetune__lora_rank=16,
        finetune__lora_targets=ALL,
        finetune__layer_decay=1.0,
        model__dropout=0.0,
        model__attention_dropout=0.0,
    )

    def make_task(config):
        return classification.make_task(open_source(tmp_path), config, vocabulary)

    programs, task, weights = make(config, make_task)
    fitted = fit(programs, task, config, [0], weights, setting=Setting(3e-3, 40.0))
    (state,) = fitting.predict(
        programs,
        task,
        config,
        fitted.params,
        "validation",
        vectorized=False,
        frozen=fitted.frozen,
    )
    assert task.evaluators["validation"].finish(state)["micro_f1"] > 0.85


@pytest.mark.parametrize(
    ("mixer", "targets", "kernels"),
    [
        ("mixed", ("mixer",), 6 + 1),
        ("mixed", ("mixer/conv_value", "feed_forward/output"), 2),
        ("short", ("mixer/input", "mixer"), 2),
        ("dynamic", ("mixer/conv_kernel",), 1),
        ("separable", ("mixer/conv", "feed_forward"), 3),
    ],
)
def test_targets(make_config, mixer, targets, kernels):
    params = abstract_params(make_config(model__mixer=mixer))
    assert len(lora.find_targets(params, targets)) == kernels


def test_an_unknown_target_is_refused(make_config):
    params = abstract_params(make_config(model__mixer="dynamic"))
    with refused(ConfigError, "mixer/query", "mixer/value", field="config.finetune.lora_targets"):
        lora.find_targets(params, ("mixer/query", "mixer/value"))


@pytest.mark.parametrize(("init_from", "from_scratch"), [("runs/tiny", True), ("", False)])
def test_random_weights_are_refused(init_from, from_scratch):
    fields = {"finetune.lora_rank": 8, "finetune.from_scratch": from_scratch}
    config = replace(Config(recipe="finetune", init_from=init_from), fields)
    with refused(ConfigError, field="config.finetune.lora_rank", value=8):
        checks.check(config)


def test_factors_of_the_second_stage_have_its_depth():
    """The first stage has no factors and three layers."""
    factor = jnp.zeros((2, 16, 3))
    params = {"encoder": {"stages": {"1": {"mixer": {"query": {"kernel": {"lora_a": factor}}}}}}}
    (found,) = jax.tree.leaves(layer_multipliers(params, 0.5, [3, 2]))
    np.testing.assert_allclose(found.ravel(), [0.5**3, 0.5**2])


def test_settings_without_a_rank_are_refused():
    path = "finetune.lora_alpha"
    config = replace(Config(recipe="finetune"), {path: 8.0})
    with refused(ConfigError, "config.finetune.lora_rank", field=f"config.{path}", value=8.0):
        checks.check_asked(config, [path])
