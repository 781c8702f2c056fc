"""Runs as processes: signals, kill -9, a full disk, and the compile cache."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from absl.testing import flagsaver

from convbert_jax import command_line, interrupts, main, recipes
from convbert_jax.training import checkpoints, environment
from tests import compiling

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds


def start(workdir, *arguments, devices: int = 1) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.tiny_run", str(workdir), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": compiling.flags(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(workdir, *arguments) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (*arguments, "--processes=2", f"--port={port}")
    return [start(workdir, *shared, f"--process={index}", devices=4) for index in (0, 1)]


def finish(process) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out + err


def complete(workdir, *arguments) -> str:
    """Waits for a run to finish; returns its output."""
    code, text = finish(start(workdir, *arguments))
    assert code == 0, text
    return text


def wait_until(process, condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(finish(process))


def wait_for_line(workdir, step: int, process) -> None:
    """Waits until metrics.jsonl has a line of `step` or later."""
    file = workdir / "metrics.jsonl"

    def is_there():
        lines = file.read_text().splitlines() if file.exists() else []
        return lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= step

    wait_until(process, is_there)


def assert_close(first, second, step):
    """Asserts equal data and parameters within rounding."""
    one, two = (checkpoints.load_arrays(w / "checkpoints", step)[1] for w in (first, second))
    assert one["data"].tobytes() == two["data"].tobytes()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(tmp_path, number, ends):
    """Launchers restart after the exit code of SIGTERM, which differs from success."""
    process = start(tmp_path, "--steps=100000", "--seconds=0.01")
    wait_for_line(tmp_path, 3, process)
    process.send_signal(number)
    code, text = finish(process)
    assert code == ends, text
    step = checkpoints.list_steps(tmp_path / "checkpoints")[-1]
    assert f"step {step} interrupted True" in text
    assert number.name in text
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == step


@pytest.mark.parametrize(
    ("recipe", "flags", "by", "code"),
    [
        ("pretrain", "--config=configs/tiny.py", "SIGINT", 130),
        ("pretrain", "--config=configs/tiny.py", "SIGTERM", 75),
        ("finetune", "--config=configs/glue.py:cola --config.init_from=", "SIGTERM", 75),
    ],
)
def test_a_stopped_run_ends_with_a_code_of_its_own(monkeypatch, tmp_path, recipe, flags, by, code):
    """A scheduler takes exit code 0 for a finished run."""

    def run(*arguments):
        if recipe == "finetune":
            raise interrupts.Stopped(by)
        return types.SimpleNamespace(stopped_by=by, report="")

    monkeypatch.setattr(recipes, "train", run)
    monkeypatch.setattr(main, "_computes_on_cpu", lambda platform: False)
    monkeypatch.setattr(environment, "enable_compile_cache", lambda folder: None)
    flags = [*flags.split(), *(["--config.finetune.data=x"] if recipe == "finetune" else [])]
    with flagsaver.flagsaver():
        request = command_line.read(["main.py", *flags, f"--workdir={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        main.main(request)
    assert end.value.code == code


def test_a_second_signal_kills_a_step_that_hangs_and_an_echo_does_not(tmp_path):
    process = start(tmp_path / "hangs", "--steps=100000", "--hold=3")
    wait_for_line(tmp_path / "hangs", 1, process)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    code, text = finish(process)
    assert code == -signal.SIGTERM, text
    process = start(tmp_path / "runs", "--steps=100000", "--seconds=1")
    wait_for_line(tmp_path / "runs", 1, process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    code, text = finish(process)
    assert code == 75, text
    assert "interrupted True" in text


def test_a_signal_before_the_first_step_ends_at_once(tmp_path):
    """The first batch never arrives, as during a long compilation."""
    arguments = ("--steps=10", f"--cache={tmp_path / 'cache'}")
    for step in (0, 5):
        process = start(tmp_path, *arguments, f"--hold={step}")
        begins = f"checkpoint of step {step}" if step else "parameters"
        assert any(begins in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        code, text = finish(process)
        assert code == 75, text
        assert "interrupted" not in text
        if not step:
            complete(tmp_path, *arguments, "--steps=5")
    assert "step 10 interrupted False" in complete(tmp_path, *arguments)


def test_a_full_disk_is_one_error_and_keeps_saved_checkpoints(tmp_path):
    """A file size limit fits the report's lines but not the 80 kB of parameters."""
    model = "--features=20000"
    complete(tmp_path, "--steps=5", model)
    _, before = checkpoints.load_arrays(tmp_path / "checkpoints", 5)
    code, text = finish(start(tmp_path, "--steps=10", model, "--file-bytes=50000"))
    assert code == 1, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert str(tmp_path / "checkpoints") in line
    assert "step 5" in line
    assert checkpoints.list_steps(tmp_path / "checkpoints") == [5]
    _, after = checkpoints.load_arrays(tmp_path / "checkpoints", 5)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


@pytest.mark.slow
def test_a_run_killed_twenty_times_is_the_same_run(tmp_path):
    """Kills a run at random moments: startup, steps, evaluations and saves.

    Each start may draw 50 batches more than the previous one, so that fast machines do not finish
    early.
    """
    arguments = ("--steps=1000", "--seconds=0.005", f"--cache={tmp_path / 'cache'}")
    complete(tmp_path / "straight", *arguments)
    random.seed(0)
    workdir, reached = tmp_path / "killed", []
    metrics = workdir / "metrics.jsonl"
    for kill in range(20):
        began = time.time()
        process = start(workdir, *arguments, f"--hold={50 * kill + 49}")
        if kill % 5 == 4:
            time.sleep(random.uniform(0.0, 3.0))
        else:
            wait_until(process, lambda t=began: metrics.exists() and metrics.stat().st_mtime > t)
            time.sleep(random.uniform(0.0, 2.0))
        assert process.poll() is None, finish(process)
        process.kill()
        finish(process)
        reached.append(max(checkpoints.list_steps(workdir / "checkpoints"), default=0))
    assert reached == sorted(reached), "a later start fell back"
    assert reached[-1] > 50, f"hardly any step was made: {reached}"
    complete(workdir, *arguments)
    folders = (tmp_path / "straight", workdir)
    a, b = (checkpoints.load_arrays(w / "checkpoints", 1000)[1] for w in folders)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
    curves = [
        [(li["split"], li["step"], li["error"]) for li in map(json.loads, file.open())]
        for file in (folder / "metrics.jsonl" for folder in folders)
    ]
    assert curves[0] == curves[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_processes_are_one_run(tmp_path, number):
    """A signal to one process stops both at one step, before the next log line.

    One process alone then resumes.
    """
    arguments = ("--steps=300", "--seconds=0.02", "--log-every=1000")
    workdir = tmp_path / "both"
    both = start_two(workdir, *arguments)
    wait_for_line(workdir, 7, both[0])
    both[1].send_signal(number)
    ends = [finish(process) for process in both]
    step = checkpoints.list_steps(workdir / "checkpoints")[-1]
    assert 7 <= step < 300
    for code, text in ends:
        assert code == (75 if number == signal.SIGTERM else 130), text
        assert f"step {step} interrupted True" in text
    if number == signal.SIGTERM:
        complete(workdir, *arguments)
        complete(tmp_path / "alone", *arguments)
        assert_close(tmp_path / "alone", workdir, 300)


@pytest.mark.slow
def test_one_process_continues_as_two(tmp_path):
    complete(tmp_path / "alone", "--steps=10")
    workdir = shutil.copytree(tmp_path / "alone", tmp_path / "both")
    complete(tmp_path / "alone", "--steps=20")
    for code, text in map(finish, start_two(workdir, "--steps=20")):
        assert code == 0, text
        assert "checkpoint of step 10" in text
        assert "step 20 interrupted False" in text
    assert_close(tmp_path / "alone", workdir, 20)
