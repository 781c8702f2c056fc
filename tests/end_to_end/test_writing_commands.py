"""Commands on a translation model: scoring, streaming through a pipe, stopping and resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import convbert_jax
from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY, refused, run
from tests.runs import write_pairs

ENVIRONMENT = {**os.environ, "XLA_FLAGS": compiling.CHEAPLY}


@pytest.fixture(scope="module")
def folder(translated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("translator")
    shutil.copytree(translated.folder, folder / "run")
    return folder


@pytest.mark.slow
def test_a_translator_is_scored_on_a_test_set(folder):
    spec = write_pairs(folder, "test", 5, seed=7)
    scored = run(
        "--mode=eval",
        f"--workdir={folder}/run",
        f"--config.decoding.test_sources=2016={spec}",
        "--config.decoding.average=2",
    )
    assert scored.returncode == 0, scored.stderr
    kept = json.loads((folder / "run" / "evaluation" / "step-300.json").read_text())
    assert kept["scores"].keys() == {"validation", "2016"}
    for scores in kept["scores"].values():
        assert f"{scores['bleu']:.1f}" in scored.stdout
    for mode in ("export", "inspect"):
        refused(run(f"--mode={mode}", f"--workdir={folder}/run"), "translation")


@pytest.mark.slow
def test_a_line_of_a_pipe_has_its_answer_before_the_next_is_written(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", "--mode=predict", f"--workdir={folder}/run",
         "--input=-", "--config.decoding.beam=3"],
        cwd=REPOSITORY, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    first, third = convbert_jax.load(folder / "run").translate(["bo ce", "ha"], beam=3)
    for asked, answer in (("bo ce", first), ("", ""), ("ha", third)):
        process.stdin.write(asked + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == answer + "\n"
    rest, log = process.communicate(timeout=100)
    assert (process.returncode, rest) == (0, "")
    assert "line 2" in log  # the empty one


@pytest.mark.slow
def test_a_stopped_prediction_goes_on(folder):
    (folder / "many.txt").write_text("bo ce\n" * 4_000)
    command = ["--mode=predict", f"--workdir={folder}/run", f"--input={folder}/many.txt",
               f"--output={folder}/many.jsonl"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", *command],
        cwd=REPOSITORY, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    kept = folder / "many.jsonl.unfinished"
    while process.poll() is None and not (kept.is_file() and kept.stat().st_size):
        pass
    process.send_signal(signal.SIGINT)
    log = process.communicate(timeout=100)[1]
    assert process.returncode == 130, log
    done = len(kept.read_text().splitlines())
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert str(done) in again.stderr
    lines = [json.loads(line) for line in (folder / "many.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(4_000))
    assert {line["prediction"] for line in lines} == {
        convbert_jax.load(folder / "run").translate("bo ce")
    }
