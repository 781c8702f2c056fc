"""Experiment trackers: real ones, checked by their files, and failing ones."""

import importlib.util
import json

import numpy as np
import pytest

from convbert_jax.config import ConfigError, UserError
from convbert_jax.training import metrics_writer
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.training.tiny_run import make_config, run


def config_of(tracker, steps=4):
    return make_config(steps, train={"tracker": tracker})


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    place = f"file://{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return MlflowClient(place)


@pytest.fixture
def wandb():
    """Resets wandb's settings, which are global to the process."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield
    wandb.teardown()


def test_mlflow_has_what_the_lines_have_and_a_resumed_run_goes_on(tmp_path, mlflow):
    folder = tmp_path / "run"
    run(folder, config_of("mlflow", 4))
    name = json.loads((folder / "tracker.json").read_text())
    run(folder, config_of("mlflow", 8))
    assert json.loads((folder / "tracker.json").read_text()) == name
    kept = mlflow.get_run(name["run"])
    assert kept.info.status == "FINISHED"
    assert kept.data.params["optimizer.method"] == "adamw"
    assert kept.data.params["train.steps"] == "4"  # settings stay those of the first start
    history = mlflow.get_metric_history(name["run"], "validation/error")
    lines = metrics_writer.read_metrics(Workdir(folder).metrics)
    expected = [(x["step"], x["error"]) for x in lines if x["split"] == "validation"]
    assert [x.step for x in history] == [step for step, _ in expected]
    assert [x.value for x in history] == pytest.approx([error for _, error in expected])
    assert len(expected) > 1


def test_wandb_keeps_a_run_on_this_disk_and_goes_on_under_its_name(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    run(folder, config_of("wandb", 4))
    name = json.loads((folder / "tracker.json").read_text())["run"]
    run(folder, config_of("wandb", 8))
    kept = sorted(x.name for x in (folder / "wandb").glob("offline-run-*"))
    assert kept
    assert all(x.endswith(f"-{name}") for x in kept)
    written = b"".join(x.read_bytes() for x in folder.glob("wandb/offline-run-*/*.wandb"))
    assert b"validation/error" in written
    assert b"train/loss" in written


def test_a_tracker_that_cannot_start_is_refused_before_a_step(tmp_path, monkeypatch, wandb):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # location of an API key
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with refused(ConfigError, "key", field="config.train.tracker", value="wandb"):
        run(tmp_path / "run", config_of("wandb"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tracker_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(ConfigError, "mlflow-skinny", value="mlflow"):
        metrics_writer.check_tracker("mlflow")
    metrics_writer.check_tracker("")


@pytest.mark.parametrize("fails", ["add", "close"])
def test_training_continues_if_a_tracker_fails(tmp_path, monkeypatch, caplog, fails):
    heard = []

    class Failing:
        run = "one"

        def __init__(self, config, workdir, run):
            del config, workdir, run

        def add(self, step, values):
            heard.append(step)
            if fails == "add":
                raise ConnectionError("no route to host")

        def close(self):
            if fails == "close":
                raise ConnectionError("no route to host")

    monkeypatch.setattr(metrics_writer, "_MLflow", Failing)
    monkeypatch.setattr(metrics_writer, "check_tracker", lambda name: None)
    told = run(tmp_path / "told", config_of("mlflow", 8))
    alone = run(tmp_path / "alone", config_of("", 8))
    assert len(heard) == (1 if fails == "add" else 6)  # 4 intervals, 2 evaluations
    (record,) = [r for r in caplog.records if "no route to host" in r.getMessage()]
    assert record.levelname == "WARNING"
    np.testing.assert_array_equal(
        told.state.params["dense"]["kernel"], alone.state.params["dense"]["kernel"]
    )


def test_a_damaged_name_is_refused(tmp_path, mlflow):
    folder = tmp_path / "run"
    run(folder, config_of("mlflow", 4))
    (folder / "tracker.json").write_text('{"tracker": "mlflow"}')
    with refused(UserError, folder / "tracker.json"):
        run(folder, config_of("mlflow", 8))
