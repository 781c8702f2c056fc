"""One run per workdir, and never a run of another model or corpus."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from convbert_jax.config import Config, to_dict
from convbert_jax.training.workdir import WorkdirError, open_workdir

CONFIG = Config()


def replace(section: str, **changes) -> Config:
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **changes)}
    )


def test_config_is_kept(tmp_path):
    with open_workdir(tmp_path / "new" / "run", CONFIG):
        pass
    assert json.loads((tmp_path / "new" / "run" / "config.json").read_text()) == to_dict(CONFIG)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("model", {"hidden_size": 512}),
        ("generator", {"size": 0.5}),
        ("objective", {"mask_fraction": 0.3}),
        ("tokenizer", {"vocab_size": 1000}),
        ("data", {"source": "text:x"}),
        ("data", {"length": 64}),
        ("train", {"batch_size": 64}),
    ],
)
def test_another_model_or_corpus_is_refused(tmp_path, section, changes):
    with open_workdir(tmp_path, CONFIG):
        pass
    kept = (tmp_path / "config.json").read_text()
    field = next(iter(changes))
    with (
        pytest.raises(
            WorkdirError, match=rf"config\.{section}\.{field} was .*, now .*choose another"
        ),
        open_workdir(tmp_path, replace(section, **changes)),
    ):
        pass
    assert (tmp_path / "config.json").read_text() == kept


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"steps": 5}),
        ("optimizer", {"learning_rate": 1.0}),
        ("model", {"remat": "full"}),
        ("data", {"workers": 3}),
        ("mesh", {"fsdp": 2}),
    ],
)
def test_speed_and_length_may_change(tmp_path, section, changes):
    with open_workdir(tmp_path, CONFIG):
        pass
    changed = replace(section, **changes)
    with open_workdir(tmp_path, changed):
        pass
    assert json.loads((tmp_path / "config.json").read_text()) == to_dict(changed)


def test_second_run_is_refused_and_names_the_first(tmp_path):
    with open_workdir(tmp_path, CONFIG):
        code = (
            "import pathlib, sys\n"
            "from convbert_jax.config import Config\n"
            "from convbert_jax.training.workdir import open_workdir\n"
            "with open_workdir(pathlib.Path(sys.argv[1]), Config()): pass\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert f"in use by process {os.getpid()}" in result.stderr
    with open_workdir(tmp_path, CONFIG):
        pass


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WorkdirError, match="cannot be written"),
        open_workdir(tmp_path / "file" / "run", CONFIG),
    ):
        pass
