"""A translator as a user calls it: trained, asked through a pipe line by line, scored, stopped."""

import json
import os
import signal
import subprocess
import sys

import pytest

import convbert_jax
from convbert_jax.config import to_dict
from convbert_jax.files import write_json
from convbert_jax.interop.matching import replace
from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY, refused, run
from tests.recipes.conftest import PAIRS, make_config, write_pairs

ENVIRONMENT = {**os.environ, "XLA_FLAGS": compiling.CHEAPLY}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run of a command line, and what it printed."""
    folder = tmp_path_factory.mktemp("translator")
    fields = {name.replace(".", "__"): value for name, value in PAIRS.items()}
    config = make_config(**fields, parallel__source=write_pairs(folder, "train", 600))
    write_json(folder / "config.json", to_dict(replace(config, {"train.log_every": 300})))
    done = run(f"--config={folder}/config.json", f"--workdir={folder}/run")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_translator_is_trained_asked_and_scored(trained):
    folder, printed = trained
    assert "BLEU" in printed
    assert "nrefs:1" in printed
    spec = write_pairs(folder, "test", 5, seed=7)
    scored = run(
        "--mode=eval",
        f"--workdir={folder}/run",
        f"--config.decoding.test_sources=2016={spec}",
        "--config.decoding.average=2",
    )
    assert scored.returncode == 0, scored.stderr
    assert "Written to 5 pairs of 2016: BLEU" in scored.stdout
    kept = json.loads((folder / "run" / "evaluation" / "step-300.json").read_text())
    assert kept["scores"].keys() == {"validation", "2016"}
    for mode in ("export", "inspect"):
        refused(run(f"--mode={mode}", f"--workdir={folder}/run"), "writes text")


@pytest.mark.slow
def test_a_line_of_a_pipe_has_its_answer_before_the_next_is_written(trained):
    folder, _ = trained
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
    assert "An empty line for row 1: line 2 is empty." in log


@pytest.mark.slow
def test_a_stopped_prediction_goes_on(trained):
    folder, _ = trained
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
    assert "interrupted; the same command goes on" in log
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert "Going on after" in again.stderr
    lines = [json.loads(line) for line in (folder / "many.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(4_000))
    assert {line["prediction"] for line in lines} == {
        convbert_jax.load(folder / "run").translate("bo ce")
    }
