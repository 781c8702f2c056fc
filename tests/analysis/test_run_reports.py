"""Contents of a run's report: config, warnings, held-out text, curves and numbers."""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import convbert_jax
from convbert_jax import drawing
from convbert_jax.analysis import overview, pretraining_report, verify_resume
from convbert_jax.analysis.pretraining_report import (
    Cloze,
    Suspects,
    describe_cloze,
    describe_suspects,
    find_suspects,
    pair_subwords,
    warn_masked_lm,
    warn_replaced_token,
    warn_writing,
)
from convbert_jax.config import to_dict
from convbert_jax.interop.networks import abstract_params
from convbert_jax.storage import DamagedFileError
from convbert_jax.training.metrics_writer import read_metrics
from convbert_jax.workdir import Workdir


def describe(config, **changes) -> str:
    config = convbert_jax.load_config(config, **changes)
    params = abstract_params(config)
    if config.spec.data == "task":
        return overview.describe_tasks(config, {n: p for n, p in params.items() if n != "head"})
    return overview.describe_run(config, params)


def numbers(text: str, line: str) -> list[float]:
    (found,) = re.findall(rf"^ *{line} .*$", text, re.MULTILINE)
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*(?:e[+]?\d+)?", found)]


def test_the_overview_of_a_config():
    text = describe("base")
    assert "256 rows x 128 = 32,768 tokens" in text
    (per_step, whole) = numbers(text, "operations")
    assert whole == pytest.approx(1e6 * per_step, rel=1e-2)
    parts = re.findall(r"^  (\w+) +([\d,]+)$", text, re.MULTILINE)
    counts = {name: int(count.replace(",", "")) for name, count in parts}
    assert sum(n for name, n in counts.items() if name != "all") == counts["all"]
    longer = describe("base", **{"train.steps": 2_000_000})
    days = [numbers(t, "TPU v5e")[1] for t in (text, longer)]
    assert days[1] == pytest.approx(2 * days[0], rel=0.02)
    assert [overview._count(n) for n in (999, 999_499, 999_999)] == ["999", "999 k", "1 M"]


def test_the_overview_shows_all_fields_but_those_left_out():
    config = convbert_jax.load_config("tiny", **{"train.batch_size": 48})
    text = overview.describe_run(config, abstract_params(config), ["finetune", "model.remat"])
    lines = dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines())
    assert "finetune" not in lines
    assert "remat=" not in lines["model"]
    assert "batch_size=48" in lines["train"].split()
    for section in ("objective", "optimizer", "data"):
        for field, value in to_dict(config)[section].items():
            assert f"{field}={value!r}" in lines[section]


def test_memory_of_the_optimizer():
    adamw, adafactor, muon = (
        describe("tiny", **{"optimizer.method": method})
        for method in ("adamw", "adafactor", "muon")
    )
    whole = numbers(adamw, "all")[0]
    assert numbers(adamw, "memory without activations")[0] == round(16 * whole / 2**20)
    # vectors and matrices with a side below 128 have separate moments
    assert 8 * whole < numbers(adafactor, "memory without activations")[0] * 2**20 < 11 * whole
    # moments of the layers' matrices in both networks, by hand
    matrices = sum(
        layers * (6 * c * c // 2 + (c // 2) * taps * heads + 2 * c * 4 * c + c * c // 2)
        for layers, c, taps, heads in ((4, 128, 9, 2), (1, 64, 9, 1))
    )
    megabytes = round((16 * whole - 4 * matrices) / 2**20)
    assert numbers(muon, "memory without activations")[0] == megabytes


@pytest.mark.parametrize(
    "name", ["translation", "language_model", "span_corruption:t5_base,light", "glue:cola"]
)
def test_the_overview_of_other_recipes(name):
    config = convbert_jax.load_config(name)
    fields, _, text = describe(name).partition("\n\n")
    assert config.recipe in fields
    assert bool(re.search(r"^  decoder", text, re.M)) == config.spec.generates
    of_pairs = config.spec.data == "parallel"
    assert ("config.parallel.source" in text) == of_pairs
    assert bool(re.search(r"at most \S+ \w tokens$", text, re.M)) == of_pairs
    if name == "glue:cola":
        assert re.search(r"tasks +cola", text)
        assert numbers(text, "runs per task") == [1, 1, 5]


USUAL = {
    **{"replaced_rate": 0.07, "sampled_accuracy": 0.54},
    **{"discriminator_auc": 0.88, "mlm_accuracy": 0.62},
}


@pytest.mark.parametrize(
    ("name", "fine", "unusual", "first_step", "number"),
    [
        ("replaced_rate", 0.03, 0.0299, 500, "3.0%"),
        ("sampled_accuracy", 0.75, 0.7501, 500, "75%"),
        ("discriminator_auc", 0.88, math.nan, 500, ""),
        ("discriminator_auc", 0.55, 0.5494, 2_000, "0.549"),
        ("discriminator_auc", 0.99, 0.9906, 2_000, "0.991"),
        ("mlm_accuracy", 0.03, 0.0294, 2_000, "2.9%"),
    ],
)
def test_an_unusual_metric_is_warned_of_with_its_value(name, fine, unusual, first_step, number):
    for step in (0, first_step - 1, first_step, 1_000_000):
        assert warn_replaced_token(step, USUAL | {name: fine}) == []
        warnings = warn_replaced_token(step, USUAL | {name: unusual})
        assert len(warnings) == (step >= first_step)
        assert all(number in warning for warning in warnings)


def test_several_unusual_metrics_and_other_recipes():
    values = {
        **{"replaced_rate": 0.0, "sampled_accuracy": 1.0},
        **{"discriminator_auc": 0.5, "mlm_accuracy": 0.0},
    }
    assert [len(warn_replaced_token(step, values)) for step in (499, 1_999, 2_000)] == [0, 1, 3]
    assert len(warn_replaced_token(2_000, values, uniform=True)) == 2  # neither network learns
    for warn, name, least in ((warn_masked_lm, "mlm", 0.03), (warn_writing, "token", 0.05)):
        found = [
            warn(step, {f"{name}_accuracy": accuracy})
            for step, accuracy in ((1_999, 0.0), (2_000, least), (2_000, least - 0.001))
        ]
        assert found[:2] == [[], []]
        (warning,) = found[2]
        assert f"{least - 0.001:.1%}" in warning
        assert "2000" in warning


def test_suspects_are_the_highest_scores():
    suspects = find_suspects(np.array([False, True, True, False]), np.array([-3.0, 2.0, -1.0, 0.5]))
    assert suspects.tolist() == [False, True, False, True]


def marked(*row) -> list[str]:
    suspects = Suspects(pair_subwords(*row), rows=32, found=0.25, chance=0.125)
    *_, last = lines = describe_suspects(suspects)
    assert [number for number in ("32", "25%", "12%") if number not in last] == []
    return lines[2:-1]


def test_held_out_text_is_shown_with_replacements_and_predictions():
    def split(text):
        return [(not piece.startswith("+"), piece.removeprefix("+")) for piece in text.split()]

    lines = marked(
        split("the blue dog sat +s"),
        split("the black cat sat +s"),
        [False, True, False, True, False],
    )
    assert lines == ["  the [blue<black]! [dog<cat] sat!s"]
    pieces = [(True, "[CLS]"), (True, ""), (False, "vert")]
    assert marked(pieces, pieces, [False] * 3) == ["  [CLS] _vert"]
    subwords = pair_subwords(
        split("the dog sat +ting on mats"),
        split("the cat sat +s on mats"),
        [False, True, True, True, False, False],
    )
    _, line, last = describe_cloze(Cloze(subwords, rows=32, right=1 / 3))
    assert line == "  the [dog<cat] [sat][ting<s] on mats"
    assert "33%" in last


def write_metrics(path):
    lines = []
    for step in range(10, 60, 10):
        values = {"mlm_loss": 8.0 - step / 10, "discriminator_auc": 0.5 + step / 200}
        lines.append({"step": step, "split": "train", **values, "learning_rate": 1e-3})
    lines.append({"step": 50, "split": "validation", "mlm_loss": 4.0, "discriminator_auc": None})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_of_a_run(tmp_path, monkeypatch):
    figures, draw = [], drawing.open_figure

    @contextlib.contextmanager
    def watched(*given, **options):
        with draw(*given, **options) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(pretraining_report.drawing, "open_figure", watched)
    write_metrics(tmp_path / "metrics.jsonl")
    curves = pretraining_report.arrange_curves(read_metrics(tmp_path / "metrics.jsonl"))
    assert curves["train"]["mlm_loss"][0] == (10, 7.0)
    assert curves["validation"] == {"mlm_loss": [(50, 4.0)]}
    picture = tmp_path / "curves.png"
    assert not pretraining_report.plot_curves({}, picture, "no curves")
    assert not picture.exists()
    assert pretraining_report.plot_curves(curves, picture, "a run")
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line for axis in figures[0].axes for line in axis.lines if len(line.get_xdata()) < 3]
    assert {line.get_marker() for line in lines if len(line.get_xdata()) == 1} == {"o"}


def test_a_metric_without_samples_has_no_value():
    nan = float("nan")
    values = {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "pair_accuracy": nan}
    (_, accuracy, pairs) = pretraining_report.list_numbers(values, vocab_size=100)
    assert accuracy.value == "50.0%"
    assert not re.search(r"\d|nan", pairs.value)
    values = dict.fromkeys(["mlm_loss", "mlm_accuracy", "replaced_rate", "discriminator_auc"], 0.5)
    values |= {"discriminator_accuracy": 0.9, "discriminator_recall": 0.0}
    values |= {"discriminator_precision": nan}
    lines = pretraining_report.describe_numbers(pretraining_report.list_numbers(values, 100))
    assert not any("nan" in line for line in lines)


def test_a_damaged_metrics_file_is_refused(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_metrics(file)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    read, damaged = 0, 0
    for _ in range(300):
        content = bytearray(whole)
        content[rng.integers(len(content))] = rng.integers(256)
        file.write_bytes(content)
        try:
            read_metrics(file)
            read += 1
        except DamagedFileError:
            damaged += 1
    assert min(read, damaged) > 30
    file.write_bytes(whole[:-20])  # truncated by a kill
    assert {line["split"] for line in read_metrics(file)} == {"train"}


def test_verify_resume_finds_all_differences():
    a = {"w": np.float32([1, 2]), "z": np.float32([0.0])}
    assert verify_resume.compare(a, {name: value.copy() for name, value in a.items()}) == []
    assert verify_resume.compare(a, {"w": a["w"]}) == ["z"]
    assert verify_resume.compare(a, a | {"w": np.float32([1, 2.0000002])}) == ["w"]
    assert verify_resume.compare(a, a | {"z": np.float32([-0.0])}) == ["z"]
    assert verify_resume.compare(a, a | {"w": np.float64([1, 2])}) == ["w"]


def test_verify_resume_stops_its_run_when_it_is_interrupted(tmp_path, monkeypatch):
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **options: start(sleeps, **options))
    with (
        pytest.raises(KeyboardInterrupt),
        verify_resume._started([], Workdir(tmp_path)) as process,
    ):
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGTERM
