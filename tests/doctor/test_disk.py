"""Folders: what can be written, what guards it, how much there is room for; nothing is left."""

import dataclasses
import errno
import fcntl
import os
import pathlib
import shutil
import time
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import CheckpointSection, Config, FinetuneSection, TrainSection
from convbert_jax.doctor import disk
from convbert_jax.training.checkpoints import reading
from tests.training import tiny_run


def tree(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def by_name(findings):
    return {found.name: found for found in findings}


@given(st.integers(0, 4), st.integers(0, 4))
def test_absent_folders_are_made_for_the_test_and_removed(tmp_path_factory, there, absent):
    root = tmp_path_factory.mktemp("root")
    names = [f"f{i}" for i in range(there + absent)]
    root.joinpath(*names[:there]).mkdir(parents=True, exist_ok=True)
    before = tree(root)
    found = disk.check_workdir(root.joinpath(*names))
    assert [f.state for f in found] == ["good"] * 3
    assert [f.name for f in found] == ["workdir", "locks", "clock"]
    disk.check_compile_cache(str(root.joinpath(*names, "cache")))
    assert tree(root) == before


def test_what_others_put_there_meanwhile_stays(tmp_path):
    with disk.made(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").write_text("")
    assert tree(tmp_path) == ["a", "a/file"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("kept")
    (found,) = disk.check_workdir(tmp_path / "file" / "run")
    assert found.state == "wrong"
    assert f"{tmp_path}/file/run cannot be written (Not a directory)" in found.text
    assert tree(tmp_path) == ["file"]


def test_a_disk_that_fills_up_or_lies_is_told(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        (found,) = disk.check_workdir(tmp_path)
    assert "cannot be written (No space left on device)" in found.text
    monkeypatch.setattr(type(tmp_path), "read_text", lambda path: "other")
    (found,) = disk.check_workdir(tmp_path)
    assert "what is read is not what was written" in found.text
    assert tree(tmp_path) == []


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    found = by_name(disk.check_workdir(tmp_path))["locks"]
    assert found.state == "warning"
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)  # gives a lock to everybody
    assert by_name(disk.check_workdir(tmp_path))["locks"].state == "warning"
    assert tree(tmp_path) == []


@pytest.mark.parametrize(("ahead", "said"), [(-90.0, "90 s behind"), (3600.0, "3600 s ahead")])
def test_a_file_system_in_another_time_is_warned_of(tmp_path, monkeypatch, ahead, said):
    here = time.time
    monkeypatch.setattr(disk.time, "time", lambda: here() - ahead)
    found = by_name(disk.check_workdir(tmp_path))["clock"]
    assert found.state == "warning"
    assert said in found.text


def test_a_bucket_has_no_locks(monkeypatch):
    monkeypatch.setattr(disk, "_fault_of_writing", lambda folder: "")
    found = disk.check_workdir(disk.epath.Path("gs://bucket/run"))
    assert [f.name for f in found] == ["workdir", "locks"]
    assert "a bucket has none" in found[1].text
    assert disk.check_space(disk.epath.Path("gs://bucket/run"), Config(), 10**9) == []


def config(**checkpoint) -> Config:
    return dataclasses.replace(
        Config(), checkpoint=CheckpointSection(**checkpoint), train=TrainSection(steps=1000)
    )


def test_bytes_of_checkpoints_by_hand():
    one = 100 * 3 * 4
    assert disk.checkpoint_bytes(config(keep=3), 100) == 4 * one
    assert disk.checkpoint_bytes(config(keep=1, best_metric="loss"), 100) == 3 * one
    assert disk.checkpoint_bytes(config(keep=1, keep_every=250), 100) == (2 + 4) * one
    f = FinetuneSection(tasks=("rte", "mrpc"), seeds=3, learning_rates=(1e-4, 2e-4))
    tuned = dataclasses.replace(Config(), recipe="finetune", finetune=f)
    assert disk.checkpoint_bytes(tuned, 100) == 2 * one + 2 * 3 * 2 * 100 * 4


def test_a_real_run_takes_no_more_than_that(tmp_path):
    """Its arrays; names and places of Orbax are kilobytes beside them."""
    made = tiny_run.make_config(8, checkpoint={"every": 2, "keep": 2})
    task = tiny_run.linear_task(features=50_000)
    tiny_run.run(
        tmp_path,
        made,
        task=task,
        batches=tiny_run.Rows(features=50_000),
        evaluation=lambda: tiny_run.evaluation(features=50_000),
    )
    assert len(reading.list_steps(tmp_path / "checkpoints")) == 2
    arrays = reading.load_arrays(tmp_path / "checkpoints", 8)[1]
    size = sum(array.nbytes for array in arrays.values())
    parameters = 50_001
    assert 2 * size <= disk.checkpoint_bytes(made, parameters) + 2 * 4096
    assert size > 0.9 * disk.checkpoint_bytes(made, parameters) / 3


def test_space_that_the_checkpoints_do_not_have_is_told(tmp_path, monkeypatch):
    free = types.SimpleNamespace(free=int(2.5 * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free if place.exists() else 1 / 0)
    (found,) = disk.check_space(tmp_path / "not" / "yet", config(keep=3), 2**26)
    assert str(found) == (
        "wrong   space: 2.5 GiB free, the run's checkpoints will take 3.0 GiB more; free some, "
        "choose another --workdir, or keep fewer: config.checkpoint.keep."
    )
    (found,) = disk.check_space(tmp_path, config(keep=1), 2**26)
    assert found.state == "good"
    kept = tmp_path / "checkpoints" / "10" / "params" / "array"
    kept.parent.mkdir(parents=True)
    with kept.open("wb") as file:
        file.truncate(2**30)  # sparse
    (found,) = disk.check_space(tmp_path, config(keep=3), 2**26)
    assert found.state == "good", "a run that goes on has some of them already"
    assert "will take 2.0 GiB more" in found.text


def test_the_compile_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (found,) = disk.check_compile_cache("")
    assert (found.state, found.name) == ("warning", "compile cache")
    (tmp_path / "file").touch()
    (found,) = disk.check_compile_cache(str(tmp_path / "file"))
    assert found.state == "warning"
    assert "cannot be written" in found.text
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "named"))
    (found,) = disk.check_compile_cache("")
    assert f"{tmp_path}/named can be written" in found.text
