"""Checkpoints on storage that fails temporarily or permanently."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest
from etils.epath import backend
from orbax.checkpoint._src.multihost import multihost as of_handlers
from orbax.checkpoint.experimental.v1._src.synchronization import multihost as of_steps

from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training.checkpoints import CheckpointError, Checkpoints
from convbert_jax.workdir import list_steps
from tests.refusals import refused
from tests.training.test_checkpoints import (
    SECTION,
    assert_equal,
    make_state,
    mesh,
    restore,
)

__all__ = ["mesh"]  # the fixture
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def failing(monkeypatch):
    """Set of steps whose checkpoint writes fail; tests fill it."""
    steps = []
    open_ = backend._OsPathBackend.open

    def fail(self, path, mode):
        if any(f"/{step}.orbax" in str(path) for step in steps) and str(path).endswith("data.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_(self, path, mode)

    monkeypatch.setattr(backend._OsPathBackend, "open", fail)
    # Otherwise Orbax's threads delay the exit of the test process by 5 minutes.
    for module in (of_handlers, of_steps):
        monkeypatch.setattr(module, "coordination_timeout", lambda: 10)
    return steps


def test_a_save_that_fails_costs_that_one(tmp_path, mesh, failing, caplog):
    failing.append(2)
    checkpoints = Checkpoints(tmp_path, SECTION)
    for step in (1, 2, 3):
        checkpoints.save(make_state(step, mesh), {"position": step}, {"auc": 0.5})
    checkpoints.close()
    ours = [r for r in caplog.records if "convbert_jax" in r.pathname]  # Orbax tells slow saves
    (record,) = [r for r in ours if r.levelname == "WARNING"]
    for mention in ("step 2", os.strerror(errno.EIO), "step 1"):
        assert mention in record.getMessage()
    assert list_steps(tmp_path) == [1, 3]
    assert restore(tmp_path, mesh)[1] == {"position": 3}


def test_saves_that_always_fail_end_the_run(tmp_path, mesh, failing, caplog):
    failing.extend((2, 3, 4))
    checkpoints = Checkpoints(tmp_path, SECTION)
    for step in (1, 2, 3, 4):
        checkpoints.save(make_state(step, mesh), {})
    fault = os.strerror(errno.EIO)
    with refused(CheckpointError, "step 4", fault, "step 1", path=tmp_path):
        checkpoints.save(make_state(5, mesh), {})
    checkpoints.close()
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2
    assert list_steps(tmp_path) == [1]


def test_the_last_save_is_tried_again(tmp_path, mesh, failing, monkeypatch):
    failing.append(2)
    monkeypatch.setattr(checkpoints_lib.logging, "warning", lambda *words: failing.clear())
    checkpoints = Checkpoints(tmp_path, SECTION)
    checkpoints.save(make_state(2, mesh), {"position": 20}, last=True)
    assert list_steps(tmp_path) == [2]
    checkpoints.close()
    assert_equal(restore(tmp_path, mesh)[0], make_state(2, mesh))


def test_a_failure_after_the_last_save_is_raised_at_the_end(tmp_path, mesh, failing):
    failing.append(2)
    checkpoints = Checkpoints(tmp_path, SECTION)
    checkpoints.save(make_state(2, mesh), {})
    with refused(CheckpointError, "step 2", path=tmp_path):
        checkpoints.close()


def test_storage_that_cannot_be_read_now_is_not_damage(tmp_path, mesh, monkeypatch):
    checkpoints = Checkpoints(tmp_path, SECTION)
    for step in (2, 3):
        checkpoints.save(make_state(step, mesh), {})
    checkpoints.close()

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_lib.ocp, "load_checkpointables", fail)
        with refused(checkpoints_lib.StorageError, tmp_path / "3"):
            restore(tmp_path, mesh)
    assert sorted(tmp_path.rglob("*")) == before
    assert int(restore(tmp_path, mesh)[0].step) == 3


FULL_DISK = """
import errno, os, runpy, sys
from etils.epath import backend
makedirs = backend._OsPathBackend.makedirs

def fail(self, path, **options):
    if any(f"/{{step}}.orbax" in str(path) for step in {steps}):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return makedirs(self, path, **options)

backend._OsPathBackend.makedirs = fail
sys.argv[1:] = [{folder!r}, "--steps=20"]
runpy.run_module("tests.training.tiny_run", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("failing", "code", "kept"), [((10,), 0, [5, 15, 20]), ((10, 15, 20), 1, [5])]
)
def test_threads_of_a_save_that_failed_do_not_hold_the_process(tmp_path, failing, code, kept):
    """Orbax waits five minutes for a folder that could not be created."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK.format(steps=failing, folder=str(tmp_path))],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "step 10" in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ["step 20" in line for line in errors] == [True] * code
    assert ("step 20 interrupted False" in done.stdout) == (not code)
    assert list_steps(tmp_path / "checkpoints") == kept
