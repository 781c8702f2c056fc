"""One small run of each recipe, in this process, for all tests here."""

import pathlib
import subprocess
import typing

import pytest

from convbert_jax import recipes
from convbert_jax.config import Config, fit_to_steps, from_config_dict, to_dict
from convbert_jax.interop.matching import replace
from convbert_jax.training.environment import devices

SMALL = {
    "model.layers": 1,
    "model.mixer": "attention",  # compiles in half the time
    "model.hidden_size": 32,
    "model.embedding_size": 32,
    "model.heads": 2,
    "model.ffn_size": 64,
    "model.positions": 32,
    "data.length": 32,
    "data.workers": 1,
    "data.heldout_fraction": 0.1,
    "tokenizer.vocab_size": 200,
    "train.compile_cache": "",
}


def make_config(**fields) -> Config:
    """make_config(section__field=value): a model that compiles fast, checked as a whole."""
    values = {**SMALL, **{name.replace("__", "."): value for name, value in fields.items()}}
    whole = {name: values.pop(name) for name in list(values) if "." not in name}
    return from_config_dict(to_dict(replace(Config(**whole), values)))


@pytest.fixture(scope="package", autouse=True)
def _one_device():
    """A program for one of the simulated devices compiles several times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        find = devices.find_devices
        patch.setattr(devices, "find_devices", lambda config: find(config)[:1])
        yield


@pytest.fixture(scope="package")
def text(tmp_path_factory) -> str:
    """The standard library's prose is on every machine: a few hundred paragraphs of it."""
    paragraphs = []
    for module in (typing, subprocess, pathlib):
        paragraphs += pathlib.Path(module.__file__).read_text().split("\n\n")
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    return f"text:{file}"


@pytest.fixture(scope="package")
def pretraining_config(text) -> Config:
    config = make_config(
        data__source=text,
        train__steps=4,
        train__batch_size=8,
        train__log_every=2,
        train__eval_every=4,
        train__eval_rows=16,
        optimizer__warmup_steps=1,
        checkpoint__every=4,
    )
    assert fit_to_steps(config, {"train.steps": 4}) == {}  # as a command line would have it
    return config


@pytest.fixture(scope="package")
def pretrained(pretraining_config, tmp_path_factory) -> recipes.PretrainingResult:
    return recipes.pretrain(pretraining_config, tmp_path_factory.mktemp("pretrained") / "run")


def write_task(folder: pathlib.Path) -> None:
    """Sentences that start with "good" or "bad"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", 24), ("dev", 8)):
        lines = [f"{('bad', 'good')[i % 2]} text {i}\t{i % 2}" for i in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")


@pytest.fixture(scope="package")
def finetuning_config(pretrained, tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return make_config(
        recipe="finetune",
        name="toy",
        init_from=str(pretrained.folder),
        finetune__tasks=("own",),
        finetune__seeds=2,
        finetune__epochs=(1.0,),
        finetune__length=16,
        finetune__buckets=(),
        finetune__batch_size=8,
        finetune__eval_batch_size=8,
        task__name="mood",
        task__folder=str(folder),
        task__train="train.tsv",
        task__validation="dev.tsv",
    )


@pytest.fixture(scope="package")
def finetuned(finetuning_config, tmp_path_factory) -> recipes.FinetuningResult:
    return recipes.finetune(finetuning_config, tmp_path_factory.mktemp("finetuned") / "run")
