"""The command line as a user starts it.

Errors print one line, set a non-zero exit code and come before any long work.
"""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from absl.testing import flagsaver

from convbert_jax import command_line, console, main
from convbert_jax.training import checkpoints
from tests import compiling

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TINY = "--config=configs/tiny.py"
# A model that compiles fast; each test adds its own flags.
SMALL = (
    "--config.model.layers=1",
    "--config.model.hidden_size=32",
    "--config.model.embedding_size=32",
    "--config.model.heads=2",
    "--config.model.ffn_size=64",
    "--config.data.length=32",
    "--config.data.workers=1",
    "--config.data.heldout_fraction=0.1",
    "--config.tokenizer.vocab_size=200",
    "--config.train.batch_size=8",
    "--config.train.log_every=2",
    "--config.train.eval_every=4",
    "--config.train.eval_rows=16",
    "--config.checkpoint.every=2",
    "--config.optimizer.warmup_steps=1",
)


def run(*arguments, timeout=600, **environment):
    return subprocess.run(
        [sys.executable, "-m", "convbert_jax.main", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": compiling.CHEAPLY, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def text_source(tmp_path_factory):
    """Text of a few hundred paragraphs from the standard library."""
    import json.decoder
    import typing

    paragraphs = []
    for module in (json.decoder, typing, subprocess, pathlib):
        paragraphs += pathlib.Path(module.__file__).read_text().split("\n\n")
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    return f"--config.data.source=text:{file}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return prepared(config) -> the flag of a shard folder shared by all runs of a config."""
    folder = tmp_path_factory.mktemp("data")
    return lambda config: f"--config.data.directory={folder}/{config.partition(':')[2] or 'tiny'}"


def refused(result, *mentions):
    """Check that a command failed with exactly one line that starts with `error:`."""
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in mentions:
        assert part in lines[0]


def test_exit_codes_of_errors(tmp_path):
    """tests/test_command_line.py covers other command-line errors."""
    result = run(TINY, "--mode=tran")
    refused(result, "--mode=tran")
    assert result.returncode == 2
    source = "--config.data.source=text:/nowhere/*.txt"
    result = run(TINY, f"--workdir={tmp_path}/run", source)
    refused(result, "/nowhere/*.txt")
    assert result.returncode == 1
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.fixture
def started(monkeypatch):
    """Return started(*arguments), which runs a command in this process."""
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # would affect other tests

    def start(*arguments):
        with flagsaver.flagsaver():
            main.main(command_line.read(["main.py", *map(str, arguments)]))

    return start


@pytest.fixture
def refused_here(started, capsys):
    """Return refused_here(arguments, *mentions): runs a failing command in this process."""

    def start(arguments, *mentions):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            started(*arguments)
        (line,) = [li for li in capsys.readouterr().err.splitlines() if li.startswith("error:")]
        assert end.value.code == 1
        assert [part for part in mentions if part not in line] == []

    return start


def test_errors_before_long_work(refused_here, tmp_path):
    folder = f"--workdir={tmp_path}/run"
    refused_here((TINY, folder, "--config.platform=tpu"), "config.platform", "tpu", "cpu")
    (tmp_path / "file").write_text("")
    refused_here((TINY, f"--workdir={tmp_path}/file/run"), f"--workdir={tmp_path}/file/run")
    # there are 8 devices
    refused_here((TINY, folder, "--config.train.batch_size=6"), "config.train.batch_size=6")
    assert not (tmp_path / "run").exists()  # no data was prepared
    refused_here((TINY, folder, "--multihost"), "--coordinator")


def test_run_resume_and_refuse(started, refused_here, tmp_path, text_source, capsys):
    """A small run trains, reports, resumes for more steps, and refuses another model."""
    flags = (TINY, *SMALL, text_source, f"--workdir={tmp_path}/run")
    first = run(*flags, "--config.train.steps=4")
    assert first.returncode == 0, first.stderr
    assert "AUC" in first.stdout
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "run" / "config.json").exists()

    started(*flags, "--config.train.steps=8")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"train"' in line]
    assert steps == [2, 4, 6, 8]  # none missing, none repeated

    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "run/checkpoints").iterdir()}
    capsys.readouterr()
    started(f"--workdir={tmp_path}/run")  # the config is in the workdir; all steps are done
    assert "AUC" in capsys.readouterr().out
    assert files == {f: f.stat().st_mtime_ns for f in (tmp_path / "run/checkpoints").iterdir()}

    started(f"--workdir={tmp_path}/run", "--mode=eval", "--step=4")
    found = json.loads((tmp_path / "run/evaluation/step-4.json").read_text())
    (line,) = [json.loads(li) for li in lines if '"step": 4, "split": "validation"' in li]
    assert line.pop("split") == "validation"
    assert (found.pop("workdir"), found.pop("checkpoints")) == (f"{tmp_path}/run", [4])
    assert found.keys() == line.keys()
    for name, value in line.items():  # trained on 1 device, evaluated on 8
        assert found[name] == (value if value is None else pytest.approx(value, rel=1e-5)), name
    same = f"--workdir={tmp_path}/run"
    refused_here((same, "--mode=eval", f"--output={tmp_path}/run"), f"{tmp_path}/run")
    longer = (*flags, "--config.train.steps=8")
    refused_here((*longer, "--config.model.ffn_size=128"), "config.model.ffn_size", "64", "128")
    refused_here((*longer, "--config.tokenizer.vocab_size=300"), "config.tokenizer.vocab_size")


@pytest.mark.parametrize(
    "extra",
    [
        ("--config=configs/tiny.py:paper",),
        ("--config=configs/tiny.py:bert",),
        (TINY, "--config.recipe=masked_lm", "--config.model.mixer=bottleneck"),
        ("--config=configs/tiny.py:paper", "--config.optimizer.release_replicas=8"),
        (TINY, "--config.generator.kind=uniform"),
        (TINY, "--config.generator.kind=shared"),
        (TINY, "--config.generator.tie_embeddings=no", "--config.objective.disallow_correct=yes"),
        (TINY, "--config.compute_dtype=bfloat16", "--config.train.accumulation=2"),
    ],
    ids=["paper", "bert", "bottleneck", "replicas", "uniform", "shared", "untied", "bfloat16"],
)
@pytest.mark.slow
def test_every_kind_of_run(tmp_path, text_source, prepared, extra):
    config, *rest = extra
    where = (f"--workdir={tmp_path}/run", prepared(config))
    result = run(config, *SMALL, *rest, text_source, *where, "--config.train.steps=4")
    assert result.returncode == 0, result.stderr
    assert "masked tokens, loss" in result.stdout


@pytest.mark.slow
def test_verify_resume(tmp_path, text_source, prepared):
    result = run(
        TINY,
        *SMALL,
        text_source,
        prepared(TINY),
        f"--workdir={tmp_path}/run",
        "--mode=verify_resume",
        "--verify_steps=200",
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "bit for bit" in result.stdout


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path, text_source, prepared):
    """Two processes with two devices each give the metrics and parameters of one process.

    Parameters and moments are sharded over all four devices; each process holds half of them.
    """
    wide = (f"--config.model.{size}=128" for size in ("hidden_size", "embedding_size", "ffn_size"))
    flags = (
        TINY,
        *SMALL,
        *wide,  # kernels large enough to be sharded
        text_source,
        "--config.train.steps=4",
        "--config.model.dropout=0",
        "--config.model.attention_dropout=0",
        prepared(TINY),
    )
    alone = run(*flags, f"--workdir={tmp_path}/alone")
    assert alone.returncode == 0, alone.stderr

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (f"--workdir={tmp_path}/both", f"--coordinator=localhost:{port}", "--processes=2")
    shared = (*shared, "--config.mesh.fsdp=4", "--config.mesh.data=1")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(run, *flags, *shared, f"--process={index}", XLA_FLAGS=compiling.flags(2))
            for index in (0, 1)
        ]
        ends = [process.result() for process in both]
    for index, end in enumerate(ends):
        assert end.returncode == 0, end.stderr
        assert f"Process {index} of 2." in end.stderr
    (line,) = [line for line in ends[0].stderr.splitlines() if " 2 processes: " in line]
    assert "2 processes: 2 x 2 cpu devices, jax " in line
    assert line.endswith(", same config, same data.")
    one, two = (
        {(li["split"], li["step"]): li for li in map(json.loads, (tmp_path / name).open())}
        for name in ("alone/metrics.jsonl", "both/metrics.jsonl")
    )
    assert set(two) == set(one) == {("train", 2), ("train", 4), ("validation", 4)}
    for key in one:
        for name in ("loss", "mlm_loss", "discriminator_loss", "grad_norm"):
            if name in one[key]:
                assert two[key][name] == pytest.approx(one[key][name], rel=1e-4), (key, name)
    ours, theirs = (
        checkpoints.load_arrays(tmp_path / name / "checkpoints", 4)[1] for name in ("alone", "both")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name != "data":
            np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert ours["data"].tobytes() == theirs["data"].tobytes()
