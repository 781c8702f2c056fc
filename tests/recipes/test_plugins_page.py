"""The example of docs/plugins.md: trained, resumed to the bit, fine-tuned, exported."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.config import Config, MeshSection, OptimizerSection, PluginError, mixers
from convbert_jax.config.checks import plugins
from convbert_jax.interop import conversion, sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError
from convbert_jax.training import optimizer, sharding
from convbert_jax.training.environment import devices
from convbert_jax.workdir import Workdir
from tests.agreement import assert_agree

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
MIXER, OPTIMIZER = "mine:Pooling", "mine:sign_momentum"


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    """The file that the page has, where Python finds it."""
    folder = tmp_path_factory.mktemp("plugins")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (folder / "mine.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(plugins, "_allowed", {MIXER, OPTIMIZER})
        yield
    sys.modules.pop("mine", None)
    mixers._find.cache_clear()


@pytest.fixture(scope="module")
def config(pretraining_config) -> Config:
    fields = {
        "model.mixer": MIXER,
        "model.mixer_fields": ("scale=0.5",),
        "optimizer.method": OPTIMIZER,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.every": 2,
    }
    return convbert_jax.load_config(pretraining_config, recipe="masked_lm", **fields)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    return recipes.pretrain(config, tmp_path_factory.mktemp("own") / "run")


def test_its_commands_name_what_it_defines():
    (text,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)[:1]
    assert MIXER in text
    assert OPTIMIZER in text


def test_it_is_resumed_to_the_bit(trained, config, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if killed before it
    again = recipes.pretrain(config, tmp_path / "run")
    assert again.step == trained.step == 4
    first, second = (
        sources.checkpoint_reading.load_arrays(Workdir(run.folder).checkpoints)[1]
        for run in (trained, again)
    )
    assert any("trace" in name for name in first)  # the momentum is kept
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_it_runs_on_a_mesh(trained, config, tmp_path, monkeypatch):
    """Its own parameters are replicated, all others divided."""
    shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    monkeypatch.setattr(sharding, "_SMALL", 2**10)  # real models divide only larger parameters
    monkeypatch.setattr(devices, "find_devices", lambda _: jax.devices())
    mesh = MeshSection(data=2, fsdp=2, tensor=2)
    again = recipes.pretrain(dataclasses.replace(config, mesh=mesh), tmp_path / "run")
    (_, expected), (_, params) = (
        sources.read_params(Workdir(run.folder), config) for run in (trained, again)
    )
    assert_agree(params, expected)


def test_its_flops_are_unknown(trained, config, tmp_path):
    assert "unknown FLOPs a step" in recipes.show(config, tmp_path / "run")
    for topology in ("cpu", "gpu:h100x1"):
        output = tmp_path / f"{topology[:3]}.json"
        recipes.plan(config, tmp_path / "run", topology=topology, output=str(output))
        numbers = json.loads(output.read_text(), parse_constant=pytest.fail)
        assert numbers["flops"] is None
        assert numbers["hours"] == [None, None]
        assert numbers["memory"]["parameters"] > 0


def test_its_mfu_is_unknown(trained, config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recipes.tasks.flops, "peak_flops", lambda kind: 1e12)
    caplog.set_level("INFO")
    run = recipes.pretrain(config, tmp_path / "run")
    assert "MFU unknown" in caplog.text
    (*_, last) = (record for record in run.metrics if record["split"] == "train")
    assert math.isnan(last["mfu"])


def test_other_software_refuses_it_and_stablehlo_has_it(trained, tmp_path):
    for form in ("huggingface", "tensorflow1"):
        with pytest.raises(ConversionError, match=r"Pooling.*--format=stablehlo"):
            conversion.export(trained.folder, form=form)
    conversion.export(trained.folder, form="stablehlo", output=tmp_path / "out")
    assert (tmp_path / "out" / "encoder.jax_export").is_file()


def test_it_is_fine_tuned_by_the_same_optimizer(trained, finetuning_config, tmp_path):
    fields = {"optimizer.method": OPTIMIZER, "finetune.seeds": 1, "finetune.layer_decay": 0.8}
    tuned = dataclasses.replace(finetuning_config, init_from=str(trained.folder))
    found = recipes.finetune(replace(tuned, fields), tmp_path / "tuned")
    (model,) = found.tasks[0].folders
    kept = Workdir(model).read_config()
    assert (kept.model.mixer, kept.model.mixer_fields) == (MIXER, ("scale=0.5",))
    assert len(convbert_jax.load(model).predict(["good text"])) == 1


def test_another_name_is_another_run(trained, config):
    with pytest.raises(convbert_jax.UserError, match=r"config\.optimizer\.method was"):
        recipes.pretrain(replace(config, {"optimizer.method": "adamw"}), trained.folder)


# --- optimizers ---


def test_a_factory_of_optax_is_the_optimizer_of_that_name():
    """The schedule, the decay mask and the clipping are those of config.optimizer."""
    same = {"learning_rate": 0.1, "warmup_steps": 2, "weight_decay": 0.3, "clip_norm": 0.5}
    plugins.allow(["optax:adamw"])
    ours = optimizer.make_optimizer(OptimizerSection(**same), 10)
    theirs = optimizer.make_optimizer(OptimizerSection(method="optax:adamw", **same), 10)
    told = optimizer.make_told_optimizer(OptimizerSection(method="optax:adamw", **same), 1.0)
    schedule = optimizer.make_schedule(OptimizerSection(**same), 10)
    rng = np.random.default_rng(0)
    params = {
        "embeddings": {"word": {"embedding": rng.normal(size=(5, 3))}},
        "encoder": {"norm": {"scale": rng.normal(size=3), "bias": rng.normal(size=3)}},
    }
    states = [each.init(params) for each in (ours, theirs, told)]
    for step in range(4):
        gradients = jax.tree.map(lambda p: rng.normal(size=p.shape), params)
        expected, states[0] = ours.update(gradients, states[0], params)
        found, states[1] = theirs.update(gradients, states[1], params)
        again, states[2] = told.update(gradients, states[2], params, learning_rate=schedule(step))
        for other in (found, again):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), other, expected)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("optax:nothing", "AttributeError"),
        ("nowhere.at.all:make", "ModuleNotFoundError"),
        ("optax:sgd", "weight_decay=0.01"),
        ("optax:scale_by_adam", "learning_rate"),
        ("json:loads", "TypeError"),
        ("optax:constant_schedule", "TypeError"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_the_run(
    method, names, pretraining_config, tmp_path
):
    plugins.allow([method])
    config = convbert_jax.load_config(pretraining_config, **{"optimizer.method": method})
    with pytest.raises(PluginError, match=f"optimizer.method={method}.*{names}"):
        recipes.pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- mixers ---


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("hidden_size, rngs, taps", "argument taps"),
        ("hidden_size, rngs, shape=(1, 2)", "argument shape"),
        ("rngs", "argument hidden_size"),
    ],
)
def test_a_module_that_cannot_be_made_is_refused(arguments, names, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong.py").write_text(
        f"from flax import nnx\n\nclass Wrong(nnx.Module):\n    def __init__(self, {arguments}):\n"
        "        pass\n    def __call__(self, x):\n        return x\n"
    )
    try:
        with pytest.raises(PluginError, match=names):
            convbert_jax.load_config("tiny", **{"model.mixer": "wrong:Wrong"})
    finally:
        sys.modules.pop("wrong", None)
        mixers._find.cache_clear()


def test_a_module_gets_what_it_has_arguments_for(tmp_path, monkeypatch):
    """And one that does not see the documents of a row is not trained on packed rows."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "few.py").write_text(
        "from flax import nnx\n\nclass Few(nnx.Module):\n"
        "    def __init__(self, rngs, hidden_size, kernel_size, heads, wide=False):\n"
        "        self.given = (hidden_size, kernel_size, heads, wide)\n"
        "    def __call__(self, x):\n        return x\n"
    )
    fields = {
        "model.mixer": "few:Few",
        "model.kernel_size": 5,
        "model.mixer_fields": ("wide=true",),
    }
    with pytest.raises(convbert_jax.UserError, match=r"config\.data\.layout"):
        convbert_jax.load_config("tiny", **fields)
    config = convbert_jax.load_config("tiny", **fields, **{"data.layout": "electra"})
    mixer = config.encoder.stages[0].layer.mixer
    assert mixer.module(32, None, None).module.given == (32, 5, config.model.heads, True)
    assert mixers.describe(mixer, 32)["kernel_size"] == 5
    sys.modules.pop("few", None)
    mixers._find.cache_clear()
