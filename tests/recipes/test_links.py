"""Modes that write into a run folder refuse symlinks that point outside it."""

import dataclasses
import shutil

import pytest

from convbert_jax import recipes
from convbert_jax.analysis import verify_resume
from convbert_jax.config import UserError
from convbert_jax.interop import conversion
from convbert_jax.workdir import Workdir
from tests.refusals import refused

MODES = {
    "train": lambda run, config: recipes.pretrain(config, run),
    "finetune": lambda run, config: Workdir(run).open(config).__enter__(),
    "prepare": lambda run, config: recipes.prepare(config, run),
    "eval": lambda run, config: recipes.evaluate(config, run),
    "inspect": lambda run, config: recipes.inspect(str(run)),
    "export": lambda run, config: conversion.export(run),
    "export to TensorFlow": lambda run, config: conversion.export(run, form="tensorflow1"),
    "verify": lambda run, config: verify_resume.run([], run, steps=8),
}


@pytest.fixture
def hostile(pretrained, tmp_path):
    """A run whose result folders are links to another folder, which must not change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    run = tmp_path / "run"
    shutil.copytree(pretrained.folder, run)
    for name in ("huggingface", "tensorflow1", "inside", "evaluation", "verify_resume"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(outside)
    yield run
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [
        ("precious", "precious")
    ]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_that_writes_refuses_links_out_of_the_run_folder(mode, hostile, pretraining_config):
    config = dataclasses.replace(pretraining_config, name="hostile")
    with refused(UserError, hostile.parent / "outside"):
        mode(hostile, config)
