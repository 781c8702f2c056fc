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
from convbert_jax.training.checkpoints import reading as checkpoint_reading
from convbert_jax.training.checkpoints import saving as checkpoint
from convbert_jax.training.environment import compilation
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


def finish(process) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out + err


def wait_for_line(workdir, step: int, process) -> None:
    """Until metrics.jsonl has a line of `step` or later."""
    file, deadline = workdir / "metrics.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        lines = file.read_text().splitlines() if file.exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no line of step {step}: {finish(process)}")


def wait_for_word(process, word: str) -> None:
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"{word} was not said: {finish(process)}")


def wait_for_change(file, since: float, process) -> None:
    """Until `file` is written after `since`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.stat().st_mtime > since:
            return
        time.sleep(0.005)
    raise AssertionError(finish(process))


def assert_same_run(first, second, step):
    a, b = (checkpoint_reading.load_arrays(w / "checkpoints", step)[1] for w in (first, second))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
    curves = []
    for workdir in (first, second):
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
        curves.append([(li["split"], li["step"], li["error"]) for li in lines])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(tmp_path, number, ends):
    """With a code that is not that of a finished run: a launcher starts it again after SIGTERM."""
    process = start(tmp_path, "--steps=100000", "--seconds=0.01")
    wait_for_line(tmp_path, 3, process)
    process.send_signal(number)
    code, text = finish(process)
    assert code == ends, text
    assert "interrupted True" in text
    assert f"Stopped by {number.name}" in text
    step = checkpoint.list_steps(tmp_path / "checkpoints")[-1]
    assert f"step {step} interrupted" in text
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == step


@pytest.mark.parametrize(("by", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("pretrain", "--config=configs/tiny.py"),
        ("finetune", "--config=configs/glue.py:cola --config.init_from= --config.finetune.data=x"),
    ],
)
def test_a_run_that_was_stopped_ends_with_a_code_of_its_own(
    monkeypatch, tmp_path, recipe, flags, by, code
):
    """Not with 0, which a scheduler takes for finished."""

    def run(*arguments):
        if recipe == "finetune":
            raise interrupts.Stopped(by)
        return types.SimpleNamespace(stopped_by=by, report="")

    monkeypatch.setattr(recipes, recipe, run)
    monkeypatch.setattr(main, "_computes_on_cpu", lambda config: False)
    monkeypatch.setattr(compilation, "enable_compile_cache", lambda folder: None)
    with flagsaver.flagsaver():
        request = command_line.read(["main.py", *flags.split(), f"--workdir={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        main.main(request)
    assert end.value.code == code


def test_a_second_signal_kills(tmp_path):
    """In a step that never ends. Again and again: what comes soon after the first one is its echo,
    and the first one is heard late by a process that compiles.
    """
    process = start(tmp_path, "--steps=100000", "--hold=3")
    wait_for_line(tmp_path, 1, process)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    code, text = finish(process)
    assert code == -signal.SIGTERM, text


def test_a_signal_that_is_passed_on_does_not_kill(tmp_path):
    """A scheduler signals every process of a job, and one that started another tells it too."""
    process = start(tmp_path, "--steps=100000", "--seconds=1")
    wait_for_line(tmp_path, 1, process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    code, text = finish(process)
    assert code == 75, text
    assert "interrupted True" in text


def test_a_signal_before_the_first_step_ends_at_once(tmp_path):
    """The first batch does not come, as a program that is compiled for minutes does not."""
    arguments = ("--steps=10", f"--cache={tmp_path / 'cache'}")
    for step in (0, 5):
        process = start(tmp_path, *arguments, f"--hold={step}")
        wait_for_word(process, "Resuming from" if step else "Starting from")
        process.send_signal(signal.SIGTERM)
        code, text = finish(process)
        assert code == 75, text
        assert "nothing is lost" in text
        if not step:
            process = start(tmp_path, *arguments, "--steps=5")
            assert finish(process)[0] == 0
    code, text = finish(start(tmp_path, *arguments))
    assert code == 0, text
    assert "step 10 interrupted False" in text


def test_a_full_disk_is_one_sentence_and_costs_nothing_saved(tmp_path):
    """A limit on file sizes: the 80 kB of parameters do not fit, the lines of the report do."""
    model = "--features=20000"
    code, text = finish(start(tmp_path, "--steps=5", model))
    assert code == 0, text
    _, before = checkpoint_reading.load_arrays(tmp_path / "checkpoints", 5)
    code, text = finish(start(tmp_path, "--steps=10", model, "--file-bytes=50000"))
    assert code == 1, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "could not be written" in line
    assert "step 5 is whole" in line
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [5]
    _, after = checkpoint_reading.load_arrays(tmp_path / "checkpoints", 5)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_the_compile_cache_is_used_and_told(tmp_path, monkeypatch):
    for name in compiling.keep_in(""):
        monkeypatch.delenv(name, raising=False)
    for run, pattern in (("first", ": 0 programs found"), ("second", ", 0 compiled")):
        code, text = finish(start(tmp_path / run, "--steps=2", f"--cache={tmp_path / 'cache'}"))
        assert code == 0, text
        (line,) = [line for line in text.splitlines() if "compile cache" in line]
        assert pattern in line


@pytest.mark.slow
def test_killed_twenty_times_is_the_same_run(tmp_path):
    """kill -9 at random moments: while starting, in steps, in evaluations, in saves.

    Each start may draw 50 batches more than the one before, so that none finishes however fast
    the machine is.
    """
    arguments = ("--steps=1000", "--seconds=0.005", f"--cache={tmp_path / 'cache'}")
    code, text = finish(start(tmp_path / "straight", *arguments))
    assert code == 0, text
    random.seed(0)
    workdir, reached = tmp_path / "killed", []
    for kill in range(20):
        began = time.time()
        process = start(workdir, *arguments, f"--hold={50 * kill + 49}")
        if kill % 5 == 4:
            time.sleep(random.uniform(0.0, 3.0))
        else:
            wait_for_change(workdir / "metrics.jsonl", began, process)
            time.sleep(random.uniform(0.0, 2.0))
        assert process.poll() is None, finish(process)
        process.kill()
        finish(process)
        reached.append(max(checkpoint.list_steps(workdir / "checkpoints"), default=0))
    assert reached == sorted(reached), "a later start fell back"
    assert reached[-1] > 50, f"hardly any step was made: {reached}"
    code, text = finish(start(workdir, *arguments))
    assert code == 0, text
    assert_same_run(tmp_path / "straight", workdir, 1000)


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    """A signal to one stops both at one step, long before the next line of the log; one process
    alone goes on from there.
    """
    arguments = ("--steps=300", "--seconds=0.02", "--log-every=1000")
    code, text = finish(start(tmp_path / "alone", *arguments))
    assert code == 0, text
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workdir = tmp_path / "both"
    shared = (*arguments, "--processes=2", f"--port={port}")
    both = [start(workdir, *shared, f"--process={index}", devices=4) for index in (0, 1)]
    wait_for_line(workdir, 7, both[0])
    both[1].send_signal(signal.SIGTERM)
    ends = [finish(process) for process in both]
    step = checkpoint.list_steps(workdir / "checkpoints")[-1]
    assert 7 <= step < 300
    for code, text in ends:
        assert code == 75, text
        assert f"step {step} interrupted True" in text
    code, text = finish(start(workdir, *arguments))
    assert code == 0, text
    one, two = (
        checkpoint_reading.load_arrays(tmp_path / w / "checkpoints", 300)[1]
        for w in ("alone", "both")
    )
    assert one["data"].tobytes() == two["data"].tobytes()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_one_process_goes_on_as_two(tmp_path):
    code, text = finish(start(tmp_path / "alone", "--steps=10"))
    assert code == 0, text
    workdir = shutil.copytree(tmp_path / "alone", tmp_path / "both")
    code, text = finish(start(tmp_path / "alone", "--steps=20"))
    assert code == 0, text
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = ("--steps=20", "--processes=2", f"--port={port}")
    both = [start(workdir, *shared, f"--process={index}", devices=4) for index in (0, 1)]
    for code, text in map(finish, both):
        assert code == 0, text
        assert "Resuming from the checkpoint of step 10" in text
        assert "step 20 interrupted False" in text
    one, two = (
        checkpoint_reading.load_arrays(tmp_path / w / "checkpoints", 20)[1]
        for w in ("alone", "both")
    )
    assert one["data"].tobytes() == two["data"].tobytes()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6, err_msg=name)
