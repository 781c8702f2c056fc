"""The report reads what the loop writes and says what it sees."""

import contextlib
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from convbert_jax import drawing
from convbert_jax.analysis import pretraining_report, verify_resume
from convbert_jax.files import DamagedFileError
from convbert_jax.training.reports.reporting import read_metrics
from convbert_jax.workdir import Workdir


def write_metrics(path):
    lines = []
    for step in range(10, 60, 10):
        values = {"mlm_loss": 8.0 - step / 10, "discriminator_auc": 0.5 + step / 200}
        lines.append({"step": step, "split": "train", **values, "learning_rate": 1e-3})
    lines.append({"step": 50, "split": "validation", "mlm_loss": 4.0, "discriminator_auc": None})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_and_picture(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl")
    curves = pretraining_report.arrange_curves(read_metrics(tmp_path / "metrics.jsonl"))
    assert curves["train"]["mlm_loss"][0] == (10, 7.0)
    assert curves["validation"] == {"mlm_loss": [(50, 4.0)]}
    assert pretraining_report.plot_curves(curves, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_point_is_seen(tmp_path, monkeypatch):
    """Of a run that logs once: a line through one point is nothing."""
    figures, draw = [], drawing.open_figure

    @contextlib.contextmanager
    def watched(*given, **options):
        with draw(*given, **options) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(pretraining_report.drawing, "open_figure", watched)
    curves = {"train": {"mlm_loss": [(9, 7.0)], "learning_rate": [(1, 0.1), (2, 0.2)]}}
    assert pretraining_report.plot_curves(curves, tmp_path / "curves.png", "a run")
    lines = [line for axis in figures[0].axes for line in axis.lines]
    assert [line.get_marker() for line in lines] == ["o", "None"]


def test_what_was_not_there_to_count_is_said():
    (_, accuracy, pairs) = pretraining_report.list_numbers(
        {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "pair_accuracy": float("nan")}, vocab_size=100
    )
    assert (accuracy.value, pairs.value) == ("50.0%", "none to count")


def test_numbers_without_any_flagged_token():
    values = dict.fromkeys(
        ["mlm_loss", "mlm_accuracy", "replaced_rate", "discriminator_auc"], 0.5
    ) | {"discriminator_accuracy": 0.9, "discriminator_recall": 0.0}
    numbers = pretraining_report.list_numbers(
        values | {"discriminator_precision": float("nan")}, vocab_size=100
    )
    lines = pretraining_report.describe_numbers(numbers)
    assert any("none flagged" in line for line in lines)
    assert not any("nan" in line for line in lines)


def test_compare_finds_every_kind_of_difference():
    a = {"w": np.float32([1, 2]), "z": np.float32([0.0])}
    assert verify_resume.compare(a, {name: value.copy() for name, value in a.items()}) == []
    assert verify_resume.compare(a, {"w": a["w"]}) == ["z"]
    assert verify_resume.compare(a, a | {"w": np.float32([1, 2.0000002])}) == ["w"]
    assert verify_resume.compare(a, a | {"z": np.float32([-0.0])}) == ["z"]
    assert verify_resume.compare(a, a | {"w": np.float64([1, 2])}) == ["w"]


def test_a_damaged_metrics_file_is_a_sentence(tmp_path):
    """A thousand ways to damage it, and the end that a kill cut off."""
    file = tmp_path / "metrics.jsonl"
    write_metrics(file)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    read, refused = 0, 0
    for _ in range(1000):
        content = bytearray(whole)
        content[rng.integers(len(content))] = rng.integers(256)
        file.write_bytes(content)
        try:
            read_metrics(file)
            read += 1
        except DamagedFileError:
            refused += 1
    assert min(read, refused) > 100
    file.write_bytes(whole[:-20])
    assert {line["split"] for line in read_metrics(file)} == {"train"}


def test_a_run_without_numbers_has_no_picture(tmp_path):
    picture = tmp_path / "curves.png"
    assert not pretraining_report.plot_curves({}, picture, "a run without numbers")
    assert not (tmp_path / "curves.png").exists()


def test_a_run_does_not_outlive_who_verifies_it(tmp_path, monkeypatch):
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **options: start(sleeps, **options))
    with (
        pytest.raises(KeyboardInterrupt),
        verify_resume._started([], Workdir(tmp_path)) as process,
    ):
        raise KeyboardInterrupt  # as SIGTERM does
    assert process.returncode == -signal.SIGTERM
