"""launch/sweep.py as a process: kills, two concurrent workers, errors and exit codes."""

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

from convbert_jax.sweeps import cli
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.workdir import Workdir
from tests import compiling

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "sweep.py"
RUNS = [
    f"{variant}/seed-0/{stage}" for variant in ("wide", "narrow") for stage in ("pretrain", "own")
]
TABLE = """
from convbert_jax.sweeps import Sweep, Task, Variant

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
    widths = {{"wide": 64, "narrow": 32}}
    variants = {{name: Variant({{"model.ffn_size": width}}) for name, width in widths.items()}}
    tasks = {{"own": Task("text:own", TASK)}} if name == "both" else {{}}
    return Sweep("tiny", variants, seeds=(0,), changes=SMALL, tasks=tasks)
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pathlib.Path:
    """Writes a sweep of two 24-step pre-training runs, each followed by a fine-tuning run."""
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


def begin(table, workdir, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), f"--config={table}", f"--workdir={workdir}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=table.parent,
        env={**os.environ, "XLA_FLAGS": compiling.flags(1), "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )


def end(process: subprocess.Popen, code: int = 0) -> str:
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == code, printed
    return printed


def weights(workdir: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the last checkpoint of each pre-training run: parameters, optimizer, position."""
    runs = [run for run in RUNS if run.endswith("pretrain")]
    return {run: load_arrays(Workdir(workdir / "runs" / run).checkpoints, 24)[1] for run in runs}


def records(workdir: pathlib.Path) -> dict[str, str]:
    """Returns the records of finished runs as text."""
    texts = {run: workdir / "runs" / f"{run}.json" for run in RUNS}
    texts = {run: path.read_text() for run, path in texts.items() if path.exists()}
    return {run: text for run, text in texts.items() if json.loads(text)["state"] == "finished"}


def metrics(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns the metrics of finished runs, except speed and memory."""
    values = {run: json.loads(text)["values"] for run, text in records(workdir).items()}
    for of_run in values.values():
        for name in ("tokens_per_second", "host_memory"):
            of_run.pop(name, None)
    return values


def starts(workdir: pathlib.Path, run: str) -> int:
    log = (workdir / "runs" / f"{run}.log").read_text()
    return len(re.findall(r"Running .* on \d+ x", log))


def await_checkpoint(workdir: pathlib.Path, is_alive) -> None:
    while not list(workdir.glob("runs/wide/seed-0/pretrain/checkpoints/[0-9]*")):
        assert is_alive()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_sweep_survives_kills_and_is_shared(table, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    end(begin(table, whole))
    assert records(whole).keys() == set(RUNS)
    end(begin(table, whole))
    assert all(starts(whole, run) == 1 for run in RUNS)

    when = random.Random(7)
    finished: dict[str, str] = {}
    for _ in range(2):
        process = begin(table, killed)
        time.sleep(when.uniform(6, 16))
        # only the worker gets the signal; the process of its run must end too
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = records(killed)
        assert found.items() >= finished.items()
        finished = found
    both = [begin(table, killed), begin(table, killed)]
    printed = [end(process) for process in both]
    assert records(killed).items() >= finished.items()
    assert records(killed).keys() == set(RUNS)
    began = [run for text in printed for run in re.findall(r"\d of 4: (\S+);", text)]
    assert len(began) == len(set(began))
    assert not set(began) & set(finished)

    straight, resumed = weights(whole), weights(killed)
    for run in straight:
        assert straight[run].keys() == resumed[run].keys()
        for name, value in straight[run].items():
            assert value.tobytes() == resumed[run][name].tobytes(), f"{run} {name}"
    assert metrics(whole) == metrics(killed)


@pytest.mark.slow
def test_errors_of_a_sweep(table, tmp_path):
    only = f"--config={table}:pretraining"
    process = begin(table, tmp_path, only)
    await_checkpoint(tmp_path, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    end(process, 130)

    printed = end(begin(table, tmp_path, only, "--config.train.batch_size=4"), 1)
    assert "config.train.batch_size was 8, now 4" in printed
    end(begin(table, tmp_path, only))
    assert len(records(tmp_path)) == 2
    # a damaged checkpoint is found by its task; the other runs continue
    for file in tmp_path.glob("runs/wide/seed-0/pretrain/checkpoints/*/params/**/*"):
        if file.is_file():
            file.write_bytes(b"")
    printed = end(begin(table, tmp_path), 1)
    assert re.search(r"failed: wide/seed-0/own: .*wide/seed-0/pretrain", printed)
    assert len(records(tmp_path)) == 3


@pytest.mark.slow
def test_jobs_of_submitit_divide_the_runs_and_are_requeued(table, tmp_path, monkeypatch):
    """submitit's local executor requeues a job as Slurm does."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("XLA_FLAGS", compiling.flags(1))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    executor = submitit.LocalExecutor(tmp_path / "slurm")
    executor.update_parameters(timeout_min=30, setup=[cli.set_path()], stderr_to_stdout=True)
    command = (str(SCRIPT), f"--config={table}", f"--workdir={tmp_path}")
    jobs = executor.submit_array([cli.Worker(command, str(table.parent))] * 2)
    await_checkpoint(tmp_path, lambda: not all(job.done() for job in jobs))
    holder = (tmp_path / "runs/wide/seed-0/pretrain.lock").read_text()
    worker = pathlib.Path(f"/proc/{holder.split()[1]}/stat").read_text()
    os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGUSR2)  # the worker's parent
    assert [job.results() for job in jobs] == [[None], [None]]
    assert records(tmp_path).keys() == set(RUNS)
    assert {run: starts(tmp_path, run) for run in RUNS} == dict.fromkeys(RUNS, 1) | {RUNS[0]: 2}
