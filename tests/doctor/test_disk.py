"""Folder checks: write access, locks, free space; no files are left."""

import dataclasses
import errno
import fcntl
import os
import pathlib
import re
import shutil
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import CheckpointSection, Config, FinetuneSection, TrainSection
from convbert_jax.doctor import checks
from convbert_jax.training import checkpoints
from tests.training import tiny_run


def tree(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def by_name(findings):
    return {found.name: found for found in findings}


@settings(max_examples=20)
@given(st.integers(0, 4), st.integers(0, 4))
def test_absent_folders_are_made_for_the_test_and_removed(tmp_path_factory, there, absent):
    root = tmp_path_factory.mktemp("root")
    names = [f"f{i}" for i in range(there + absent)]
    root.joinpath(*names[:there]).mkdir(parents=True, exist_ok=True)
    before = tree(root)
    found = checks.check_workdir(root.joinpath(*names))
    assert [f.state for f in found] == ["good"] * 2
    assert [f.name for f in found] == ["workdir", "locks"]
    checks.check_compile_cache(str(root.joinpath(*names, "cache")))
    assert tree(root) == before


def test_files_that_others_put_there_stay(tmp_path):
    with checks.created(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").write_text("")
    assert tree(tmp_path) == ["a", "a/file"]


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    (found,) = checks.check_workdir(tmp_path / "file" / "run")
    assert found.state == "wrong"
    assert f"{tmp_path}/file/run" in found.text
    assert os.strerror(errno.ENOTDIR) in found.text
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail(errno.ENOSPC))
        (found,) = checks.check_workdir(tmp_path)
        assert os.strerror(errno.ENOSPC) in found.text
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(type(tmp_path), "read_text", lambda path: "other")  # corrupted content
        (found,) = checks.check_workdir(tmp_path)
        assert found.state == "wrong"
    assert tree(tmp_path) == ["file"]


def fail(number: int):
    def function(*_):
        raise OSError(number, os.strerror(number))

    return function


def test_missing_locks_are_a_warning(tmp_path, monkeypatch):
    for flock in (fail(errno.ENOLCK), lambda file, how: None):  # None: no exclusive lock
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            assert by_name(checks.check_workdir(tmp_path))["locks"].state == "warning"
    assert tree(tmp_path) == []


def test_a_bucket_has_no_locks(monkeypatch):
    monkeypatch.setattr(checks, "_fault_of_writing", lambda folder: "")
    found = checks.check_workdir(checks.epath.Path("gs://bucket/run"))
    assert [(f.name, f.state) for f in found] == [("workdir", "good"), ("locks", "good")]
    assert checks.check_space(checks.epath.Path("gs://bucket/run"), Config(), 10**9) == []


def config(**checkpoint) -> Config:
    return dataclasses.replace(
        Config(), checkpoint=CheckpointSection(**checkpoint), train=TrainSection(steps=1000)
    )


def test_bytes_of_checkpoints_by_hand():
    one = 100 * 3 * 4
    assert checks.checkpoint_bytes(config(keep=3), 100) == 4 * one
    assert checks.checkpoint_bytes(config(keep=1, best_metric="loss"), 100) == 3 * one
    assert checks.checkpoint_bytes(config(keep=1, keep_every=250), 100) == (2 + 4) * one
    f = FinetuneSection(tasks=("rte", "mrpc"), seeds=3, learning_rates=(1e-4, 2e-4))
    tuned = dataclasses.replace(Config(), recipe="finetune", finetune=f)
    assert checks.checkpoint_bytes(tuned, 100) == 2 * one + 2 * 3 * 2 * 100 * 4


def test_a_real_run_takes_no_more_than_that(tmp_path):
    """The arrays dominate; Orbax's names and paths add kilobytes."""
    made = tiny_run.make_config(8, checkpoint={"every": 2, "keep": 2})
    task = tiny_run.linear_task(features=50_000)
    tiny_run.run(
        tmp_path,
        made,
        task=task,
        batches=tiny_run.Rows(features=50_000),
        evaluation=lambda: tiny_run.evaluation(features=50_000),
    )
    assert len(checkpoints.list_steps(tmp_path / "checkpoints")) == 2
    arrays = checkpoints.load_arrays(tmp_path / "checkpoints", 8)[1]
    size = sum(array.nbytes for array in arrays.values())
    parameters = 50_001
    assert 2 * size <= checks.checkpoint_bytes(made, parameters) + 2 * 4096
    assert size > 0.9 * checks.checkpoint_bytes(made, parameters) / 3


def test_missing_space_for_checkpoints_is_wrong(tmp_path, monkeypatch):
    free = types.SimpleNamespace(free=int(2.5 * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free if place.exists() else 1 / 0)
    (found,) = checks.check_space(tmp_path / "not" / "yet", config(keep=3), 2**26)
    assert (found.name, found.state) == ("space", "wrong")
    assert re.findall(r"[\d.]+ GiB", found.text) == ["2.5 GiB", "3.0 GiB"]
    assert "config.checkpoint.keep" in found.fix
    (found,) = checks.check_space(tmp_path, config(keep=1), 2**26)
    assert found.state == "good"
    kept = tmp_path / "checkpoints" / "10" / "params" / "array"
    kept.parent.mkdir(parents=True)
    with kept.open("wb") as file:
        file.truncate(2**30)  # sparse
    (found,) = checks.check_space(tmp_path, config(keep=3), 2**26)
    assert found.state == "good", "a resumed run already has some of these files"
    assert "2.0 GiB" in found.text


def test_the_compile_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (found,) = checks.check_compile_cache("")
    assert (found.state, found.name) == ("warning", "compile cache")
    (tmp_path / "file").touch()
    (found,) = checks.check_compile_cache(str(tmp_path / "file"))
    assert found.state == "warning"
    assert f"{tmp_path}/file" in found.text
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "named"))
    (found,) = checks.check_compile_cache("")
    assert found.state == "good"
    assert f"{tmp_path}/named" in found.text
