"""Mixers and optimizers from outside the package, and stages that differ.

One run has a stage with the module and the optimizer of the pages, a stage with a mixer that
implements the whole interface, and a stage with a mixer of the package.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.config import (
    MeshSection,
    OptimizerSection,
    PluginError,
    StageSection,
    UserError,
    mixers,
    plugins,
)
from convbert_jax.config.mixers import MIXERS
from convbert_jax.interop import conversion, sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError, outline
from convbert_jax.training import environment, optimizer, partitioning
from convbert_jax.workdir import Workdir
from tests.models.mean_mixer import NAME as MEAN
from tests.refusals import refused
from tests.test_pages import commands, python_files

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = (DOCS / "tutorials" / "own_mixer.md", DOCS / "howto" / "own_optimizer.md")
POOLING, OPTIMIZER = "mine:Pooling", "optimizers:sign_momentum"
STAGES = (
    StageSection(layers=1, mixer=POOLING, mixer_fields=("scale=0.5",)),
    StageSection(layers=1, mixer=MEAN, mixer_fields=("gain=0.5",)),
    StageSection(layers=1, mixer="mixed", kernel_size=3, ffn_size=96),
)
ALL = (*STAGES, *(StageSection(layers=1, mixer=name) for name in MIXERS if name != "mixed"))


@pytest.fixture(scope="module", autouse=True)
def _mine(tmp_path_factory):
    """Write the Python files of the pages to a folder on the import path."""
    folder = tmp_path_factory.mktemp("plugins")
    files = {name: code for page in PAGES for name, code in python_files(page).items()}
    for name, code in files.items():
        (folder / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(plugins, "_allowed", {POOLING, OPTIMIZER, MEAN})
        yield
    for name in files:
        sys.modules.pop(pathlib.Path(name).stem, None)
    mixers._find.cache_clear()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(name, code): write a Python module; removed after the test."""
    written = []

    def write(name, code):
        written.append(name)
        (tmp_path / f"{name}.py").write_text(code)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in written:
        sys.modules.pop(name, None)
    mixers._find.cache_clear()


@pytest.fixture(
    scope="module", params=[STAGES, pytest.param(ALL, marks=pytest.mark.slow)], ids=["own", "all"]
)
def config(request, pretraining_config):
    fields = {
        "model.layers": len(request.param),
        "model.stages": request.param,
        "optimizer.method": OPTIMIZER,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.every": 2,
    }
    # masked_lm has one network, which halves compile time.
    return dataclasses.replace(replace(pretraining_config, fields), recipe="masked_lm")


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes.tasks.flops, "peak_flops", lambda kind: 1e12)
        return recipes.pretrain(config, tmp_path_factory.mktemp("stages") / "run")


def copy_of_step_2(trained, folder) -> pathlib.Path:
    """Return a copy of the run as if killed before step 4."""
    shutil.copytree(trained.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    return folder


def test_commands_of_the_pages_name_their_code():
    for page, name in zip(PAGES, (POOLING, OPTIMIZER), strict=True):
        assert any(name in word for words in commands(page) for word in words)


def test_resuming_is_exact_with_the_same_stages_and_optimizer_only(trained, config, tmp_path):
    stages = json.loads((trained.folder / "config.json").read_text())["model"]["stages"]
    assert [stage["mixer"] for stage in stages] == [s.mixer for s in config.model.stages]
    again = recipes.pretrain(config, copy_of_step_2(trained, tmp_path / "run"))
    assert again.step == trained.step == 4
    first, second = (
        sources.checkpoints.load_arrays(Workdir(run.folder).checkpoints)[1]
        for run in (trained, again)
    )
    assert any("trace" in name for name in first)  # momentum
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    for field, value in (
        ("model.stages", (StageSection(layers=config.model.layers),)),
        ("optimizer.method", "adamw"),
    ):
        with refused(UserError, f"config.{field}"):
            recipes.pretrain(replace(config, {field: value}), again.folder)


def test_it_resumes_on_a_mesh(trained, config, tmp_path, monkeypatch):
    monkeypatch.setattr(partitioning, "_SMALL", 2**10)  # real models shard only larger parameters
    monkeypatch.setattr(environment, "find_devices", lambda _: jax.devices())
    mesh = MeshSection(data=2, fsdp=2, tensor=2)
    divided = dataclasses.replace(config, mesh=mesh)
    again = recipes.pretrain(divided, copy_of_step_2(trained, tmp_path / "run"))
    # Compare losses: rounding may flip the sign of a near-zero gradient and move a weight far.
    found, expected = (
        [line["loss"] for line in run.metrics if line["step"] == 4] for run in (again, trained)
    )
    assert len(found) == 2  # one for training and one for evaluation
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_flops_and_mfu_of_a_plain_module_are_unknown(trained, config, tmp_path):
    (*_, last) = (record for record in trained.metrics if record["split"] == "train")
    assert math.isnan(last["mfu"])
    assert "unknown FLOPs" in recipes.show(config, tmp_path / "run")
    for topology in ("cpu", "gpu:h100x1"):
        output = tmp_path / f"{topology[:3]}.json"
        recipes.plan(config, tmp_path / "run", topology=topology, output=str(output))
        numbers = json.loads(output.read_text(), parse_constant=pytest.fail)
        assert numbers["flops"] is None
        assert numbers["hours"] == [None, None]
        assert numbers["memory"]["parameters"] > 0


def test_only_stablehlo_can_hold_it(trained, config, tmp_path):
    for form in ("huggingface", "tensorflow1"):
        with refused(ConversionError, "--format=stablehlo"):
            conversion.export(trained.folder, form=form)
        assert not list(trained.folder.glob(f"{form}*/*"))
    alone = dataclasses.replace(config.model, stages=(), layers=1, mixer=POOLING)
    networks = {"main": outline(dataclasses.replace(config, model=alone))["main"]}
    with refused(ConversionError, "Pooling", "--format=stablehlo"):
        conversion.check_expressible(networks)
    conversion.export(trained.folder, form="stablehlo", output=tmp_path / "out")
    assert (tmp_path / "out" / "encoder.jax_export").is_file()


def test_it_is_fine_tuned_by_the_same_optimizer(trained, config, finetuning_config, tmp_path):
    fields = {"optimizer.method": OPTIMIZER, "finetune.seeds": 1, "finetune.layer_decay": 0.8}
    tuned = dataclasses.replace(finetuning_config, init_from=str(trained.folder))
    found = recipes.finetune(replace(tuned, fields), tmp_path / "tuned")
    (model,) = found.tasks[0].folders
    kept = Workdir(model).read_config().model
    assert [(stage.mixer, stage.mixer_fields) for stage in kept.stages] == [
        (stage.mixer, stage.mixer_fields) for stage in config.model.stages
    ]
    assert len(convbert_jax.load(model).predict(["good text"])) == 1


# --- optimizers ---


def test_a_factory_of_optax_is_the_optimizer_of_that_name():
    """The schedule, the decay mask and the clipping come from config.optimizer."""
    same = {"learning_rate": 0.1, "warmup_steps": 2, "weight_decay": 0.3, "clip_norm": 0.5}
    plugins.allow(["optax:adamw"])
    ours = optimizer.make_optimizer(OptimizerSection(**same), 10)
    theirs = optimizer.make_optimizer(OptimizerSection(method="optax:adamw", **same), 10)
    told = optimizer.make_injected_lr_optimizer(OptimizerSection(method="optax:adamw", **same), 1.0)
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


def test_a_wrong_optimizer_is_refused_before_the_run(pretraining_config, tmp_path):
    for method, mention in (
        ("optax:nothing", "AttributeError"),
        ("nowhere.at.all:make", "ModuleNotFoundError"),
        ("optax:sgd", "weight_decay=0.01"),
        ("optax:scale_by_adam", "learning_rate"),
        ("json:loads", "TypeError"),
        ("optax:constant_schedule", "TypeError"),
    ):
        plugins.allow([method])
        config = convbert_jax.load_config(pretraining_config, **{"optimizer.method": method})
        with refused(PluginError, f"optimizer.method={method}", mention):
            recipes.pretrain(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


# --- modules ---


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        ("hidden_size, rngs, taps", "taps"),
        ("hidden_size, rngs, shape=(1, 2)", "shape"),
        ("rngs", "hidden_size"),
    ],
)
def test_a_module_that_cannot_be_made_is_refused(arguments, mention, module):
    module(
        "wrong",
        f"from flax import nnx\n\nclass Wrong(nnx.Module):\n    def __init__(self, {arguments}):\n"
        "        pass\n    def __call__(self, x):\n        return x\n",
    )
    with refused(PluginError, mention):
        convbert_jax.load_config("tiny", **{"model.mixer": "wrong:Wrong"})


def test_a_module_gets_the_arguments_that_it_has(module):
    """Without a segment_ids argument, a module cannot separate the documents of a packed row."""
    module(
        "few",
        "from flax import nnx\n\nclass Few(nnx.Module):\n"
        "    def __init__(self, rngs, hidden_size, kernel_size, heads, wide=False):\n"
        "        self.given = (hidden_size, kernel_size, heads, wide)\n"
        "    def __call__(self, x):\n        return x\n",
    )
    fields = {
        "model.mixer": "few:Few",
        "model.kernel_size": 5,
        "model.mixer_fields": ("wide=true",),
    }
    with refused(UserError, "config.data.layout"):
        convbert_jax.load_config("tiny", **fields)
    config = convbert_jax.load_config("tiny", **fields, **{"data.layout": "electra"})
    mixer = config.encoder.stages[0].layer.mixer
    assert mixer.module(32, None, None).module.given == (32, 5, config.model.heads, True)
    assert mixers.describe(mixer, 32)["kernel_size"] == 5
