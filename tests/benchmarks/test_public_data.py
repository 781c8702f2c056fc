"""Data of ours is named in the environment, and nowhere else."""

import os
import subprocess
import sys

import pytest

from configs import glue, squad, text
from tests.conftest import REPOSITORY


def test_a_benchmark_without_data_ends_in_a_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.quality.frozen_features", f"--init-from={tmp_path}"],
        cwd=REPOSITORY,
        env={**os.environ, "CONVBERT_DATA": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: there is no data folder")
    assert "set CONVBERT_DATA" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_config_knows_a_folder():
    for config in (
        glue.get_config("cola"),
        squad.get_config("v2"),
        *map(text.get_config, text.TASKS),
    ):
        assert not config.finetune.data
        assert not config.task.folder


@pytest.mark.parametrize("place", ["convbert_jax", "configs", "launch", "README.md"])
def test_nothing_that_users_read_names_a_folder_of_ours(place):
    root = REPOSITORY / place
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            found = path.read_text(encoding="utf-8")
            assert "shared/data" not in found, path
            assert "CONVBERT_DATA" not in found, path
