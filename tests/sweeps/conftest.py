"""Fixtures of the tests of sweeps."""

import pytest

from convbert_jax.sweeps import runner
from convbert_jax.sweeps.table import Folder


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "sweep")


@pytest.fixture(autouse=True)
def _poll_quickly(monkeypatch):
    monkeypatch.setattr(runner, "_POLL", 0.02)
