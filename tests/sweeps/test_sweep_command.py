"""launch/sweep.py as people start it: killed anywhere, two at once, and what it says of faults."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from convbert_jax.sweeps.slurm import submission
from convbert_jax.sweeps.slurm.job import Job
from convbert_jax.training.checkpoints.reading import load_arrays
from convbert_jax.workdir import Workdir
from tests import compiling

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "sweep.py"
CELLS = [f"{row}/seed-0/{stage}" for row in ("wide", "narrow") for stage in ("pretrain", "own")]
TABLE = """
from convbert_jax.sweeps import Row, Sweep, Task

SMALL = {{
    "model.layers": 1,
    "model.mixer": "attention",
    "model.hidden_size": 32,
    "model.embedding_size": 32,
    "model.heads": 2,
    "model.positions": 32,
    "data.length": 32,
    "data.workers": 1,
    "data.heldout_fraction": 0.1,
    "data.source": "text:{text}",
    "tokenizer.vocab_size": 200,
    "train.compile_cache": "{cache}",
    "train.steps": 24,
    "train.batch_size": 8,
    "train.log_every": 4,
    "train.eval_every": 8,
    "train.eval_rows": 16,
    "checkpoint.every": 4,
    "optimizer.warmup_steps": 2,
}}
TASK = {{
    "task.folder": "{folder}",
    "task.train": "train.tsv",
    "task.validation": "dev.tsv",
    "task.columns": ("text", "label"),
    "finetune.length": 16,
    "finetune.buckets": (),
    "finetune.batch_size": 8,
    "finetune.epochs": (1.0,),
    "finetune.seeds": 1,
    "train.compile_cache": "{cache}",
}}


def get_sweep(name="both"):
    rows = {{"wide": Row({{"model.ffn_size": 64}}), "narrow": Row({{"model.ffn_size": 32}})}}
    tasks = {{"own": Task("text:own", TASK)}} if name == "both" else {{}}
    return Sweep("tiny", rows, seeds=(0,), changes=SMALL, tasks=tasks)
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pathlib.Path:
    """A file with a sweep of two pre-trainings of 24 steps, each with a fine-tuning after it."""
    folder = tmp_path_factory.mktemp("table")
    prose = [pathlib.Path(module.__file__).read_text() for module in (pathlib, subprocess)]
    (folder / "text.txt").write_text("\n\n".join(prose))
    for name, rows in (("train", 24), ("dev", 8)):
        lines = [f"{('bad', 'good')[i % 2]} text {i}\t{i % 2}\n" for i in range(rows)]
        (folder / f"{name}.tsv").write_text("".join(lines))
    file = folder / "table.py"
    names = {"text": folder / "text.txt", "cache": folder / "cache", "folder": folder}
    file.write_text(TABLE.format(**names))
    return file


def begin(table, workdir, *arguments, devices: int = 1) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), f"--config={table}", f"--workdir={workdir}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=table.parent,
        env={**os.environ, "XLA_FLAGS": compiling.flags(devices), "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )


def end(process: subprocess.Popen, code: int = 0) -> str:
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == code, printed
    return printed


def weights(workdir: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """The whole last checkpoint of each pre-training: parameters, moments, position."""
    cells = [cell for cell in CELLS if cell.endswith("pretrain")]
    return {
        cell: load_arrays(Workdir(workdir / "cells" / cell).checkpoints, 24)[1] for cell in cells
    }


def starts(workdir: pathlib.Path, cell: str) -> int:
    log = (workdir / "cells" / f"{cell}.log").read_text()
    return len(re.findall(r"Running .* on \d+ x", log))


@pytest.mark.slow
def test_a_sweep_survives_being_killed_and_is_shared(table, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    printed = end(begin(table, whole))
    assert "4 of 4 done" in printed
    assert all(starts(whole, cell) == 1 for cell in CELLS)
    assert end(begin(table, whole)).count("begins") == 0

    when = random.Random(7)
    finished: dict[str, str] = {}
    for _ in range(3):
        process = begin(table, killed)
        time.sleep(when.uniform(6, 16))
        # the runner alone, and the cell's process is left behind: it must end by itself
        process.send_signal(signal.SIGKILL)
        process.wait()
        for cell, text in finished.items():
            assert (killed / "cells" / f"{cell}.json").read_text() == text, "done again"
        for cell in CELLS:
            path = killed / "cells" / f"{cell}.json"
            if path.exists() and json.loads(path.read_text())["state"] == "finished":
                finished.setdefault(cell, path.read_text())
    both = [begin(table, killed), begin(table, killed)]
    printed = [end(process) for process in both]
    for cell, text in finished.items():
        assert (killed / "cells" / f"{cell}.json").read_text() == text, "done again"
    began = [cell for text in printed for cell in re.findall(r": (\S+) (?:begins|goes on)", text)]
    assert len(began) == len(set(began))
    assert not set(began) & set(finished)
    assert "4 of 4" in "".join(printed)

    straight, resumed = weights(whole), weights(killed)
    for cell in straight:
        assert straight[cell].keys() == resumed[cell].keys()
        for name, value in straight[cell].items():
            assert value.tobytes() == resumed[cell][name].tobytes(), f"{cell} {name}"
    for cell in CELLS:
        values = [
            json.loads((folder / "cells" / f"{cell}.json").read_text())["values"]
            for folder in (whole, killed)
        ]
        for one in values:
            for name in ("tokens_per_second", "host_memory"):
                one.pop(name, None)
        assert values[0] == values[1]


@pytest.mark.slow
def test_faults_of_a_sweep_are_sentences(table, tmp_path):
    only = f"{table}:pretraining"
    process = begin(table, tmp_path, f"--config={only}")
    while not list(tmp_path.glob("cells/wide/seed-0/pretrain/checkpoints/[0-9]*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "error: stopped; the same command goes on" in end(process, 130)

    # another config, another number of devices
    printed = end(begin(table, tmp_path, f"--config={only}", "--config.train.batch_size=4"), 1)
    assert "error: --workdir=" in printed
    assert (
        "wide/seed-0/pretrain has another config: config.train.batch_size was 8, now 4" in printed
    )
    printed = end(begin(table, tmp_path, f"--config={only}", devices=3), 1)
    assert "error: 2 of 2 cells failed" in printed
    assert re.search(r"failed: wide/seed-0/pretrain: .*batch.*3", printed)

    assert "2 of 2 done" in end(begin(table, tmp_path, f"--config={only}"))
    # a damaged cell, found by what comes after it; the others go on
    for file in tmp_path.glob("cells/wide/seed-0/pretrain/checkpoints/*/params/**/*"):
        if file.is_file():
            file.write_bytes(b"")
    printed = end(begin(table, tmp_path), 1)
    assert "error: 1 of 4 cells failed" in printed
    assert re.search(r"failed: wide/seed-0/own: .*wide/seed-0/pretrain", printed)


@pytest.mark.slow
def test_jobs_of_submitit_share_the_work_and_are_put_back(table, tmp_path, monkeypatch):
    """Its executor for one machine starts a job again that was put back, as Slurm does."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("XLA_FLAGS", compiling.flags(1))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    executor = submitit.LocalExecutor(tmp_path / "slurm")
    executor.update_parameters(timeout_min=30, setup=[submission.set_path()], stderr_to_stdout=True)
    command = (sys.executable, str(SCRIPT), f"--config={table}", f"--workdir={tmp_path}")
    jobs = executor.submit_array([Job(command, str(table.parent))] * 2)
    lock = tmp_path / "cells/wide/seed-0/pretrain.lock"
    while not list(tmp_path.glob("cells/wide/seed-0/pretrain/checkpoints/[0-9]*")):
        assert not all(job.done() for job in jobs), [job.stdout() for job in jobs]
        time.sleep(0.05)
    runner = int(lock.read_text().split()[1])
    parent = int(pathlib.Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGUSR2)
    assert [job.results() for job in jobs] == [[None], [None]]
    printed = [job.stdout() for job in jobs]
    assert "Requeued job" in "".join(printed)
    assert "wide/seed-0/pretrain is stopped, its state is saved" in "".join(printed)
    assert "4 of 4 done" in "".join(printed)
    began = [cell for text in printed for cell in re.findall(r": (\S+) begins", text)]
    assert sorted(began) == sorted(CELLS)
    assert starts(tmp_path, CELLS[0]) == 2
