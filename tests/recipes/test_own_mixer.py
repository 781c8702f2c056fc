"""A run whose stages differ, one with a mixer from outside of the package, and one with every mixer
of the package: trained, resumed to the bit and on a mesh, fine-tuned, exported or refused.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from convbert_jax import recipes
from convbert_jax.config import MeshSection, StageSection, UserError
from convbert_jax.config.mixers import MIXERS
from convbert_jax.interop import conversion, sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError
from convbert_jax.training import sharding
from convbert_jax.training.environment import devices
from convbert_jax.workdir import Workdir
from tests.agreement import assert_agree
from tests.models.mean_mixer import NAME

STAGES = (
    StageSection(layers=1, mixer=NAME, mixer_fields=("gain=0.5",)),
    StageSection(layers=1, mixer="mixed", kernel_size=3, ffn_size=96),
)
ALL = (*STAGES, *(StageSection(layers=1, mixer=name) for name in MIXERS if name != "mixed"))


@pytest.fixture(
    scope="module", params=[STAGES, pytest.param(ALL, marks=pytest.mark.slow)], ids=["two", "all"]
)
def config(request, pretraining_config):
    fields = {"model.layers": len(request.param), "model.stages": request.param}
    # One network compiles in half the time.
    config = replace(pretraining_config, fields | {"checkpoint.every": 2})
    return dataclasses.replace(config, recipe="masked_lm")


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    return recipes.pretrain(config, tmp_path_factory.mktemp("stages") / "run")


def test_it_goes_on_to_the_bit(trained, config, tmp_path):
    stages = json.loads((trained.folder / "config.json").read_text())["model"]["stages"]
    assert [stage["mixer"] for stage in stages] == [s.mixer for s in config.model.stages]
    shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if killed before it
    again = recipes.pretrain(config, tmp_path / "run")
    assert again.step == trained.step == 4
    folders = [Workdir(run.folder) for run in (trained, again)]
    (_, expected), (_, params) = (sources.read_params(folder, config) for folder in folders)
    assert params["encoder"]["stages"]["0"]["mixer"]["weight"].shape == (1, 32)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    others = replace(config, {"model.stages": (StageSection(layers=config.model.layers),)})
    with pytest.raises(UserError, match=r"another config: config\.model\.stages was"):
        recipes.pretrain(others, again.folder)


def test_it_goes_on_on_another_mesh(trained, config, tmp_path, monkeypatch):
    shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    monkeypatch.setattr(sharding, "_SMALL", 2**10)  # what is divided of a real model is so here
    monkeypatch.setattr(devices, "find_devices", lambda _: jax.devices())
    mesh = MeshSection(data=2, fsdp=2, tensor=2)
    again = recipes.pretrain(dataclasses.replace(config, mesh=mesh), tmp_path / "run")
    assert again.step == 4
    folders = [Workdir(run.folder) for run in (trained, again)]
    (_, expected), (_, params) = (sources.read_params(folder, config) for folder in folders)
    assert_agree(params, expected)


def test_it_is_fine_tuned(trained, config, finetuning_config, tmp_path):
    tuned = dataclasses.replace(finetuning_config, init_from=str(trained.folder))
    recipes.finetune(replace(tuned, {"finetune.seeds": 1}), tmp_path / "tuned")
    (place,) = (tmp_path / "tuned").glob("*/seed-0/config.json")
    kept = json.loads(place.read_text())["model"]
    assert [stage["mixer"] for stage in kept["stages"]] == [s.mixer for s in config.model.stages]
    assert kept["stages"][0]["mixer_fields"] == ["gain=0.5"]


def test_other_software_refuses_it_and_stablehlo_has_it(trained, tmp_path):
    with pytest.raises(ConversionError, match=r"layers of this encoder differ.*--format=stablehlo"):
        conversion.export(trained.folder)
    with pytest.raises(ConversionError, match=r"^the encoder: the layers .*--format=stablehlo"):
        conversion.export(trained.folder, form="tensorflow1")
    for form in ("huggingface", "tensorflow1"):
        assert not list(trained.folder.glob(f"{form}*/*"))
    conversion.export(trained.folder, form="stablehlo", output=tmp_path / "out")
    assert (tmp_path / "out" / "encoder.jax_export").is_file()
