"""Fine-tuning in two processes resumes bit for bit after a kill.

test_finetuning_commands.py compares two processes with one.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from convbert_jax.workdir import Workdir
from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY
from tests.end_to_end.test_finetuning_commands import own

__all__ = ["own"]  # fixture
PATIENCE = 400  # seconds


def start(own, workdir, *flags) -> list[subprocess.Popen]:
    """Start two processes with one device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.CHEAPLY}
    command = [sys.executable, "-m", "convbert_jax.main", *own, *flags, f"--workdir={workdir}"]
    command += [f"--coordinator=localhost:{port}", "--processes=2"]
    return [
        subprocess.Popen(
            [*command, f"--process={index}"],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (0, 1)
    ]


def finish(processes) -> list[str]:
    ends = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    for process, text in zip(processes, ends, strict=True):
        assert process.returncode == 0, text
    return ends


def results_of(workdir) -> list[tuple]:
    """Return (seed, loss, scores) of each finished run, with all digits."""
    lines = map(json.loads, Workdir(workdir).results.read_text().splitlines())
    return [(line["seed"], line["loss"], line["scores"]) for line in lines]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(own, tmp_path):
    """Process 1 is killed after a checkpoint; process 0 reports it and exits too."""
    finish(start(own, tmp_path / "straight", "--config.finetune.seeds=2"))
    workdir = tmp_path / "killed"
    flags = ("--config.finetune.seeds=2", "--config.finetune.checkpoint_minutes=0.0001")
    processes = start(own, workdir, *flags)
    checkpoints, limit = Workdir(workdir).unfinished.checkpoints, time.monotonic() + PATIENCE
    while not any(path.name.isdecimal() for path in checkpoints.glob("*")):
        assert time.monotonic() < limit
        assert processes[0].poll() is None, processes[0].communicate()[0]
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    text, _ = (process.communicate(timeout=PATIENCE)[0] for process in processes)
    assert processes[0].returncode == 75, text
    assert "rocess 1 of 2" in text
    assert len(list((workdir / "own").glob("seed-*"))) < 2, "all seeds had finished before the kill"
    first, _ = finish(start(own, workdir, *flags))
    assert re.search(r"step [1-9]\d* of ", first), first
    straight, killed = (results_of(tmp_path / name) for name in ("straight", "killed"))
    assert killed == straight
    assert not (workdir / "unfinished").exists()
